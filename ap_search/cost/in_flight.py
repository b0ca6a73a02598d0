"""Micro-batches in flight: how many forwards of each chunk a stage holds activations of at its worst moments."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.plan import Schedule
from ap_search.units import Quantity

IntArray = NDArray[np.int64]

# Groups of micro-batches after which the interleaved order only repeats: warm-up ends within two, one more is steady.
_PERIODIC_GROUPS = 4


def interleave_group(num_microbatches: Quantity, pp: Quantity) -> IntArray:
    """Micro-batches that a chunk takes before the next chunk's turn: the smallest legal number, 0 where none is legal.

    Parameters
    ----------
    num_microbatches, pp : Quantity
        Micro-batches per step m and pipeline stages, at least 1, broadcastable.

    Returns
    -------
    IntArray
        The smallest N with `pp <= N <= m` and `m % N` either 0 or at least pp; 0 where m < pp.

    Notes
    -----
    A1. Megatron-LM's default is N = pp, and it stops where that is illegal; the smallest N keeps the fewest
    micro-batches in flight, so a planner asks for it (`--microbatch-group-size-per-virtual-pipeline-stage`).

    Source: Megatron-LM `core/pipeline_parallel/schedules.py`, checks of `microbatch_group_size_per_vp_stage`.
    """
    count, stages = np.broadcast_arrays(np.asarray(num_microbatches, np.int64), np.asarray(pp, np.int64))
    radix = int(stages.max(initial=0)) + 1
    keys, inverse = np.unique(count * radix + stages, return_inverse=True)
    groups = np.array([_smallest_group(*divmod(key, radix)) for key in keys.tolist()], dtype=np.int64)
    return groups[inverse.reshape(count.shape)]


def _smallest_group(count: int, stages: int) -> int:
    """Smallest legal group for one number of micro-batches and stages, 0 where there is none."""
    legal = (size for size in range(stages, count + 1) if count % size == 0 or count % size >= stages)
    return next(legal, 0)


def in_flight_microbatches(
    *, schedule: Quantity, pp: Quantity, vpp: Quantity, stage: Quantity, num_microbatches: Quantity
) -> Quantity:
    """Micro-batches whose activations a stage holds at its worst moment, in whole stages, a count.

    Parameters
    ----------
    schedule : Quantity
        Values of `Schedule`.
    pp, vpp : Quantity
        Stages, chunks per stage.
    stage : Quantity
        The stage, 0 to pp-1.
    num_microbatches : Quantity
        Micro-batches per step m (of both directions for dualpipe).

    Returns
    -------
    Quantity
        1f1b `min(m, pp-stage)`; gpipe m; zb_h1 `min(m, pp)`, until the weight gradient is done; interleaved
        `min(mv, 2(pp-stage-1) + (v-1)N + 1) / v`; dualpipe `min(m/2, pp-stage)`, and the device that holds this stage
        holds `pp-1-stage` too: pp+1 in all.

    Notes
    -----
    A1. A whole backward frees a micro-batch's activations; under zb_h1 its weight gradient does.
    A2. The chunks of an interleaved stage hold the same; where they do not, use `in_flight_chunk_vectors`.

    Source: Megatron-LM `schedules.py` (warm-up counts); Qi et al., arXiv 2401.10241; deepseek-ai/DualPipe README.
    """
    code, chunks, count = np.asarray(schedule), np.asarray(vpp), np.asarray(num_microbatches)
    later = np.asarray(pp) - np.asarray(stage)
    group = interleave_group(num_microbatches, pp)
    group = np.where(group > 0, group, count)
    kinds = (Schedule.GPIPE, Schedule.ZB_H1, Schedule.INTERLEAVED, Schedule.DUALPIPE)
    alive: NDArray[np.float64] = np.select(
        [code == kind for kind in kinds],
        [
            count,
            np.minimum(count, pp),
            np.minimum(count * chunks, 2 * (later - 1) + (chunks - 1) * group + 1) / chunks,
            np.minimum(count // 2, later),
        ],
        np.minimum(count, later),
    )
    return alive


@lru_cache(maxsize=16384)
def in_flight_chunk_vectors(
    *, schedule: int, pp: int, vpp: int, stage: int, num_microbatches: int, extra_warmup: int = 0
) -> IntArray:
    """Worst moments of a stage: how many micro-batches of each of its chunks are in flight, shape (moments, chunks).

    Parameters
    ----------
    schedule : int
        A value of `Schedule`.
    pp, vpp, stage, num_microbatches : int
        Stages, chunks per stage, the stage (0 to pp-1), micro-batches per step.
    extra_warmup : int
        Chunk forwards before the first backward beyond the usual number: 1 where EP all-to-all is overlapped with the
        other micro-batch's compute.

    Returns
    -------
    IntArray
        Read-only. The moments that no other moment exceeds in every chunk: a stage's activations peak at
        `max(vectors @ bytes_per_chunk)`. One moment but for interleaved. Chunks of a dualpipe device are the two stages
        it holds, `stage` and `pp-1-stage`.

    Notes
    -----
    A1. Interleaved: forwards go chunk by chunk in groups of N micro-batches, backwards in the same order with chunks
    reversed; after the warm-up of `2(pp-stage-1) + (v-1)N` forwards, forward and backward alternate.
    A2. The order repeats after a few groups, so no more than four groups and the remainder are walked.

    Source: Megatron-LM `schedules.py` (`get_schedule_table`, `get_pp_rank_microbatches`).
    """
    if schedule == Schedule.INTERLEAVED:
        group = int(interleave_group(num_microbatches, pp)) or num_microbatches
        whole, rest = divmod(num_microbatches, group)
        warmup = 2 * (pp - stage - 1) + (vpp - 1) * group + extra_warmup
        return _interleaved_vectors(vpp, warmup, group, min(whole, _PERIODIC_GROUPS) * group + rest)
    stages = [stage, pp - 1 - stage] if schedule == Schedule.DUALPIPE else [stage]
    vector = in_flight_microbatches(
        schedule=schedule, pp=pp, vpp=1, stage=np.array([stages]), num_microbatches=num_microbatches
    )
    alone = np.asarray(vector, dtype=np.int64)
    alone.setflags(write=False)
    return alone


@lru_cache(maxsize=4096)
def _interleaved_vectors(vpp: int, warmup: int, group: int, count: int) -> IntArray:
    """Walk the interleaved order of one stage; a moment is taken right after each forward."""
    chunk = np.array(
        [
            index
            for first in range(0, count, group)
            for index in range(vpp)
            for _ in range(first, min(first + group, count))
        ]
    )
    chunks = np.arange(vpp)
    forwards = np.cumsum(chunk[:, None] == chunks, axis=0)
    backwards = np.cumsum(vpp - 1 - chunk[:, None] == chunks, axis=0)
    done = np.maximum(np.arange(len(chunk)) - warmup, 0)
    alive = np.unique(forwards - np.vstack([np.zeros_like(chunks), backwards])[done], axis=0)
    below = (alive[:, None] <= alive[None]).all(axis=-1)
    # Rows are distinct, so a row that only itself covers is one that no other exceeds in every chunk.
    vectors: IntArray = alive[below.sum(axis=-1) == 1]
    vectors.setflags(write=False)
    return vectors
