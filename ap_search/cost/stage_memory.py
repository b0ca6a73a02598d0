"""Memory of one stage at each of its moments, for many plans that share a layout; bytes on one device."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.activations import logits_bytes, softmax_bytes
from ap_search.cost.dispatch_memory import dispatcher_buffer_bytes
from ap_search.cost.group import PlanGroup
from ap_search.cost.in_flight import in_flight_chunk_vectors
from ap_search.cost.overlap import overlap_ratio
from ap_search.cost.stages import StageRun
from ap_search.cost.state import ParamBytes, bucket_bytes, padded_vocab
from ap_search.plan.plan import Schedule
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
    """One stage's memory at its worst moment, arrays of shape (plans,); `moment` holds `Moment` values.

    `shared`, `router`, `expert` are parameters of the rank (counts); `shared_kept` and `expert_kept` bytes per
    parameter (the router is kept like shared parameters); the rest are bytes.
    """

    shared: FloatArray
    router: FloatArray
    expert: FloatArray
    shared_kept: ParamBytes
    expert_kept: ParamBytes
    activations: FloatArray
    dispatch: FloatArray
    logits: FloatArray
    buffers: FloatArray
    reserve: float
    moment: NDArray[np.int64]

    @property
    def total(self) -> FloatArray:
        """Sum of the parts, bytes."""
        states = (self.shared + self.router) * self.shared_kept.total + self.expert * self.expert_kept.total
        total: FloatArray = states + self.activations + self.dispatch + self.logits + self.buffers + self.reserve
        return total


def _saved(group: PlanGroup, run: StageRun) -> FloatArray:
    """Activations that one micro-batch leaves in each chunk of a stage, bytes, shape (chunks, shapes)."""
    software, model = group.context.software, group.context.model
    saved: FloatArray = run.chunk_counts @ group.saved_bytes
    if group.layout.pp > 1:
        output = group.local_tokens * model.hidden_size * BF16_BYTES
        return saved + output * software.keeps_stage_outputs
    kinds = len(model.kinds)
    away = min(software.offloaded_layers / model.num_layers, 1.0)
    return saved - away * (run.chunk_counts[:, :kinds] @ group.saved_bytes[:kinds])


def _alive(group: PlanGroup, run: StageRun) -> tuple[FloatArray, FloatArray]:
    """Activations and dispatch state of all micro-batches in flight at the fullest moment, bytes per plan."""
    saved, state = _saved(group, run), run.chunk_counts @ group.state_bytes
    held, kept = np.empty(len(group.rows)), np.empty(len(group.rows))
    counts, position = np.unique(group.table.num_microbatches, return_inverse=True)
    for index, count in enumerate(counts):
        vectors = in_flight_chunk_vectors(
            schedule=group.schedule,
            pp=group.layout.pp,
            vpp=group.layout.vpp,
            stage=run.depth,
            num_microbatches=int(count),
            extra_warmup=int(overlap_ratio(group.context, group.schedule, group.layout.pp) > 0),
        )
        rows = np.flatnonzero(position == index)
        shapes = group.shape_of[rows]
        worst = (vectors @ (saved + state)).argmax(axis=0)
        held[rows] = np.einsum("uc,cu->u", vectors[worst], saved)[shapes]
        kept[rows] = np.einsum("uc,cu->u", vectors[worst], state)[shapes]
    return held, kept


def _buffers(group: PlanGroup, run: StageRun, *, dense: FloatArray, expert: FloatArray) -> FloatArray:
    """Gradient buckets, FSDP units, workspaces and receive buffers of one stage, bytes per plan."""
    software, present, table = group.context.software, run.counts > 0, group.table
    largest_dense = (group.params.dense + group.params.router)[:, present].max(axis=1, initial=0.0)[group.params_of]
    largest_expert = group.params.expert[:, present].max(axis=1, initial=0.0)[group.params_of]
    sharding, pp = table.sharding, group.layout.pp
    size = bucket_bytes(
        software, sharding=sharding, params=dense, largest=largest_dense, group=group.dense.shard, pp=pp
    ) + bucket_bytes(
        software, sharding=sharding, params=expert, largest=largest_expert, group=group.expert.shard, pp=pp
    )
    hidden = group.context.model.hidden_size * BF16_BYTES
    hops = HOP_BUFFERS * group.local_tokens * hidden if group.layout.pp > 1 else np.zeros_like(group.tokens)
    gathered = np.where(group.local_tokens < group.tokens, group.tokens * hidden, 0.0)
    workspace = GEMM_WORKSPACE_BYTES + (GROUPED_GEMM_WORKSPACE_BYTES if expert.any() else 0)
    buffers: FloatArray = size + (hops + gathered + workspace)[group.shape_of]
    return buffers


def _logits(group: PlanGroup, run: StageRun) -> tuple[FloatArray, FloatArray]:
    """Logits and loss of one micro-batch, and the softmax of those that wait, on the head's stage; bytes per plan."""
    model, software = group.context.model, group.context.software
    vocab = padded_vocab(model.vocab_size, divisor=software.vocab_divisor, tp=group.tp)
    depths, heads = 1 + model.mtp_layers, float(run.chunk_counts[:, -1].max())
    tokens = group.tokens / software.loss_chunks
    peak = logits_bytes(tokens=tokens, vocab=vocab, tp=group.tp, depths=depths, per_logit_bytes=software.logit_bytes)
    # Every other schedule runs a micro-batch's backward right after its loss.
    waiting = group.table.num_microbatches - 1.0 if group.schedule == Schedule.GPIPE else np.zeros(len(group.rows))
    softmax = softmax_bytes(tokens=tokens, vocab=vocab, tp=group.tp, depths=depths)
    return heads * np.asarray(peak)[group.shape_of], heads * waiting * np.asarray(softmax)[group.shape_of]


def stage_bytes(group: PlanGroup, run: StageRun) -> StageBytes:
    """Memory of one stage at its worst moment for plans that share a layout and a schedule, bytes.

    Parameters
    ----------
    group : PlanGroup
        The plans.
    run : StageRun
        The stage.

    Returns
    -------
    StageBytes
        One entry per plan.

    Notes
    -----
    A1. Moments: forward (all micro-batches in flight saved, the running layer's buffers), head and loss (logits
        instead), backward (recomputed activations of one layer and gradients of its widest tensors besides), optimizer
        step (no activations).
    A2. Gradient buffers exist from the start.
    A3. Under GPipe the softmax of every micro-batch waits for the backward passes.

    Source: docs/cost-model/memory.md.
    """
    dense, router, expert = (
        (params @ run.counts)[group.params_of]
        for params in (group.params.dense, group.params.router, group.params.expert)
    )
    held, kept = _alive(group, run)
    present = run.counts > 0
    again, running, exchange = (
        array[present].max(axis=0, initial=0.0)[group.shape_of]  # a stage may be empty
        for array in (group.recomputed_bytes, group.transient_bytes, group.exchange_bytes)
    )
    logits, softmax = _logits(group, run)
    fixed = dispatcher_buffer_bytes(
        dispatcher=group.table.dispatcher,
        hidden=group.context.model.hidden_size,
        group=group.table.ep * group.table.etp,
        domains=group.domains[group.shape_of],
    )
    moment = np.stack([exchange, logits, again + running + exchange, -held - kept]).argmax(axis=0)
    active = moment != Moment.OPTIMIZER_STEP
    passing = (moment == Moment.FORWARD) | (moment == Moment.BACKWARD)
    return StageBytes(
        shared=dense,
        router=router,
        expert=expert,
        shared_kept=group.dense.kept,
        expert_kept=group.expert.kept,
        activations=active * held + np.where(moment == Moment.BACKWARD, again + running, 0.0),
        dispatch=active * kept + passing * exchange + np.where(expert > 0, fixed, 0.0),
        logits=active * softmax + np.where(moment == Moment.HEAD_AND_LOSS, logits, 0.0),
        buffers=_buffers(group, run, dense=dense + router, expert=expert),
        reserve=float(group.context.job.reserve_bytes),
        moment=moment,
    )
