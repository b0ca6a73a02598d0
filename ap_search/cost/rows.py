"""Many plans in some detail: seconds of a step and of its parts, bytes of every stage; arrays over plans."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.group import PlanGroup, plan_group
from ap_search.cost.parts import Part
from ap_search.cost.prepared import prepare
from ap_search.cost.stage_memory import stage_bytes
from ap_search.cost.stages import StageRun, stage_runs
from ap_search.cost.step import GroupTime, group_time, plan_rows
from ap_search.plan.table import PlanTable
from ap_search.result import TimeBreakdown

FloatArray = NDArray[np.float64]
PARTS = tuple(field.name for field in fields(TimeBreakdown))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPrice:
    """Prices of a table's plans.

    Attributes
    ----------
    step_s : FloatArray
        Seconds of a step, shape (plans,).
    parts_s : FloatArray
        Exposed seconds of each part of `TimeBreakdown`, in its order, shape (parts, plans); they sum to the step.
    stage_bytes : tuple of FloatArray
        Per plan, bytes of each pipeline stage at its worst moment, the job's reserve included, shape (pp,).
    """

    step_s: FloatArray
    parts_s: FloatArray
    stage_bytes: tuple[FloatArray, ...]

    def breakdown(self, row: int) -> TimeBreakdown:
        """Seconds per part of one plan."""
        return as_breakdown(self.parts_s[:, row])


def as_breakdown(parts_s: FloatArray) -> TimeBreakdown:
    """Name the seconds of each part.

    Parameters
    ----------
    parts_s : FloatArray
        In the order of `TimeBreakdown`, shape (parts,).

    Returns
    -------
    TimeBreakdown
    """
    return TimeBreakdown(**dict(zip(PARTS, parts_s.tolist(), strict=True)))


def price_rows(context: CostContext, table: PlanTable) -> RowPrice:
    """Price plans of one job with their parts and stages: seconds, bytes.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    table : PlanTable
        Plans; layouts must place all layers of the model.

    Returns
    -------
    RowPrice
        The figures of `price_plan`, bytes not rounded.

    Source: as `price_plan`.
    """
    prepared = prepare(context, table)
    step = np.empty(len(table))
    parts = np.empty((len(PARTS), len(table)))
    stages: list[FloatArray] = [np.empty(0)] * len(table)
    for rows in plan_rows(table):
        group = plan_group(prepared, rows)
        runs = stage_runs(group.context.model, group.layout, schedule=group.schedule, every=True)
        sizes = np.stack([stage_bytes(group, run).total for run in runs], axis=1)
        timed = group_time(group, runs)
        step[rows], parts[:, rows] = timed.step_s, exposed_parts_s(group, runs, timed)
        for row, size in zip(rows, sizes, strict=True):
            stages[row] = size
    return RowPrice(step_s=step, parts_s=parts, stage_bytes=tuple(stages))


def exposed_parts_s(group: PlanGroup, runs: tuple[StageRun, ...], timed: GroupTime) -> FloatArray:
    """Exposed seconds of each part of a step on its critical stage, shape (parts, plans), as `TimeBreakdown` has them.

    Parameters
    ----------
    group : PlanGroup
        Plans that share a layout and a schedule.
    runs : tuple of StageRun
        Their stages.
    timed : GroupTime
        What `group_time` gave for them.

    Returns
    -------
    FloatArray

    Source: docs/cost-model/pipeline.md.
    """
    critical, plans = timed.span.critical, np.arange(len(group.rows))
    blocks = np.stack([time.forward + time.backward for time in group.prepared.blocks.times])
    counts = np.stack([run.counts * run.share for run in runs])[critical] * group.table.num_microbatches[:, None]
    parts = np.einsum("ub,bpu->pu", counts, blocks[:, :, group.prepared.shape_of[group.rows]])
    each = np.stack([stage.replica_each for stage in timed.seconds])[critical, plans]
    once = np.stack([stage.replica_once for stage in timed.seconds])[timed.last, plans]
    optimizer = np.stack([stage.optimizer for stage in timed.seconds])[timed.last, plans]
    added = np.stack([stage.addition for stage in timed.seconds])[critical, plans]
    seconds = {f"{part.name.lower()}_s": parts[part] for part in Part}
    seconds["other_s"] = seconds["other_s"] + added * group.table.num_microbatches
    seconds["dispatch_s"] = seconds["dispatch_s"] - timed.paired[0]
    seconds["combine_s"] = seconds["combine_s"] - timed.paired[1]
    seconds |= {"pp_comm_s": timed.span.hop_s, "bubble_s": timed.span.bubble_s, "optimizer_s": optimizer}
    seconds["dp_comm_s"] = each * group.table.num_microbatches + once
    return np.stack([seconds[name] for name in PARTS])
