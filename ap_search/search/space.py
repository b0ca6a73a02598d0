"""The space of a search: legal meshes crossed with the knobs, and a counted reason for each candidate that fell out."""

import math
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ap_search.errors import SpecError
from ap_search.plan.plan import Dispatcher, Plan, Schedule, Sharding
from ap_search.plan.table import IntArray, PlanTable
from ap_search.result import Rejection
from ap_search.search.domains import SearchDomains
from ap_search.search.rules import (
    MESH_AXES,
    RULES,
    STAGES,
    Dropped,
    Rule,
    RuleContext,
    applicable,
    check,
    rejections,
)
from ap_search.search.rules.columns import LayoutFor, complete
from ap_search.search.solver import enumerate_meshes

# The less is sharded the fewer rules stand against it; deduplicating dispatchers need a group.
_SHARDING_STAND_INS = (Sharding.ZERO1, Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3)
_DISPATCHER_STAND_INS = (Dispatcher.ALLTOALL, Dispatcher.ALLGATHER)
_Knob = TypeVar("_Knob", Sharding, Dispatcher)

MAX_MESHES = 4_000_000
MAX_PLANS = 8_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """What a search has to price.

    Attributes
    ----------
    table : PlanTable
        Every legal candidate, one row each.
    candidates : int
        Size of the product of all candidate lists: the rows of `table` and all that rules dropped.
    dropped : tuple of Dropped
        What each rule dropped as the first that was broken, in the order of the rules.
    rejections : tuple of Rejection
        The same as reasons, the largest count first.
    """

    table: PlanTable
    candidates: int
    dropped: tuple[Dropped, ...]
    rejections: tuple[Rejection, ...]


def search_context(context: RuleContext, domains: SearchDomains) -> RuleContext:
    """Name the knob values that stand for all where groups hold one device, so that no plan is listed twice.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    domains : SearchDomains
        Candidates: the stand-in is one of them.

    Returns
    -------
    RuleContext
    """
    return replace(
        context,
        sharding_of_one=_first_legal(context, "sharding", preferred=_SHARDING_STAND_INS, among=domains.sharding),
        dispatcher_of_one=_first_legal(
            context, "dispatcher", preferred=_DISPATCHER_STAND_INS, among=domains.dispatcher
        ),
    )


def _first_legal(
    context: RuleContext, knob: str, *, preferred: tuple[_Knob, ...], among: tuple[int, ...]
) -> _Knob | None:
    """Choose the first preferred candidate that no rule on the knob alone (a target's) refuses."""
    values = [value for value in preferred if value in among]
    alone = tuple(rule for rule in RULES if rule.reads == (knob,))
    table = complete(context, {knob: np.array(values, dtype=np.int64)}, rows=len(values))
    legal = check(context, table, alone).legal
    return next((value for value, fine in zip(values, legal, strict=True) if fine), None)


def build_table(
    context: RuleContext,
    domains: SearchDomains,
    *,
    layout_for: LayoutFor | None = None,
    rules: tuple[Rule, ...] = RULES,
) -> Space:
    """Cross the legal meshes with the knobs and keep what obeys every rule.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    domains : SearchDomains
        Candidates per axis and knob.
    layout_for : callable or None
        Layout of each pair (pp, vpp); None spreads layers simply.
    rules : tuple of Rule
        In the order of explanation.

    Returns
    -------
    Space
        `len(table) + sum(count of dropped) == candidates`.

    Raises
    ------
    SpecError
        The candidate lists make more combinations than can be held in memory.

    Notes
    -----
    A1. Axes are crossed stage by stage (`STAGES`), and a rule is applied as soon as all it reads is there: a candidate
    that falls out counts for all combinations of the knobs that are not crossed yet. So the product is never laid out,
    and the counts are those of the first broken rule in the list's order, which is by stage.
    A2. Meshes come from the integer solver; those that fall out are counted on the product of their candidate lists.
    """
    context = search_context(context, domains)
    crossing = _Crossing(context=context, domains=domains, layout_for=layout_for, rules=applicable(rules, context))
    table = crossing.cross_all()
    candidates = math.prod(_combinations(domains, stage) for stage in range(len(STAGES)))
    assert crossing.rows + sum(one.count for one in crossing.dropped) == candidates
    dropped = tuple(crossing.dropped)
    return Space(table=table, candidates=candidates, dropped=dropped, rejections=rejections(context, dropped, rules))


def legal_plans(context: RuleContext, domains: SearchDomains, *, layout_for: LayoutFor | None = None) -> PlanTable:
    """List the legal plans without a reason for the others, for a question that is asked of many worlds.

    Parameters
    ----------
    context, domains, layout_for
        As for `build_table`.

    Returns
    -------
    PlanTable
        The rows of `build_table`, in another order.

    Raises
    ------
    SpecError
        As for `build_table`.

    Notes
    -----
    A1. Meshes are those that the rules leave of the product of their candidates: the same as the integer solver's,
    sooner there for few candidates.
    """
    context = search_context(context, domains)
    rules = applicable(RULES, context)
    return _Crossing(context=context, domains=domains, layout_for=layout_for, rules=rules, solve=False).cross_all()


def _stage_lists(domains: SearchDomains, stage: int) -> dict[str, tuple[int, ...]]:
    """List the candidates of the axes that a stage crosses; axes that follow from others are left out."""
    return {axis: values for axis in STAGES[stage] if (values := getattr(domains, axis, ()))}


def _combinations(domains: SearchDomains, stage: int) -> int:
    """Count the combinations of the candidates that a stage crosses."""
    return math.prod(len(values) for values in _stage_lists(domains, stage).values())


def _implied_schedule(vpp: IntArray) -> IntArray:
    """Give the schedule of plans for which nobody named one."""
    return np.where(vpp > 1, int(Schedule.INTERLEAVED), int(Schedule.ONE_F_ONE_B))


@dataclass(slots=True, kw_only=True)
class _Crossing:
    """A search space under construction: the columns so far, and what fell out."""

    context: RuleContext
    domains: SearchDomains
    layout_for: LayoutFor | None
    rules: tuple[Rule, ...]
    columns: dict[str, IntArray] = field(default_factory=dict)
    rows: int = 1
    dropped: list[Dropped] = field(default_factory=list)
    solve: bool = True

    def cross_all(self) -> PlanTable:
        """Go through all stages and give the plans that are left."""
        for stage in range(len(STAGES)):
            self.advance(stage)
        return complete(self.context, self.columns, rows=self.rows, layout_for=self.layout_for)

    def advance(self, stage: int) -> None:
        """Cross the axes of a stage, apply its rules, count what falls out."""
        self._cross(stage)
        table = complete(self.context, self.columns, rows=self.rows, layout_for=self.layout_for)
        matrix = check(self.context, table, tuple(rule for rule in self.rules if rule.stage == stage))
        self._count(matrix.rules, matrix.first_blocker, stage=stage)
        if stage == 0 and self.solve:
            self._take_meshes(expected=int(matrix.legal.sum()))
        else:
            self._take(matrix.legal)

    def _cross(self, stage: int) -> None:
        """Repeat the rows for every combination of the stage's candidates."""
        lists = _stage_lists(self.domains, stage)
        size = _combinations(self.domains, stage)
        limit = MAX_PLANS if stage else MAX_MESHES
        if self.rows * size > limit:
            raise SpecError("--set", f"the candidates make more than {limit} combinations", "fewer values per axis")
        grids = np.meshgrid(*(np.array(values, dtype=np.int64) for values in lists.values()), indexing="ij")
        self.columns = {name: np.repeat(column, size) for name, column in self.columns.items()}
        self.columns |= {axis: np.tile(grid.ravel(), self.rows) for axis, grid in zip(lists, grids, strict=True)}
        self.rows *= size
        if "vpp" in self.columns and "schedule" not in self.columns:
            self.columns["schedule"] = _implied_schedule(self.columns["vpp"])

    def _count(self, rules: tuple[Rule, ...], first_blocker: IntArray, *, stage: int) -> None:
        """Record what each rule dropped, times the combinations of the knobs that are still to be crossed."""
        later = [
            values for after in range(stage + 1, len(STAGES)) for values in _stage_lists(self.domains, after).values()
        ]
        weight = math.prod(len(values) for values in later)
        for index, count in enumerate(np.bincount(first_blocker, minlength=len(rules))[: len(rules)]):
            if count:
                example = self._example(int(np.argmax(first_blocker == index)), stage=stage)
                self.dropped.append(Dropped(rule=rules[index], count=int(count) * weight, example=example))

    def _example(self, row: int, *, stage: int) -> Plan:
        """Complete one row with the first candidate of every knob that is still to be crossed."""
        given = {name: column[row : row + 1] for name, column in self.columns.items()}
        for after in range(stage + 1, len(STAGES)):
            given |= {axis: np.array(values[:1]) for axis, values in _stage_lists(self.domains, after).items()}
        if "schedule" not in given:
            given["schedule"] = _implied_schedule(given["vpp"])
        return complete(self.context, given, rows=1, layout_for=self.layout_for).row(0)

    def _take(self, legal: NDArray[np.bool_]) -> None:
        """Keep the legal rows."""
        self.columns = {name: column[legal] for name, column in self.columns.items()}
        self.rows = int(legal.sum())

    def _take_meshes(self, *, expected: int) -> None:
        """Replace the product of the mesh candidates by the legal meshes."""
        meshes = enumerate_meshes(self.context, self.domains, self.rules)
        assert len(meshes) == expected, f"the solver finds {len(meshes)} meshes, the rules {expected}"
        self.columns = {axis: getattr(meshes, axis) for axis in MESH_AXES}
        self.rows = len(meshes)
