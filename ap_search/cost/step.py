"""One step of many plans: stages assembled into seconds and peak bytes. The only place where prices come together."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.collective import point_to_point_time_s
from ap_search.cost.context import CostContext
from ap_search.cost.data_parallel import (
    ReplicaComm,
    exposed_replica_comm,
    gradient_addition_s,
    optimizer_time_s,
    replica_comm,
)
from ap_search.cost.group import PlanGroup, plan_group
from ap_search.cost.in_flight import interleave_group
from ap_search.cost.overlap import overlap_ratio, paired_microbatches
from ap_search.cost.pipeline import Makespan, StageTimes, makespan, one_f_one_b_span_s
from ap_search.cost.prepared import prepare
from ap_search.cost.redundant import redundant_comm, redundant_shares
from ap_search.cost.stage_memory import stage_bytes
from ap_search.cost.stages import StageRun, stage_runs
from ap_search.plan.mesh import pipeline_hop_placement
from ap_search.plan.plan import Schedule
from ap_search.plan.table import PlanTable
from ap_search.units import BF16_BYTES

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSeconds:
    """Seconds of one stage for plans that share a layout, arrays of shape (plans,).

    `forward`, `backward`, `weight_grad` are one micro-batch's compute with its exposed communication inside blocks;
    `addition` the part of `backward` that adds 16-bit gradients to the main ones, which no block holds;
    `replica_each` and `replica_once` exposed data-parallel communication per micro-batch and per step; `optimizer` per
    step; `paired` (2, plans) dispatch and combine that hide where a forward runs into a backward.
    """

    forward: FloatArray
    backward: FloatArray
    weight_grad: FloatArray
    addition: FloatArray
    replica: ReplicaComm
    replica_each: FloatArray
    replica_once: FloatArray
    optimizer: FloatArray
    paired: FloatArray

    @property
    def together(self) -> FloatArray:
        """A forward and a backward run into each other."""
        both: FloatArray = self.forward + self.backward + self.replica_each - self.paired.sum(axis=0)
        return both

    @property
    def once(self) -> FloatArray:
        """Per step, after the pipeline has drained."""
        return self.replica_once + self.optimizer


def stage_seconds(group: PlanGroup, run: StageRun) -> StageSeconds:
    """Time of one stage per micro-batch and per step, seconds.

    Parameters
    ----------
    group : PlanGroup
        Plans that share a layout and a schedule.
    run : StageRun
        The stage.

    Returns
    -------
    StageSeconds
        One entry per plan.

    Notes
    -----
    A1. Stage cost = counts of blocks x cost of a block; a DualPipe device sees half of the micro-batches per stage.

    Source: docs/cost-model/pipeline.md, docs/cost-model/data-parallel.md.
    """
    context, params, counts = group.context, group.params, run.counts
    forward, backward, weight_grad = (
        ((counts * run.share) @ array)[group.shape_of]
        for array in (group.forward_s, group.backward_s, group.weight_grad_s)
    )
    dense = ((params.dense + params.router) @ counts)[group.params_of]
    expert = (params.expert @ counts)[group.params_of]
    addition = np.asarray(run.share * gradient_addition_s(context, dense + expert))
    backward = backward + addition
    sharding = group.table.sharding
    comm = replica_comm(context, params=dense, sharding=sharding, group=group.dense)
    if expert.any():
        comm = comm.plus(replica_comm(context, params=expert, sharding=sharding, group=group.expert))
    if expert.any() and context.job.redundant_experts:
        comm = comm.plus(_copies_comm(group, run))
    comm = comm.seen_by(run.share)
    exposed = exposed_replica_comm(context, comm, forward_s=forward, backward_s=backward)
    kept = dense / group.dense.degrees.optimizer + expert / group.expert.degrees.optimizer
    return StageSeconds(
        forward=forward,
        backward=backward,
        weight_grad=weight_grad,
        addition=addition,
        replica=comm,
        replica_each=np.asarray(exposed.each_s),
        replica_once=np.asarray(exposed.once_s),
        optimizer=np.asarray(optimizer_time_s(context, kept)),
        paired=_paired(group, run),
    )


def _copies_comm(group: PlanGroup, run: StageRun) -> ReplicaComm:
    """Gradient synchronisation of one stage's redundant experts."""
    share = redundant_shares(group.context.model, group.context.job.redundant_experts)
    return redundant_comm(
        group.context,
        params=(group.params.expert @ (run.counts * share))[group.params_of],
        split=group.expert.degrees.optimizer,
        ep=group.table.ep,
        domains=group.domains[group.shape_of],
    )


def _paired(group: PlanGroup, run: StageRun) -> FloatArray:
    """Dispatch and combine of one stage that the schedule hides per pair of micro-batches, shape (2, plans)."""
    ratio = overlap_ratio(group.context, group.schedule, group.layout.pp)
    if not ratio:
        return np.zeros((2, len(group.rows)))
    paired: FloatArray = ratio * np.tensordot(run.counts * run.share, group.paired_s, axes=1)[:, group.shape_of]
    return paired


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTime:
    """Time of plans that share a layout and a schedule: each run of stages, the pipeline, the end of the step.

    `last` is the run whose reduction and optimizer end the step, `once` their seconds; `paired` (2, plans) seconds of
    dispatch and combine that the critical stage hides behind other micro-batches in a step.
    `paired_by_run` (runs, 2, plans) the same of every stage.
    """

    seconds: tuple[StageSeconds, ...]
    span: Makespan
    last: IntArray
    once: FloatArray
    paired: FloatArray
    paired_by_run: FloatArray

    @property
    def step_s(self) -> FloatArray:
        """Seconds of a step."""
        return self.span.total_s + self.once


def hop_time_s(group: PlanGroup) -> FloatArray:
    """Time of one transfer between neighbouring stages, seconds per hop.

    Parameters
    ----------
    group : PlanGroup
        Plans that share a layout and a schedule.

    Returns
    -------
    FloatArray
        0 where pp = 1.

    Notes
    -----
    A1. The slowest hop (one that leaves the scale-up domain, if any does) stands for all.

    Source: Megatron-LM `schedules.py` get_tensor_shapes (tokens / cp / tp with sequence parallelism, bf16).
    """
    context, pp = group.context, group.layout.pp
    if pp == 1:
        return np.zeros(len(group.rows))
    domain = context.machine.domain_size(context.job.devices)
    crosses = pipeline_hop_placement(pp, world=context.job.devices, domain_size=domain)
    size = group.local_tokens * context.model.hidden_size * BF16_BYTES
    return np.asarray(point_to_point_time_s(context.machine, size_bytes=size, crosses_domain=crosses))[group.shape_of]


def group_time(group: PlanGroup, runs: tuple[StageRun, ...]) -> GroupTime:
    """Time of a step for plans that share a layout and a schedule, seconds.

    Parameters
    ----------
    group : PlanGroup
        The plans.
    runs : tuple of StageRun
        All stages of the layout.

    Returns
    -------
    GroupTime
        One entry per plan.

    Source: docs/cost-model/pipeline.md.
    """
    seconds = tuple(stage_seconds(group, run) for run in runs)
    shape = (len(group.rows), len(runs))
    stages = StageTimes(
        forward_s=np.stack([stage.forward for stage in seconds], axis=1),
        backward_s=np.stack([stage.backward + stage.replica_each for stage in seconds], axis=1),
        weight_grad_s=np.stack([stage.weight_grad for stage in seconds], axis=1),
        overlapped_s=np.stack([stage.together for stage in seconds], axis=1),
        run_length=np.broadcast_to(np.array([run.length for run in runs], dtype=np.int64), shape),
    )
    span = makespan(
        stages=stages,
        schedule=group.table.schedule,
        vpp=group.table.vpp,
        num_microbatches=group.table.num_microbatches,
        hop_s=hop_time_s(group),
        hop_overlap_ratio=group.context.software.pp_overlap_ratio,
    )
    once = np.stack([stage.once for stage in seconds], axis=1)
    last = once.argmax(axis=1)
    every = _hidden_in_step(group, runs, seconds)
    if group.schedule != Schedule.DUALPIPE and every.any():  # DualPipe's makespan knows of overlapped pairs
        span = _paired_span(group, stages, span, hidden=every.sum(axis=1).T)
    paired = np.take_along_axis(every, span.critical[None, None, :], axis=0)[0]
    return GroupTime(
        seconds=seconds,
        span=span,
        last=last,
        once=np.take_along_axis(once, last[:, None], axis=1)[:, 0],
        paired=paired,
        paired_by_run=every,
    )


def _paired_span(group: PlanGroup, stages: StageTimes, span: Makespan, *, hidden: FloatArray) -> Makespan:
    """Makespan where stages hide communication, shape (plans, runs), in pairs: critical is what then ends last."""
    count = group.table.num_microbatches[:, None]
    ends = one_f_one_b_span_s(
        stages=stages,
        weight_grad_s=np.zeros_like(stages.forward_s),
        vpp=group.table.vpp[:, None],
        num_microbatches=count,
        group=interleave_group(count, group.layout.pp),
    )
    busy = count * (stages.forward_s + stages.backward_s) - hidden
    critical = (ends - hidden).argmax(axis=1)
    busy_s, end_s = (np.take_along_axis(array, critical[:, None], axis=1)[:, 0] for array in (busy, ends - hidden))
    return replace(span, busy_s=busy_s, bubble_s=end_s - busy_s, critical=critical)


def _hidden_in_step(group: PlanGroup, runs: tuple[StageRun, ...], seconds: tuple[StageSeconds, ...]) -> FloatArray:
    """Seconds of dispatch and combine that each stage hides in a step, shape (runs, 2, plans)."""
    if not overlap_ratio(group.context, group.schedule, group.layout.pp):
        return np.zeros((len(runs), 2, len(group.rows)))
    pairs = [
        paired_microbatches(
            schedule=group.schedule,
            pp=group.layout.pp,
            vpp=group.layout.vpp,
            stage=run.stage,
            num_microbatches=group.table.num_microbatches,
        )
        for run in runs
    ]
    return np.stack([count * stage.paired for count, stage in zip(pairs, seconds, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TablePrice:
    """Seconds of a step and bytes of the fullest stage for each plan of a table, shape (plans,).

    `step_s` is infinite where the plan does not fit into the limit that was asked about.
    """

    step_s: FloatArray
    peak_bytes: FloatArray


def plan_rows(table: PlanTable) -> tuple[IntArray, ...]:
    """Split the rows of a table by layout and schedule.

    Parameters
    ----------
    table : PlanTable
        Plans.

    Returns
    -------
    tuple of array of int
        Row numbers, each group at least one.
    """
    key = table.layout * len(Schedule) + table.schedule
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    return tuple(rows for rows in np.split(order, cuts) if len(rows))


def price_table(context: CostContext, table: PlanTable, *, limit_bytes: float = np.inf) -> TablePrice:
    """Price every plan of a table: bytes of the fullest stage, and seconds of a step where that fits.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    table : PlanTable
        Plans; layouts must place all layers of the model.
    limit_bytes : float
        Plans that need more are not timed.

    Returns
    -------
    TablePrice
        One entry per plan.

    Notes
    -----
    A1. Plans are handled in arrays; Python loops only over layouts, schedules and their distinct stages.
    """
    prepared = prepare(context, table)
    step, peak = np.full(len(table), np.inf), np.empty(len(table))
    for rows in plan_rows(table):
        group = plan_group(prepared, rows)
        runs = stage_runs(group.context.model, group.layout, schedule=group.schedule, every=False)
        peak[rows] = np.max([stage_bytes(group, run).total for run in runs], axis=0)
        fitting = rows[peak[rows] <= limit_bytes]
        if len(fitting):
            timed = group if len(fitting) == len(rows) else plan_group(prepared, fitting)
            step[fitting] = group_time(timed, runs).step_s
    return TablePrice(step_s=step, peak_bytes=peak)
