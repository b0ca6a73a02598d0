"""The search: legal plans from the solver, priced in arrays, ranked; what was dropped is counted and named."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.alternatives import with_imbalance
from ap_search.cost.context import CostContext
from ap_search.cost.details import price_plan
from ap_search.cost.prepared import with_rank_loads
from ap_search.cost.step import TablePrice, price_table
from ap_search.plan.table import PlanTable
from ap_search.plan.text import plan_name
from ap_search.result import Lever, Optimality, PricedPlan, Rejection, Violation
from ap_search.search.domains import SearchDomains
from ap_search.search.layouts import layout_maker
from ap_search.search.rules import MEMORY_LIMIT_ID, MEMORY_LIMIT_SENTENCE, RuleContext
from ap_search.search.space import build_table
from ap_search.units import bytes_to_gib

Progress = Callable[[str, float], None]
CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking:
    """What a search found: priced legal plans, the best of those that fit, and why the others fell out.

    `nearest` is the legal plan that needs the least memory, None where no plan is legal.
    """

    table: PlanTable
    price: TablePrice
    candidates: int
    feasible: int
    plans: tuple[PricedPlan, ...]
    rejections: tuple[Rejection, ...]
    optimality: Optimality
    nearest: PricedPlan | None


def price_in_chunks(context: CostContext, table: PlanTable, progress: Progress) -> TablePrice:
    """Price a table some ten thousand rows at a time, so that memory stays small: seconds and bytes per plan.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    table : PlanTable
        Legal plans.
    progress : callable
        Told what is being done and which share of it is done, 0..1.

    Returns
    -------
    TablePrice
        One entry per plan.

    Notes
    -----
    A1. Chunks follow layouts, so that each layout is assembled few times.
    """
    order = np.argsort(table.layout, kind="stable")
    step, peak = np.empty(len(table)), np.empty(len(table))
    for start in range(0, len(table), CHUNK_ROWS):
        rows = order[start : start + CHUNK_ROWS]
        price = price_table(context, table.take(rows), limit_bytes=context.job.memory_limit_bytes)
        step[rows], peak[rows] = price.step_s, price.peak_bytes
        progress("pricing plans", min(1.0, (start + CHUNK_ROWS) / len(table)))
    return TablePrice(step_s=step, peak_bytes=peak)


def rank(price: TablePrice, fits: NDArray[np.bool_], top: int) -> NDArray[np.int64]:
    """Order the plans that fit by seconds, then by bytes, and keep the first ones (row numbers)."""
    rows = np.flatnonzero(fits)
    step, peak = price.step_s[rows], price.peak_bytes[rows]
    if len(rows) > top:
        bound = np.partition(step, top - 1)[top - 1]
        keep = step <= bound
        rows, step, peak = rows[keep], step[keep], peak[keep]
    return rows[np.lexsort((rows, peak, step))][:top]


def memory_violation(context: CostContext, plan: PricedPlan, *, levers: tuple[Lever, ...] = ()) -> Violation | None:
    """Say that a priced plan needs more than a device has, or return None where it fits (bytes).

    Parameters
    ----------
    context : CostContext
        Its job names the limit.
    plan : PricedPlan
        A priced plan.
    levers : tuple of Lever
        What would make it smaller.

    Returns
    -------
    Violation or None
        Names stage, moment and largest tensors.
    """
    need, limit = plan.memory.peak_bytes, context.job.memory_limit_bytes
    if need <= limit:
        return None
    stage = plan.memory.peak_stage
    tensors = ", ".join(f"{name} {bytes_to_gib(size):.1f}" for name, size in stage.largest)
    moment = stage.moment.replace("_", " ")
    text = f"stage {stage.stage} needs {bytes_to_gib(need):.1f} of {bytes_to_gib(limit):.1f} GiB at {moment}"
    return Violation(
        rule_id=MEMORY_LIMIT_ID,
        message=f"{text}; largest, GiB: {tensors}",
        demand=float(need),
        bound=float(limit),
        unit="bytes",
        levers=levers,
    )


def _limit_lever(need_gib: float, limit_gib: float) -> Lever:
    """Name the limit that would do, rounded up."""
    wanted = ceil(need_gib * 10.0) / 10.0
    return Lever(change=f"--memory-limit-gib {wanted:.1f}", effect=f"{need_gib - limit_gib:.2f} GiB more per device")


def _memory_rejection(context: CostContext, table: PlanTable, price: TablePrice) -> tuple[Rejection, ...]:
    """Count the legal plans that do not fit, with the nearest of them as example."""
    over = price.peak_bytes > context.job.memory_limit_bytes
    if not over.any():
        return ()
    rows = np.flatnonzero(over)
    nearest = rows[price.peak_bytes[rows].argmin()]
    need, limit = bytes_to_gib(float(price.peak_bytes[nearest])), bytes_to_gib(context.job.memory_limit_bytes)
    name = plan_name(table.row(int(nearest)))
    return (
        Rejection(
            rule_id=MEMORY_LIMIT_ID,
            count=int(over.sum()),
            message=f"{MEMORY_LIMIT_SENTENCE} (limit {limit:.1f} GiB)",
            example=f"nearest: {name} needs {need:.1f} GiB",
            levers=(_limit_lever(need, limit),),
        ),
    )


def run_search(
    rules: RuleContext, context: CostContext, domains: SearchDomains, *, top: int, progress: Progress
) -> Ranking:
    """Search the whole space: enumerate, price, rank.

    Parameters
    ----------
    rules : RuleContext
        What makes a plan legal.
    context : CostContext
        What plans are priced with.
    domains : SearchDomains
        Candidates of every axis and knob; nothing outside is returned.
    top : int
        Plans to return, >= 1.
    progress : callable
        Told what is being done and which share of it is done, 0..1.

    Returns
    -------
    Ranking
        The best plans first, the first one with what imbalance costs; equal times are ordered by memory.

    Notes
    -----
    A1. Exhaustive: every legal combination of the candidates is priced, so the first plan is the best of them under the
        cost model, with no gap.
    """
    progress("enumerating meshes", 0.0)
    space = build_table(rules, domains, layout_for=layout_maker(context))
    table = space.table
    context = with_rank_loads(context, table)
    price = price_in_chunks(context, table, progress)
    fits = price.peak_bytes <= context.job.memory_limit_bytes
    best = rank(price, fits, top)
    plans = tuple(price_plan(context, table.row(int(row)), rank=place + 1) for place, row in enumerate(best))
    if plans:
        plans = (with_imbalance(context, plans[0]), *plans[1:])
    return Ranking(
        table=table,
        price=price,
        candidates=space.candidates,
        feasible=int(fits.sum()),
        plans=plans,
        rejections=(*_memory_rejection(context, table, price), *space.rejections),
        optimality=_optimality(plans, len(table), space.candidates),
        nearest=None if plans or not len(table) else _nearest(context, table, price),
    )


def _nearest(context: CostContext, table: PlanTable, price: TablePrice) -> PricedPlan:
    """Price the legal plan that needs the least memory, with the violation that keeps it out."""
    plan = table.row(int(price.peak_bytes.argmin()))
    priced = price_plan(context, plan)
    violation = memory_violation(context, priced)
    return priced if violation is None else price_plan(context, plan, violations=(violation,))


def _optimality(plans: tuple[PricedPlan, ...], priced: int, candidates: int) -> Optimality:
    """State what is proven: the space was searched whole."""
    if not plans:
        return Optimality(
            statement=f"none of {candidates:,} candidates is legal and fits; all were looked at", exhaustive=True
        )
    return Optimality(
        statement=(
            f"the best of all {candidates:,} candidates under this cost model: "
            f"each of the {priced:,} legal ones was priced"
        ),
        exhaustive=True,
        lower_bound_s=plans[0].step_time_s,
        gap_ratio=0.0,
    )
