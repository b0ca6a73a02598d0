"""One step of many plans: stages assembled into seconds and peak bytes. The only place where prices come together."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.collective import point_to_point_time_s
from ap_search.cost.context import CostContext
from ap_search.cost.data_parallel import (
    ExposedReplicaComm,
    ReplicaComm,
    exposed_replica_comm,
    optimizer_time_s,
    replica_comm,
)
from ap_search.cost.pipeline import Makespan, StageTimes, makespan
from ap_search.cost.prepared import Prepared, prepare
from ap_search.cost.stage_memory import StageBytes, stage_bytes
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
    `replica_each` and `replica_once` exposed data-parallel communication per micro-batch and per step; `optimizer` per
    step.
    """

    forward: FloatArray
    backward: FloatArray
    weight_grad: FloatArray
    replica: ReplicaComm
    replica_each: FloatArray
    replica_once: FloatArray
    optimizer: FloatArray

    @property
    def once(self) -> FloatArray:
        """Per step, after the pipeline has drained."""
        return self.replica_once + self.optimizer


def stage_seconds(prepared: Prepared, rows: IntArray, table: PlanTable, run: StageRun) -> StageSeconds:
    """Time of one stage per micro-batch and per step, seconds.

    Parameters
    ----------
    prepared : Prepared
        Block costs and parameters of the whole table.
    rows : array of int
        Rows of the whole table that are meant.
    table : PlanTable
        Those rows.
    run : StageRun
        The stage.

    Returns
    -------
    StageSeconds
        Arrays over `rows`.

    Notes
    -----
    A1. Stage cost = counts of blocks x cost of a block; under DualPipe a device sees half of the micro-batches per
        stage.

    Source: docs/cost-model/pipeline.md, docs/cost-model/data-parallel.md.
    """
    shape_rows = prepared.shape_of[rows]
    counts = run.counts * run.share
    forward, backward, weight_grad = (
        counts @ array[:, shape_rows] for array in (prepared.forward, prepared.backward, prepared.weight_grad)
    )
    dense = (prepared.params.dense + prepared.params.router)[rows] @ run.counts
    expert = prepared.params.expert[rows] @ run.counts
    context = prepared.context
    dense_group, expert_group = prepared.dense.take(rows), prepared.expert.take(rows)
    comm = replica_comm(context, params=dense, sharding=table.sharding, group=dense_group)
    if expert.any():
        comm = comm.plus(replica_comm(context, params=expert, sharding=table.sharding, group=expert_group))
    exposed: ExposedReplicaComm = exposed_replica_comm(context, comm, forward_s=forward, backward_s=backward)
    kept = dense / dense_group.degrees.optimizer + expert / expert_group.degrees.optimizer
    return StageSeconds(
        forward=forward,
        backward=backward,
        weight_grad=weight_grad,
        replica=comm,
        replica_each=np.asarray(exposed.each_s),
        replica_once=np.asarray(exposed.once_s),
        optimizer=np.asarray(optimizer_time_s(context, kept)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupPrice:
    """Price of plans that share a layout: every stage (or run of equal stages), the pipeline over them, the step.

    `critical` is the run that paces the pipeline, `last` the one whose reduction and optimizer end the step.
    """

    runs: tuple[StageRun, ...]
    seconds: tuple[StageSeconds, ...]
    memories: tuple[StageBytes, ...]
    span: Makespan
    last: IntArray
    once: FloatArray

    @property
    def step_s(self) -> FloatArray:
        """Seconds of a step."""
        return self.span.total_s + self.once

    @property
    def peak_bytes(self) -> FloatArray:
        """Bytes of the fullest stage."""
        peak: FloatArray = np.max([memory.total for memory in self.memories], axis=0)
        return peak


def hop_seconds(prepared: Prepared, rows: IntArray, table: PlanTable) -> FloatArray:
    """Exposed time of one transfer between neighbouring stages, seconds per hop.

    Parameters
    ----------
    prepared, rows, table
        As for `stage_seconds`.

    Returns
    -------
    FloatArray
        0 where pp = 1; what interleaved schedules hide is left out.

    Notes
    -----
    A1. The slowest hop (one that leaves the scale-up domain, if any does) stands for all.

    Source: Megatron-LM `schedules.py` get_tensor_shapes (tokens / cp / tp with sequence parallelism, bf16).
    """
    context = prepared.context
    domain = context.machine.domain_size(context.job.devices)
    size = prepared.blocks.shapes.local_tokens[prepared.shape_of[rows]] * context.model.hidden_size * BF16_BYTES
    crosses = pipeline_hop_placement(table.pp, world=context.job.devices, domain_size=domain)
    hop = point_to_point_time_s(context.machine, size_bytes=size, crosses_domain=crosses)
    hidden = np.where(table.schedule == Schedule.INTERLEAVED, context.software.pp_overlap_ratio, 0.0)
    return np.where(table.pp > 1, hop * (1.0 - hidden), 0.0)


def price_group(prepared: Prepared, rows: IntArray, *, every_stage: bool) -> GroupPrice:
    """Price plans that share a layout (and whether they run DualPipe).

    Parameters
    ----------
    prepared : Prepared
        Block costs and parameters of the whole table.
    rows : array of int
        Rows with one layout.
    every_stage : bool
        Whether each stage is priced by itself, for a report; otherwise runs of equal stages once.

    Returns
    -------
    GroupPrice
        Arrays over `rows`.

    Source: docs/cost-model/pipeline.md.
    """
    table = prepared.table.take(rows)
    layout = table.layouts[int(table.layout[0])]
    dualpipe = bool(table.schedule[0] == Schedule.DUALPIPE)
    runs = stage_runs(prepared.model, layout, dualpipe=dualpipe, every=every_stage)
    seconds = tuple(stage_seconds(prepared, rows, table, run) for run in runs)
    memories = tuple(stage_bytes(prepared, rows, table, run) for run in runs)
    stages = StageTimes(
        forward_s=np.stack([stage.forward for stage in seconds], axis=1),
        backward_s=np.stack([stage.backward + stage.replica_each for stage in seconds], axis=1),
        weight_grad_s=np.stack([stage.weight_grad for stage in seconds], axis=1),
        run_length=np.broadcast_to(np.array([run.length for run in runs], dtype=np.int64), (len(rows), len(runs))),
    )
    span = makespan(
        stages=stages,
        schedule=table.schedule,
        vpp=table.vpp,
        num_microbatches=table.num_microbatches,
        hop_s=hop_seconds(prepared, rows, table),
    )
    once = np.stack([stage.once for stage in seconds], axis=1)
    last = once.argmax(axis=1)
    return GroupPrice(
        runs=runs,
        seconds=seconds,
        memories=memories,
        span=span,
        last=last,
        once=np.take_along_axis(once, last[:, None], axis=1)[:, 0],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TablePrice:
    """Seconds of a step and bytes of the fullest stage for each plan of a table, shape (plans,)."""

    step_s: FloatArray
    peak_bytes: FloatArray


def layout_groups(table: PlanTable) -> tuple[IntArray, ...]:
    """Split the rows of a table by layout and by whether they run DualPipe."""
    key = table.layout * 2 + (table.schedule == Schedule.DUALPIPE)
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    return tuple(group for group in np.split(order, cuts) if len(group))


def price_table(context: CostContext, table: PlanTable) -> TablePrice:
    """Price every plan of a table: seconds of a step, bytes of the fullest stage.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    table : PlanTable
        Plans; layouts must place all layers of the model.

    Returns
    -------
    TablePrice
        One entry per plan.

    Notes
    -----
    A1. Plans are handled in arrays; Python loops only over layouts and their distinct stages.
    """
    prepared = prepare(context, table)
    step, peak = np.empty(len(table)), np.empty(len(table))
    for rows in layout_groups(table):
        group = price_group(prepared, rows, every_stage=False)
        step[rows], peak[rows] = group.step_s, group.peak_bytes
    return TablePrice(step_s=step, peak_bytes=peak)
