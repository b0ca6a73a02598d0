"""Where the best measured plan of a group stands in the search's own ranking for the same job."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.rows import price_rows
from ap_search.fidelity.price import Progress, ReadyRun, load_forced, ready_run, run_context
from ap_search.fidelity.records import BestPlan, RankedGroup, RowResult, Space, Standing
from ap_search.plan.plan import Plan
from ap_search.plan.table import PlanTable
from ap_search.plan.text import SETTABLE, knob_text, plan_name
from ap_search.search.domains import search_domains
from ap_search.search.engine import rank, run_search
from ap_search.search.rules import RuleContext

Kept = tuple[tuple[str, tuple[int, ...]], ...]
# dp follows from the other axes, the schedule from vpp where nobody names one.
KNOBS = tuple(name for name in SETTABLE if name != "dp")
FREE_KNOBS = tuple(name for name in KNOBS if name != "schedule")
# Plans that are equally fast are not ahead, whatever the order in which their parts were added.
TIE_RATIO = 1e-9
IDENTITY = tuple(name for name in PlanTable.columns() if name != "layout")


def best_plans(
    groups: Sequence[RankedGroup], rows: Sequence[RowResult], *, software: str | None, progress: Progress
) -> tuple[BestPlan, ...]:
    """Rank all plans of each group's job, and find the best measured one among them.

    Parameters
    ----------
    groups : sequence of RankedGroup
        Groups that are rankings.
    rows : sequence of RowResult
        All rows; those of the groups are priced.
    software : str, optional
        The profile that `rows` were priced with; None where each run chose.
    progress : callable
        Told what is being done and which share of it is done, 0..1.

    Returns
    -------
    tuple of BestPlan
        In the order of `groups`.

    Notes
    -----
    A1. The job, software and machine are those of the run that was fastest.
    A2. Plans that differ in nothing but their layout are one plan: it has the seconds of the measured layout.
    A3. `held` keeps the axes and knobs in which all runs of the group agree, `tried` keeps each to the values that
    occur in the group; dp follows. Values that a source does not state count as those that the run is priced with.
    """
    found = []
    for place, group in enumerate(groups):
        progress("ranking measured plans", place / len(groups))
        members = [row for row in rows if row.label.group == group.group and row.step_error_ratio is not None]
        found.append(_best_plan(group, members, software))
    return tuple(found)


def _best_plan(group: RankedGroup, members: Sequence[RowResult], software: str | None) -> BestPlan:
    """Rank the plans of one group's job."""
    fastest = next(row for row in members if row.label.id == group.fastest)
    assert fastest.run is not None
    ready = ready_run(fastest.run, place=0, forced=load_forced(software), makers={})
    assert isinstance(ready, ReadyRun)
    price = price_rows(run_context(ready), PlanTable.from_plans([ready.plan]))
    step_s = float(price.step_s[0])
    tried = _tried([row.plan for row in members if row.plan is not None])
    spaces: dict[Space, Kept] = {
        Space.ALL: (),
        Space.HELD: tuple((knob, values) for knob, values in tried if len(values) == 1),
        Space.TRIED: tried,
    }
    return BestPlan(
        group=group.group,
        moe=group.moe,
        run=group.fastest,
        plan=plan_name(ready.plan),
        predicted_step_time_s=step_s,
        fits=float(price.stage_bytes[0].max()) <= ready.job.memory_limit_bytes,
        standings=tuple(_standing(space, ready, step_s, kept) for space, kept in spaces.items()),
    )


def _tried(plans: Sequence[Plan]) -> Kept:
    """Values of each axis and knob that occur in some plans."""
    return tuple((knob, tuple(sorted({int(getattr(plan, knob)) for plan in plans}))) for knob in KNOBS)


def _standing(space: Space, ready: ReadyRun, step_s: float, kept: Kept) -> Standing:
    """Search with some knobs kept, and place the measured plan."""
    context, plan = run_context(ready), ready.plan
    rules = RuleContext(model=context.model, machine=context.machine, job=context.job)
    found = run_search(rules, context, search_domains(rules, kept), top=1, progress=_quiet)
    others = (found.price.peak_bytes <= ready.job.memory_limit_bytes) & ~_same(found.table, plan)
    ahead = others & (found.price.step_s < step_s * (1 - TIE_RATIO))
    first = found.table.row(int(rank(found.price, ahead, 1)[0])) if ahead.any() else plan
    return Standing(
        space=space,
        kept=tuple(f"{knob}={','.join(knob_text(knob, value) for value in values)}" for knob, values in kept),
        rank=int(ahead.sum()) + 1,
        feasible=int(others.sum()) + 1,
        first=plan_name(first),
        lead_ratio=_lead_ratio(found.price.step_s[ahead], step_s),
        left=_left(found.table.take(ahead), found.price.step_s[ahead], plan, step_s),
    )


def _same(table: PlanTable, plan: Plan) -> NDArray[np.bool_]:
    """Rows that are the plan, under whatever layout."""
    same = np.ones(len(table), dtype=np.bool_)
    for name in IDENTITY:
        same &= getattr(table, name) == int(getattr(plan, name))
    return same


def _lead_ratio(ahead_s: NDArray[np.float64], step_s: float) -> float:
    """What a step takes longer than the fastest of those that are ahead of it."""
    return step_s / float(ahead_s.min()) - 1 if len(ahead_s) else 0.0


def _left(ahead: PlanTable, ahead_s: NDArray[np.float64], plan: Plan, step_s: float) -> tuple[tuple[str, float], ...]:
    """Lead of the plans ahead that keep the plan's value of one knob, for each knob that matters, the least first."""
    whole = _lead_ratio(ahead_s, step_s)
    leads = {
        knob: _lead_ratio(ahead_s[getattr(ahead, knob) == int(getattr(plan, knob))], step_s) for knob in FREE_KNOBS
    }
    return tuple(sorted(((knob, lead) for knob, lead in leads.items() if lead < whole), key=lambda pair: pair[1]))


def _quiet(what: str, share: float) -> None:
    """Report nothing: a search is a part of a part."""
