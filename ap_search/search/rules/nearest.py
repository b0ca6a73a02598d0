"""The nearest legal values of a broken rule, as levers."""

import numpy as np

from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.plan.table import IntArray, PlanTable
from ap_search.plan.text import knob_text
from ap_search.result import Lever
from ap_search.search.rules.base import Rule, RuleContext, applicable
from ap_search.search.rules.columns import vary

_LOOK_AT = 24

_ENUMERATIONS = {"sharding": Sharding, "dispatcher": Dispatcher, "schedule": Schedule}


def levers(context: RuleContext, rule: Rule, plan: Plan, *, rules: tuple[Rule, ...]) -> tuple[Lever, ...]:
    """Name the nearest values of each lever of a rule that are legal for it.

    Parameters
    ----------
    context : RuleContext
        What the plan is judged against.
    rule : Rule
        A rule that the plan breaks.
    plan : Plan
        The plan.
    rules : tuple of Rule
        All rules: values that break none that the plan keeps are preferred.

    Returns
    -------
    tuple of Lever
        One per axis that alone can mend the rule, such as `ep=2 or ep=4`, then changes of the job.
    """
    others = tuple(other for other in applicable(rules, context) if other is not rule)
    found = (_lever(context, rule, plan, axis=axis, others=others) for axis in rule.levers)
    return tuple(lever for lever in found if lever is not None) + rule.job_levers(context, plan)


def _lever(context: RuleContext, rule: Rule, plan: Plan, *, axis: str, others: tuple[Rule, ...]) -> Lever | None:
    """Find the values of one axis nearest to the plan's, below and above (all of a knob's)."""
    values = _candidates(context, plan, axis)
    values = values[rule.margin(context, vary(context, plan, axis=axis, values=values)) >= 0][:_LOOK_AT]
    if not len(values):
        return None
    table = vary(context, plan, axis=axis, values=values)
    before = PlanTable.from_plans([plan])
    broken = np.array([other.margin(context, table) < 0 for other in others]).reshape(len(others), len(values))
    was_broken = np.array([other.margin(context, before)[0] < 0 for other in others], dtype=np.bool_)
    new_faults = (broken & ~was_broken[:, None]).sum(axis=0)
    keep = new_faults == new_faults.min()
    chosen = _nearest(values[keep], current=int(getattr(plan, axis)), axis=axis)
    key = "sp" if axis == "sequence_parallel" else axis
    change = " or ".join(f"{key}={knob_text(key, value)}" for value in chosen)
    return Lever(change=change, effect=f"{rule.id} holds" if broken[:, keep].any() else "every rule holds")


def _candidates(context: RuleContext, plan: Plan, axis: str) -> IntArray:
    """List an axis' other values, nearest to the plan's first."""
    current = int(getattr(plan, axis))
    if axis == "recompute":
        values = np.arange(2 * Recompute.FULL, dtype=np.int64)
        changed = np.array([int(value ^ current).bit_count() for value in values])
    elif axis in (*_ENUMERATIONS, "sequence_parallel"):
        values = np.arange(len(_ENUMERATIONS.get(axis, (0, 1))), dtype=np.int64)
        changed = np.abs(values - current)
    else:
        values = np.arange(1, _largest(context, axis) + 1, dtype=np.int64)
        changed = np.abs(values - current)
    order = np.argsort(changed, kind="stable")
    return values[order][changed[order] > 0]


def _largest(context: RuleContext, axis: str) -> int:
    """Bound the values of an axis that are worth a look."""
    if axis == "mbs":
        return context.job.global_batch
    layers = context.model.num_layers
    return min(layers, context.job.devices) if axis == "pp" else layers if axis == "vpp" else context.job.devices


def _nearest(values: IntArray, *, current: int, axis: str) -> list[int]:
    """Take the nearest value below and above of a degree; of a knob, all (of recompute, the one nearest)."""
    ordered = [int(value) for value in values]
    if axis == "recompute":
        return ordered[:1]
    if axis in (*_ENUMERATIONS, "sequence_parallel"):
        return sorted(ordered)
    below = [value for value in ordered if value < current][:1]
    above = [value for value in ordered if value > current][:1]
    return below + above
