"""Expert-parallel communication hidden behind another micro-batch: one layer's forward beside one layer's backward."""

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.dispatch_time import free_sm_ratio
from ap_search.cost.in_flight import interleave_group
from ap_search.cost.parts import BlockTime, Part
from ap_search.cost.shapes import Shapes
from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]
EXPERT_PARTS = (Part.EXPERT, Part.SHARED_EXPERT, Part.DISPATCH, Part.COMBINE)
DUALPIPE_OVERLAP_RATIO = 1.0
UNPAIRED_RECOMPUTE = Recompute.FULL | Recompute.MOE


def paired_exchange_s(context: CostContext, shapes: Shapes, time: BlockTime) -> FloatArray:
    """Seconds of dispatch and of combine that hide where a forward of one layer runs into a backward of another.

    Parameters
    ----------
    context : CostContext
        Multiprocessors of the device, and those that a dispatch kernel takes.
    shapes : Shapes
        Dispatcher and recompute bits.
    time : BlockTime
        The layer, all parts.

    Returns
    -------
    FloatArray
        Shape (2, plans): of both dispatches (forward and backward), of both combines. Three columns run side by side:
        combine's backward beside attention's forward, both dispatches beside both passes of the experts, combine's
        forward beside attention's backward; each takes the longer of its two sides. 0 for allgather, and under full and
        `moe` recompute.

    Notes
    -----
    A1. Communication kernels take `sms` of the multiprocessors from the compute beside them.
    A2. Forward and backward that meet are of the same kind of layer.

    Source: Megatron-LM `combined_1f1b.py`, `models/common/model_chunk_schedule_plan.py`; DualPipe README.
    """
    dispatch, combine, dispatch_back, combine_back = time.exchange
    experts_forward = time.forward[list(EXPERT_PARTS)].sum(axis=0) - dispatch - combine
    experts_backward = time.backward[list(EXPERT_PARTS)].sum(axis=0) - dispatch_back - combine_back
    attention_forward = time.forward.sum(axis=0) - experts_forward - dispatch - combine
    attention_backward = time.backward.sum(axis=0) - experts_backward - dispatch_back - combine_back
    middle = np.minimum(dispatch + dispatch_back, experts_forward + experts_backward)
    ends = np.minimum(combine_back, attention_forward) + np.minimum(combine, attention_backward)
    kept = free_sm_ratio(context.machine)
    refused = (shapes.dispatcher == Dispatcher.ALLGATHER) | shapes.recomputes(UNPAIRED_RECOMPUTE)
    hidden: FloatArray = np.where(refused, 0.0, kept * np.stack([middle, ends]))
    return hidden


def overlap_ratio(context: CostContext, schedule: Schedule, pp: int) -> float:
    """Share of paired communication that a schedule hides with this software, 0..1.

    Parameters
    ----------
    context : CostContext
        `ep_overlap_ratio` of the software.
    schedule : Schedule
        DualPipe pairs by definition; interleaved, and a single stage, where the software does.
    pp : int
        Pipeline stages.

    Returns
    -------
    float
        0 for other schedules over several stages (Megatron-LM demands virtual stages there).

    Source: Megatron-LM `transformer_config.py` (overlap_moe_expert_parallel_comm); DualPipe README.
    """
    if schedule == Schedule.DUALPIPE:
        return DUALPIPE_OVERLAP_RATIO
    pairing = schedule == Schedule.INTERLEAVED or (pp == 1 and schedule == Schedule.ONE_F_ONE_B)
    return context.software.ep_overlap_ratio if pairing else 0.0


def unpaired_reason(context: CostContext, plan: Plan) -> str:
    """Why a plan hides no dispatch and combine behind another micro-batch though it should, as a sentence; else empty.

    Parameters
    ----------
    context : CostContext
        `ep_overlap_ratio` of the software.
    plan : Plan
        Schedule, dispatcher and recompute.

    Returns
    -------
    str
        Empty where something is paired, where there is nothing to pair (ep*etp = 1), and where nobody asked for it.

    Source: as `paired_exchange_s` and `overlap_ratio`.
    """
    asked = context.software.ep_overlap_ratio > 0 or plan.schedule == Schedule.DUALPIPE
    if not asked or plan.ep * plan.etp == 1:
        return ""
    reasons = []
    if not overlap_ratio(context, plan.schedule, plan.pp):
        reasons.append(f"pp={plan.pp} pairs micro-batches under interleaved (vpp above 1) and dualpipe only")
    if plan.dispatcher == Dispatcher.ALLGATHER:
        reasons.append("allgather cannot be paired")
    if plan.recompute & UNPAIRED_RECOMPUTE:
        reasons.append("full and moe recompute cannot be paired")
    return f"the software's EP overlap is not in effect: {'; '.join(reasons)}" if reasons else ""


def paired_microbatches(*, schedule: Schedule, pp: int, vpp: int, stage: int, num_microbatches: Quantity) -> Quantity:
    """Micro-batches of a step whose forward on a stage runs beside a backward, a count.

    Parameters
    ----------
    schedule : Schedule
        As for `overlap_ratio`.
    pp, vpp, stage : int
        Stages, chunks per stage, the stage.
    num_microbatches : Quantity
        Micro-batches per step.

    Returns
    -------
    Quantity
        All but the warm-up, whose forwards (and the last backwards) run alone: m - 1 on a single stage;
        m - (2(pp-stage-1) + (v-1)N + 2)/v interleaved; m - pp - 1 for DualPipe.

    Notes
    -----
    A1. Overlap adds one chunk to the interleaved warm-up.

    Source: Megatron-LM `schedules.py`; deepseek-ai/DualPipe `dualpipe/dualpipe.py`.
    """
    count = np.asarray(num_microbatches)
    if schedule == Schedule.DUALPIPE:
        alone: Quantity = np.full(count.shape, pp + 1.0)
    elif schedule == Schedule.INTERLEAVED:
        group = interleave_group(count, pp)
        alone = (2 * (pp - stage - 1) + (vpp - 1) * np.where(group > 0, group, count) + 2) / vpp
    else:
        alone = np.ones(count.shape)
    return np.maximum(count - alone, 0.0)
