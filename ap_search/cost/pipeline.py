"""Pipeline makespan: seconds from the first forward to the last backward of a step, by schedule, in closed form."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.in_flight import interleave_group
from ap_search.plan.plan import Schedule
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]

# Spans closer than this share are a tie: rounding must not choose the stage that a report explains.
_TIE_RATIO = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """What one micro-batch costs on each stage of each plan, equal neighbours written once.

    A column is a run of equal consecutive stages, bottom to top; all arrays have shape (plans, runs), and are priced
    fastest when a column is contiguous in memory.

    Attributes
    ----------
    forward_s, backward_s : FloatArray
        Whole forward and whole backward (input and weight gradients) of all chunks of the stage, seconds. For DualPipe
        a column is a device, and its times are the means of the two stages it holds.
    weight_grad_s : FloatArray
        The part of `backward_s` that makes weight gradients, seconds; read by zb_h1 and dualpipe only.
    overlapped_s : FloatArray or None
        A forward and a backward run into each other, seconds; read by dualpipe only. None: their sum.
    run_length : NDArray of int
        Stages that the column stands for; 0 pads the end of a row. A row sums to pp.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    weight_grad_s: FloatArray
    overlapped_s: FloatArray | None = None
    run_length: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Makespan:
    """Seconds of one pipeline pass as its critical stage sees them, each of shape (plans,).

    `busy_s` is the critical stage's own work, `bubble_s` its waiting, `hop_s` the exposed transfers between stages;
    `critical` is the critical stage's column in `StageTimes`.
    """

    busy_s: FloatArray
    bubble_s: FloatArray
    hop_s: FloatArray
    critical: NDArray[np.int64]

    @property
    def total_s(self) -> FloatArray:
        """First forward to last backward, seconds."""
        return self.busy_s + self.bubble_s + self.hop_s


def makespan(
    *,
    stages: StageTimes,
    schedule: Quantity,
    vpp: Quantity,
    num_microbatches: Quantity,
    hop_s: Quantity = 0.0,
    hop_overlap_ratio: float = 1.0,
) -> Makespan:
    """Seconds from the first forward to the last backward of a step, and the stage that sets them.

    Parameters
    ----------
    stages : StageTimes
        Seconds of one micro-batch per stage, shape (plans, runs).
    schedule : Quantity
        Values of `Schedule`, shape (plans,).
    vpp, num_microbatches : Quantity
        Chunks per stage and micro-batches per step (of both directions for dualpipe), at least 1, shape (plans,).
    hop_s : Quantity
        One transfer of activations to the next stage, seconds, shape (plans,).
    hop_overlap_ratio : float
        Share of the interleaved schedule's transfers that run beside compute, 0..1.

    Returns
    -------
    Makespan
        Work, waiting and exposed transfers of the critical stage; they sum to the makespan.

    Notes
    -----
    A1. The critical stage is the one whose own timeline is longest; among equals the busiest, then the first.
    A2. Transfers run beside compute; they add the hops that `exposed_hops` counts, as if all stages were equal.
    A3. Exact for equal stages, but for dualpipe with W < B/2 (an upper bound) and zb_h1 where W > F or m < pp. For
    unequal stages see the kernels: lower bounds that event simulation meets within a few per cent, dualpipe excepted.

    Source: event simulation of each schedule's published order (`docs/cost-model/pipeline.md`).
    """
    code, chunks = np.asarray(schedule)[..., None], np.asarray(vpp)[..., None]
    count = np.asarray(num_microbatches)[..., None]
    pp = stages.run_length.sum(axis=-1)
    group = interleave_group(num_microbatches, pp)
    devices = dualpipe_busy_s(stages=stages, num_microbatches=count)
    spans = np.select(
        [code == Schedule.GPIPE, code == Schedule.DUALPIPE],
        [gpipe_span_s(stages=stages, num_microbatches=count), devices + dualpipe_bubble_s(stages=stages)],
        one_f_one_b_span_s(
            stages=stages,
            weight_grad_s=np.where(code == Schedule.ZB_H1, stages.weight_grad_s, 0.0),
            vpp=chunks,
            num_microbatches=count,
            group=group[..., None],
        ),
    )
    busy = np.where(code == Schedule.DUALPIPE, devices, count * (stages.forward_s + stages.backward_s))
    spans = np.where(stages.run_length > 0, spans, -np.inf)
    longest = spans.max(axis=-1, keepdims=True)
    tied = spans >= longest - _TIE_RATIO * np.abs(longest)
    critical = np.where(tied, busy, -np.inf).argmax(axis=-1)
    busy_s = np.take_along_axis(busy, critical[..., None], axis=-1)[..., 0]
    hops = exposed_hops(
        schedule=schedule,
        pp=pp,
        vpp=vpp,
        num_microbatches=num_microbatches,
        group=group,
        overlap_ratio=hop_overlap_ratio,
    )
    return Makespan(busy_s=busy_s, bubble_s=longest[..., 0] - busy_s, hop_s=hops * hop_s, critical=critical)


def one_f_one_b_span_s(
    *, stages: StageTimes, weight_grad_s: FloatArray, vpp: Quantity, num_microbatches: Quantity, group: Quantity
) -> FloatArray:
    """Seconds that each stage's own timeline spans under 1f1b, interleaved or zb_h1, shape (plans, runs).

    Parameters
    ----------
    stages : StageTimes
        Seconds of one micro-batch per stage.
    weight_grad_s : FloatArray
        Weight-gradient seconds that the schedule may delay, shape (plans, runs): 0 but for zb_h1.
    vpp, num_microbatches, group : Quantity
        Chunks per stage, micro-batches, and micro-batches that a chunk takes before the next chunk's turn (0 where the
        schedule is illegal: all of them), shape (plans, 1).

    Returns
    -------
    FloatArray
        With F, B, W of stage c, I = B - W, k the chunk forwards between its first forward of the last chunk and its
        first backward, and A = sum over later stages of (F+I)/v:
        `sum_before F/v + m(F+B) + max(0, A - kF/v) + max(0, A - kB/v) + max(0, sum_before I + W_0 - (c+1)W)/v`.

    Notes
    -----
    A1. A stage waits for the first micro-batch to arrive, for its first and its last backward to come back, and for the
    last input gradient to reach stage 0; what it does meanwhile is its own pending work.
    A2. Where all forwards come before the first backward there is one wait between them, not two.
    A3. The chunks of a stage cost the same.
    A4. Waits that a chain of two slow stages causes on a third are left out: a lower bound for unequal stages.

    Source: Megatron-LM `core/pipeline_parallel/schedules.py` (warm-up of pp-c-1 forwards; interleaved 2(pp-c-1) +
    (v-1)N); zb_h1: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, schedule ZB-H1.
    """
    forward, backward, length = stages.forward_s, stages.backward_s, stages.run_length
    input_grad = backward - weight_grad_s
    chunks, count = np.asarray(vpp), np.asarray(num_microbatches)
    turn = np.where(np.asarray(group) > 0, group, count)
    limit = count * chunks - (chunks - 1) * turn - 1
    once = (length * (forward + input_grad)).sum(axis=-1, keepdims=True)
    spans = []
    for inner in (0, np.maximum(length - 1, 0)):
        # A run's longest timeline is at one of its two ends: the terms are convex in the stage's position.
        index = _before(np.ones_like(length), length, inner)
        ahead, upstream = _before(forward, length, inner), _before(input_grad, length, inner)
        later = (once - ahead - upstream - forward - input_grad) / chunks
        wanted = (length.sum(axis=-1, keepdims=True) - 1 - index) * np.where(chunks > 1, 2, 1)
        slots = np.minimum(wanted, limit) / chunks
        shorter = np.where(limit > wanted, backward, np.minimum(forward, backward))
        wait = np.maximum(later - slots * shorter, 0.0)
        wait += np.where(limit > wanted, np.maximum(later - slots * forward, 0.0), 0.0)
        drain = upstream + weight_grad_s[..., :1] - np.minimum(index + 1, count) * weight_grad_s
        spans.append(ahead / chunks + count * (forward + backward) + wait + np.maximum(drain, 0.0) / chunks)
    longest: FloatArray = np.maximum(*spans)
    return longest


def _before(values: FloatArray | NDArray[np.int64], length: NDArray[np.int64], inner: Quantity) -> FloatArray:
    """Sum of `values` over all stages before the stage that lies `inner` places into its run."""
    whole = length * values
    before: FloatArray = np.cumsum(whole, axis=-1) - whole + inner * values
    return before


def gpipe_span_s(*, stages: StageTimes, num_microbatches: Quantity) -> FloatArray:
    """Seconds that a GPipe pass spans, the same in each column, shape (plans, runs).

    Parameters
    ----------
    stages : StageTimes
        Seconds of one micro-batch per stage.
    num_microbatches : Quantity
        Micro-batches per step, shape (plans, 1).

    Returns
    -------
    FloatArray
        `sum_i (F_i + B_i) + (m-1)(max F + max B)`: exact, also for unequal stages.

    Notes
    -----
    A1. Two flow shops one after the other: all forwards, then all backwards; each is paced by its slowest stage.

    Source: Huang et al., GPipe, arXiv 1811.06965; makespan of a flow shop with equal jobs.
    """
    forward, backward, length = stages.forward_s, stages.backward_s, stages.run_length
    once = (length * (forward + backward)).sum(axis=-1, keepdims=True)
    real = length > 0
    pace = np.where(real, forward, 0.0).max(axis=-1, keepdims=True)
    pace = pace + np.where(real, backward, 0.0).max(axis=-1, keepdims=True)
    span: FloatArray = np.broadcast_to(once + (np.asarray(num_microbatches) - 1) * pace, forward.shape)
    return span


def dualpipe_busy_s(*, stages: StageTimes, num_microbatches: Quantity) -> FloatArray:
    """Seconds that each device works under DualPipe, shape (plans, runs).

    Parameters
    ----------
    stages : StageTimes
        Seconds of one micro-batch per device, means of its two stages.
    num_microbatches : Quantity
        Micro-batches of both directions, even, at least 2 pp, shape (plans, 1).

    Returns
    -------
    FloatArray
        `(m-pp-1) F&B + (pp+1)(F+B)`: the middle devices overlap m-pp-1 pairs, warm-up and cool-down run alone.

    Notes
    -----
    A1. The outer devices overlap fewer pairs and idle less; their timelines end at the same time.

    Source: deepseek-ai/DualPipe `dualpipe/dualpipe.py`, steps 1 to 8 with `half_rank = pp/2 - 1`.
    """
    alone = stages.forward_s + stages.backward_s
    together = alone if stages.overlapped_s is None else stages.overlapped_s
    count = np.asarray(num_microbatches)
    pairs = np.maximum(count - 1 - stages.run_length.sum(axis=-1, keepdims=True), 0)
    busy: FloatArray = pairs * together + (count - pairs) * alone
    return busy


def dualpipe_bubble_s(*, stages: StageTimes) -> FloatArray:
    """Seconds that each device waits under DualPipe, shape (plans, runs).

    Parameters
    ----------
    stages : StageTimes
        Seconds of one micro-batch per device, means of its two stages.

    Returns
    -------
    FloatArray
        The other pairs of devices' `F&B + B - 3 min(W, B/2)`, summed; `(pp/2-1)(F&B + B - 3W)` for equal stages.

    Notes
    -----
    A1. Exact for equal stages with W >= B/2 (then W counts as B/2), an upper bound below.
    A2. For unequal stages an approximation from both sides.

    Source: deepseek-ai/DualPipe README (bubble table); `min` from event simulation of its step order.
    """
    backward = stages.backward_s
    together = stages.forward_s + backward if stages.overlapped_s is None else stages.overlapped_s
    bubble = np.maximum(together + backward - 3 * np.minimum(stages.weight_grad_s, backward / 2), 0.0)
    every_pair = (stages.run_length * bubble).sum(axis=-1, keepdims=True) / 2
    waits: FloatArray = np.maximum(every_pair - bubble, 0.0)
    return waits


def exposed_hops(
    *,
    schedule: Quantity,
    pp: Quantity,
    vpp: Quantity,
    num_microbatches: Quantity,
    group: Quantity,
    overlap_ratio: float = 1.0,
) -> FloatArray:
    """Transfers between stages that lengthen the step, a count, shape (plans,).

    Parameters
    ----------
    schedule : Quantity
        Values of `Schedule`.
    pp, vpp, num_microbatches, group : Quantity
        Stages, chunks per stage, micro-batches, and `interleave_group` of them.
    overlap_ratio : float
        Share of the interleaved schedule's transfers that run beside compute, 0..1; the others are all waited for,
        2 m v of them besides fill and drain.

    Returns
    -------
    FloatArray
        With e = 2(pp-1), the fill and the drain: gpipe e; 1f1b `e + 2(m-1) - 2 ceil((m-1)/pp)`, since no more than pp
        micro-batches are in flight and each loop through the stages waits for its hops; zb_h1 no more than 2e;
        interleaved `2(pp v - 1)` where the group is pp, else e; dualpipe `m(pp-1)/pp + 3(pp/2-1) + 1`.

    Notes
    -----
    A1. A hop is short beside a chunk's forward; stages are equal; transfers run beside compute.
    A2. Exact for all but dualpipe, which is within two hops.

    Source: event simulation with a delay on every edge between devices.
    """
    code, stages, count = np.asarray(schedule), np.asarray(pp), np.asarray(num_microbatches)
    ends = 2.0 * (stages - 1)
    loops = ends + 2 * (count - 1) - 2 * np.ceil((count - 1) / stages)
    chain = np.where(np.asarray(group) > stages, ends, 2.0 * (stages * np.asarray(vpp) - 1))
    chain = overlap_ratio * chain + (1.0 - overlap_ratio) * (ends + 2.0 * count * np.asarray(vpp))
    dual = count * (stages - 1) / stages + 3 * (stages / 2 - 1) + 1
    hops = np.select(
        [code == Schedule.GPIPE, code == Schedule.ZB_H1, code == Schedule.INTERLEAVED, code == Schedule.DUALPIPE],
        [ends, np.minimum(loops, 2 * ends), chain, dual],
        loops,
    )
    return np.where(stages > 1, hops, 0.0)
