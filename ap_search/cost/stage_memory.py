"""Memory of one stage at each of its moments, for many plans that share a layout; bytes on one device."""

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.activations import logits_bytes
from ap_search.cost.dispatch import dispatcher_buffer_bytes
from ap_search.cost.in_flight import in_flight_chunk_vectors, in_flight_microbatches
from ap_search.cost.prepared import Prepared
from ap_search.cost.stages import StageRun
from ap_search.cost.state import bucket_bytes, padded_vocab, state_bytes
from ap_search.plan.plan import Schedule
from ap_search.plan.table import PlanTable
from ap_search.units import BF16_BYTES, MIB

FloatArray = NDArray[np.float64]
GEMM_WORKSPACE_BYTES = 32 * MIB
GROUPED_GEMM_WORKSPACE_BYTES = 128 * MIB
HOP_BUFFERS = 2


class Moment(IntEnum):
    """When a stage's memory is looked at."""

    FORWARD = 0
    HEAD_AND_LOSS = 1
    BACKWARD = 2
    OPTIMIZER_STEP = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytes:
    """Parts of one stage's memory at its worst moment, bytes of shape (plans,); `moment` holds `Moment` values."""

    shared_weights: FloatArray
    shared_gradients: FloatArray
    shared_optimizer: FloatArray
    expert_weights: FloatArray
    expert_gradients: FloatArray
    expert_optimizer: FloatArray
    router: FloatArray
    activations: FloatArray
    dispatch: FloatArray
    logits: FloatArray
    buffers: FloatArray
    reserve: FloatArray
    moment: NDArray[np.int64]

    @property
    def total(self) -> FloatArray:
        """Sum of the parts."""
        total: FloatArray = np.sum([getattr(self, part.name) for part in fields(self) if part.name != "moment"], axis=0)
        return total


def _alive(
    prepared: Prepared, table: PlanTable, run: StageRun, saved: FloatArray, state: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Activations and dispatch state of all micro-batches in flight; `saved`, `state` have shape (chunks, plans)."""
    per_stage = in_flight_microbatches(
        schedule=table.schedule, pp=table.pp, vpp=1, stage=run.stage, num_microbatches=table.num_microbatches
    )
    held, kept = per_stage * saved.sum(axis=0), per_stage * state.sum(axis=0)
    chunked = (table.schedule == Schedule.INTERLEAVED) | (table.schedule == Schedule.DUALPIPE)
    keys = table.num_microbatches * len(Schedule) + table.schedule
    for key in np.unique(keys[chunked]):
        count, schedule = divmod(int(key), len(Schedule))
        rows = np.flatnonzero(chunked & (keys == key))
        vectors = in_flight_chunk_vectors(
            schedule=schedule,
            pp=int(table.pp[0]),
            vpp=len(saved) if schedule == Schedule.INTERLEAVED else 1,
            stage=run.stage,
            num_microbatches=count,
        )
        totals = vectors @ (saved[:, rows] + state[:, rows])
        worst = totals.argmax(axis=0)
        held[rows] = np.einsum("pc,cp->p", vectors[worst], saved[:, rows])
        kept[rows] = np.einsum("pc,cp->p", vectors[worst], state[:, rows])
    return held, kept


def _buffers(
    prepared: Prepared,
    rows: NDArray[np.int64],
    table: PlanTable,
    run: StageRun,
    *,
    dense: FloatArray,
    expert: FloatArray,
) -> FloatArray:
    """Gradient buckets, FSDP units, workspaces and receive buffers of one stage."""
    software, present = prepared.context.software, run.counts > 0
    dense_blocks = (prepared.params.dense + prepared.params.router)[rows][:, present]
    size = bucket_bytes(
        software,
        sharding=table.sharding,
        params=dense,
        largest=dense_blocks.max(axis=1),
        group=prepared.dense.size[rows],
    )
    largest = prepared.params.expert[rows][:, present].max(axis=1)
    size = size + bucket_bytes(
        software, sharding=table.sharding, params=expert, largest=largest, group=prepared.expert.size[rows]
    )
    hidden = prepared.context.model.hidden_size * BF16_BYTES
    shapes, shape_rows = prepared.blocks.shapes, prepared.shape_of[rows]
    hops = np.where(table.pp > 1, HOP_BUFFERS * shapes.local_tokens[shape_rows] * hidden, 0.0)
    gathered = np.where(table.sequence_parallel == 1, shapes.tokens[shape_rows] * hidden, 0.0)
    workspace = GEMM_WORKSPACE_BYTES + (GROUPED_GEMM_WORKSPACE_BYTES if expert.any() else 0)
    return size + hops + gathered + workspace


def stage_bytes(prepared: Prepared, rows: NDArray[np.int64], table: PlanTable, run: StageRun) -> StageBytes:
    """Memory of one stage at its worst moment for plans that share a layout, bytes.

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
    StageBytes
        Arrays over `rows`.

    Notes
    -----
    A1. Moments: forward (all micro-batches in flight saved, the running layer's buffers), head and loss (logits
        instead), backward (recomputed activations of one layer and gradients of its widest tensors besides), optimizer
        step (no activations).
    A2. Gradient buffers exist from the start.

    Source: docs/cost-model/memory.md.
    """
    context, blocks = prepared.context, prepared.blocks
    shape_rows = prepared.shape_of[rows]
    counts, present = run.counts, run.counts > 0
    dense, router, expert = (
        array[rows] @ counts for array in (prepared.params.dense, prepared.params.router, prepared.params.expert)
    )
    dense_group, expert_group = prepared.dense.take(rows), prepared.expert.take(rows)
    shared = state_bytes(context.software, dense, dense_group.degrees)
    routing = state_bytes(context.software, router, dense_group.degrees)
    routed = state_bytes(context.software, expert, expert_group.degrees)
    saved, state = run.chunk_counts @ prepared.saved[:, shape_rows], run.chunk_counts @ prepared.state[:, shape_rows]
    held, kept = _alive(prepared, table, run, saved, state)
    again, running, exchange = (
        array[present][:, shape_rows].max(axis=0)
        for array in (prepared.recomputed, prepared.transient, prepared.exchange)
    )
    heads = float(run.chunk_counts[:, -1].max())
    tp = blocks.shapes.tp[shape_rows]
    logits = heads * logits_bytes(
        tokens=blocks.shapes.tokens[shape_rows],
        vocab=padded_vocab(context.model.vocab_size, divisor=context.software.vocab_divisor, tp=tp),
        tp=tp,
        depths=1 + context.model.mtp_layers,
        fused=context.software.fused_cross_entropy,
    )
    fixed = np.where(
        expert > 0,
        dispatcher_buffer_bytes(
            dispatcher=table.dispatcher,
            hidden=context.model.hidden_size,
            group=table.ep * table.etp,
            domains=blocks.shapes.group_place.domains[shape_rows],
        ),
        0.0,
    )
    extra = np.stack([exchange, logits, again + running + exchange, -held - kept])
    moment = extra.argmax(axis=0)
    active = moment != Moment.OPTIMIZER_STEP
    passing = (moment == Moment.FORWARD) | (moment == Moment.BACKWARD)
    return StageBytes(
        shared_weights=np.asarray(shared[0]),
        shared_gradients=np.asarray(shared[1]),
        shared_optimizer=np.asarray(shared[2]),
        expert_weights=np.asarray(routed[0]),
        expert_gradients=np.asarray(routed[1]),
        expert_optimizer=np.asarray(routed[2]),
        router=np.asarray(routing[0] + routing[1] + routing[2]),
        activations=active * held + np.where(moment == Moment.BACKWARD, again + running, 0.0),
        dispatch=active * kept + passing * exchange + fixed,
        logits=np.where(moment == Moment.HEAD_AND_LOSS, logits, 0.0),
        buffers=_buffers(prepared, rows, table, run, dense=dense + router, expert=expert),
        reserve=np.full(len(rows), float(context.job.reserve_bytes)),
        moment=moment,
    )
