"""What imbalance costs one plan, and what it would cost with its experts placed otherwise."""

from dataclasses import replace

import numpy as np

from ap_search.cost.blocks import groups_loads
from ap_search.cost.context import CostContext
from ap_search.cost.details import price_plan
from ap_search.cost.shapes import block_shapes
from ap_search.plan.table import PlanTable
from ap_search.result import ImbalanceCost, OtherPlacement, PricedPlan
from ap_search.spec.job import Job, Load, PlacementPolicy


def with_imbalance(context: CostContext, priced: PricedPlan) -> PricedPlan:
    """Add what imbalance costs a priced plan in seconds and bytes, unless its load is balanced.

    Parameters
    ----------
    context : CostContext
        What the plan was priced with.
    priced : PricedPlan
        The plan.

    Returns
    -------
    PricedPlan
        With `imbalance`: its price less that at balanced load, and how the price changes with experts in order, under
        EPLB, and under EPLB with one redundant expert on each rank.

    Notes
    -----
    A1. Only the placement of experts changes; another plan may be the best under another placement.
    """
    job = context.job
    if job.load.shares is None:
        return priced
    balanced = _priced(context, priced, replace(job, load=Load()))
    return replace(
        priced,
        imbalance=ImbalanceCost(
            placement=job.placement.value,
            redundant_experts=job.redundant_experts,
            worst_rank_ratio_max=_worst_rank_ratio(context, priced),
            cost_s=priced.step_time_s - balanced.step_time_s,
            cost_bytes=priced.peak_memory_bytes - balanced.peak_memory_bytes,
            others=tuple(_other(context, priced, other) for other in _other_jobs(job, priced.plan.ep)),
        ),
    )


def _other_jobs(job: Job, ep: int) -> tuple[Job, ...]:
    """Other placements of the same job's experts, those that the job has left out."""
    if ep == 1:
        return ()
    wanted = ((PlacementPolicy.CONTIGUOUS, 0), (PlacementPolicy.EPLB, 0), (PlacementPolicy.EPLB, ep))
    mine = (job.placement, job.redundant_experts)
    return tuple(
        replace(job, placement=placement, redundant_experts=copies)
        for placement, copies in wanted
        if (placement, copies) != mine
    )


def _other(context: CostContext, priced: PricedPlan, job: Job) -> OtherPlacement:
    """How a plan's price changes under another placement."""
    other = _priced(context, priced, job)
    return OtherPlacement(
        placement=job.placement.value,
        redundant_experts=job.redundant_experts,
        worst_rank_ratio_max=_worst_rank_ratio(replace(context, job=job, rank_loads=None), priced),
        gain_s=priced.step_time_s - other.step_time_s,
        gain_bytes=priced.peak_memory_bytes - other.peak_memory_bytes,
    )


def _priced(context: CostContext, priced: PricedPlan, job: Job) -> PricedPlan:
    """Price the same plan for another job."""
    return price_plan(replace(context, job=job, rank_loads=None), priced.plan)


def _worst_rank_ratio(context: CostContext, priced: PricedPlan) -> float:
    """Load of the busiest rank of any layer over the mean."""
    shapes = block_shapes(context.machine, context.job, PlanTable.from_plans([priced.plan]))
    loads = context.rank_loads or groups_loads(context, shapes)
    rows = range(len(loads.received_ratio))
    domains = np.asarray(shapes.ep_place.domains)
    return float(max(loads.received_by(row, ep=shapes.ep, domains=domains)[0] for row in rows))
