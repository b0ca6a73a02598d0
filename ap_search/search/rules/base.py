"""What a rule is: id, sentence, source, margin over many plans, words for one plan, and how a solver posts it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.plan import Dispatcher, Plan, Sharding
from ap_search.plan.table import IntArray, PlanTable
from ap_search.result import Lever
from ap_search.spec.blocks import Model
from ap_search.spec.job import Job, Target
from ap_search.spec.machine import Machine

MESH_AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "edp")
STAGES: tuple[tuple[str, ...], ...] = (
    MESH_AXES,
    ("mbs",),
    ("vpp", "schedule"),
    ("sharding",),
    ("dispatcher",),
    ("recompute",),
)
"""The order in which a search crosses axes; a rule is applied at the first stage that has all it reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuleContext:
    """What a plan is judged against.

    Attributes
    ----------
    explicit_layout : bool
        Whether an uneven layout has been asked for (a user's `stage_layers`, or a search, which prints its own); False
        where a plan names no layout, and an uneven split would be a guess.
    given_layout : bool
        Whether the layout is the user's own `stage_layers`: then virtual stages may stay empty.
    sharding_of_one : Sharding or None
        In a search, the sharding that stands for all of them where every data-parallel group holds one device.
    dispatcher_of_one : Dispatcher or None
        In a search, the dispatcher that stands for all of them where the expert group holds one device.
    """

    model: Model
    machine: Machine
    job: Job
    explicit_layout: bool = True
    given_layout: bool = False
    sharding_of_one: Sharding | None = None
    dispatcher_of_one: Dispatcher | None = None


class MeshPoster(Protocol):
    """What a rule may say to a solver whose variables are the degrees of the mesh axes."""

    def keep(self, axis: str, legal: Callable[[int], bool]) -> None:
        """Demand a degree of `axis` for which `legal` is true."""

    def divide(self, axes: tuple[str, ...], value: int) -> None:
        """Demand that the product of `axes` divides `value`."""

    def equal(self, axes: tuple[str, ...], value: int) -> None:
        """Demand that the product of `axes` is `value`."""

    def tile(self, axes: tuple[str, ...], whole: tuple[str, ...]) -> None:
        """Demand that the product of `axes` divides the product of `whole`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """How one plan breaks one rule: a sentence with the values, what is demanded, what is allowed, in which unit."""

    text: str
    demand: float
    bound: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """One constraint on plans, the same object for the search, the solver, the tests and the explanation.

    Attributes
    ----------
    id : str
        Stable name in snake case.
    sentence : str
        What holds, in plain English.
    source : str
        Requirement, framework file or measurement that says so.
    reads : tuple of str
        Axes and knobs that it depends on; derived columns count as the axes that they follow from.
    margin : callable
        Per plan: at least 0 where the rule holds, otherwise negative, how far it is broken. Shape (plans,).
    describe : callable
        The broken rule in words for one plan.
    levers : tuple of str
        Axes and knobs whose nearest legal values are worth naming, the likeliest first.
    job_levers : callable
        Changes of the job (batch, sequence, devices) that would mend it.
    post : callable or None
        How to post it to a solver of meshes; None where the solver may tabulate the margin instead.
    target : Target or None
        The framework whose rule it is; None for all.
    """

    id: str
    sentence: str
    source: str
    reads: tuple[str, ...]
    margin: Callable[[RuleContext, PlanTable], IntArray]
    describe: Callable[[RuleContext, Plan], Broken]
    levers: tuple[str, ...] = ()
    job_levers: Callable[[RuleContext, Plan], tuple[Lever, ...]] = lambda context, plan: ()
    post: Callable[[RuleContext, MeshPoster], None] | None = None
    target: Target | None = None

    @property
    def stage(self) -> int:
        """The first stage of `STAGES` at which everything that the rule reads is known."""
        return max((number for number, axes in enumerate(STAGES) if set(axes) & set(self.reads)), default=0)


def applicable(rules: tuple[Rule, ...], context: RuleContext) -> tuple[Rule, ...]:
    """Leave out the rules of other targets than the job's."""
    return tuple(rule for rule in rules if rule.target in (None, context.job.target))


def holds_everywhere(table: PlanTable) -> IntArray:
    """Margin of a rule that has nothing to say: 0 per plan, shape (plans,)."""
    return np.zeros(len(table), dtype=np.int64)


def not_multiple(value: IntArray | int, divisor: IntArray | int) -> IntArray:
    """Margin of `divisor divides value`: minus the remainder."""
    return np.asarray(-(np.asarray(value) % divisor), dtype=np.int64)


def worst(margins: list[IntArray], table: PlanTable) -> IntArray:
    """Margin of several demands that must all hold: the least."""
    return np.minimum.reduce(margins) if margins else holds_everywhere(table)


def unless(condition: NDArray[np.bool_] | bool, table: PlanTable, shortfall: IntArray | int = 1) -> IntArray:
    """Margin of a demand that is met where `condition` is true and missed by `shortfall` elsewhere."""
    return np.where(np.broadcast_to(condition, len(table)), 0, -np.maximum(shortfall, 1)).astype(np.int64)


def nearest_multiples(name: str, value: int, unit: int) -> tuple[Lever, ...]:
    """Name the multiples of `unit` just below and above `value`, as one lever on a figure of the job."""
    below = value // unit * unit
    choices = [str(multiple) for multiple in (below, below + unit) if multiple > 0 and multiple != value]
    return (Lever(change=" or ".join(f"{name}={choice}" for choice in choices), effect=f"a multiple of {unit}"),)
