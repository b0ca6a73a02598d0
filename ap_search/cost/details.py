"""One plan in full: every stage, every part, as frozen records; the same arrays as the search, with one row."""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.flops import model_flops_per_token
from ap_search.cost.parts import Part, Wire
from ap_search.cost.prepared import Prepared, prepare
from ap_search.cost.stage_memory import Moment, StageBytes
from ap_search.cost.step import GroupPrice, price_group
from ap_search.plan.plan import Plan
from ap_search.plan.table import PlanTable
from ap_search.plan.text import plan_name
from ap_search.result import MemoryBreakdown, PricedPlan, StageMemory, StateBytes, TimeBreakdown, Traffic, Violation
from ap_search.spec.job import Precision
from ap_search.units import BF16_BYTES

FloatArray = NDArray[np.float64]
LARGEST_SHOWN = 4


def price_plan(
    context: CostContext, plan: Plan, *, rank: int = 0, violations: tuple[Violation, ...] = ()
) -> PricedPlan:
    """Price one plan with its memory per stage, its time per part and its traffic.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    plan : Plan
        The plan; its layout must place all layers of the model.
    rank : int
        Place in a ranking, 0 outside one.
    violations : tuple of Violation
        Rules that the plan breaks, the memory limit included by the caller.

    Returns
    -------
    PricedPlan
        Bytes are rounded up to whole ones per part; feasible where no rule is broken.

    Notes
    -----
    A1. Time parts are those of the stage that paces the pipeline; reduction and optimizer those of the stage that ends
        last.

    Source: docs/cost-model/.
    """
    prepared = prepare(context, PlanTable.from_plans([plan]))
    group = price_group(prepared, np.zeros(1, dtype=np.int64), every_stage=True)
    job = context.job
    step_s = float(group.step_s[0])
    tokens = job.global_batch * job.seq_len / step_s / job.devices
    rate = tokens * model_flops_per_token(context.model, job.seq_len)
    machine = context.machine
    peak = machine.peak_bf16_flops_per_s if job.precision is Precision.BF16 else machine.peak_fp8_flops_per_s
    memory = MemoryBreakdown(
        limit_bytes=job.memory_limit_bytes,
        stages=tuple(_stage_memory(run.stage, group.memories[index]) for index, run in enumerate(group.runs)),
    )
    return PricedPlan(
        rank=rank,
        name=plan_name(plan),
        plan=plan,
        feasible=not violations,
        violations=violations,
        step_time_s=step_s,
        tokens_per_s_per_device=tokens,
        model_flops_per_s_per_device=rate,
        mfu_ratio=rate / peak,
        memory=memory,
        time=_time(prepared, group, plan),
        traffic=_traffic(prepared, group, plan),
        stage_times_s=tuple(
            float(stage.forward[0] + stage.backward[0] + stage.replica_each[0]) * plan.num_microbatches
            for stage in group.seconds
        ),
    )


def _stage_memory(stage: int, parts: StageBytes) -> StageMemory:
    """Turn the arrays of one stage (one row) into a record of whole bytes."""

    def whole(array: FloatArray) -> int:
        return ceil(float(array[0]) - 1e-3)

    named = (
        ("expert weights", parts.expert_weights),
        ("expert gradients", parts.expert_gradients),
        ("expert optimizer state", parts.expert_optimizer),
        ("shared weights", parts.shared_weights),
        ("shared gradients", parts.shared_gradients),
        ("shared optimizer state", parts.shared_optimizer),
        ("router state", parts.router),
        ("activations in flight", parts.activations),
        ("dispatch state and buffers", parts.dispatch),
        ("logits and loss", parts.logits),
        ("gradient buckets and workspaces", parts.buffers),
    )
    ranked = sorted(((name, whole(array)) for name, array in named), key=lambda pair: -pair[1])
    return StageMemory(
        stage=stage,
        moment=Moment(int(parts.moment[0])).name.lower(),
        shared=StateBytes(
            weights_bytes=whole(parts.shared_weights),
            gradients_bytes=whole(parts.shared_gradients),
            optimizer_bytes=whole(parts.shared_optimizer),
        ),
        expert=StateBytes(
            weights_bytes=whole(parts.expert_weights),
            gradients_bytes=whole(parts.expert_gradients),
            optimizer_bytes=whole(parts.expert_optimizer),
        ),
        router_bytes=whole(parts.router),
        activations_bytes=whole(parts.activations),
        dispatch_bytes=whole(parts.dispatch),
        logits_bytes=whole(parts.logits),
        buffers_bytes=whole(parts.buffers),
        reserve_bytes=whole(parts.reserve),
        largest=tuple(pair for pair in ranked[:LARGEST_SHOWN] if pair[1] > 0),
    )


def _time(prepared: Prepared, group: GroupPrice, plan: Plan) -> TimeBreakdown:
    """Exposed seconds per part on the critical stage."""
    critical = int(group.span.critical[0])
    run, stage = group.runs[critical], group.seconds[critical]
    counts = run.counts * run.share * plan.num_microbatches
    parts = sum(
        (
            count * (time.forward + time.backward)[:, 0]
            for count, time in zip(counts, prepared.blocks.times, strict=True)
        ),
        start=np.zeros(len(Part)),
    )
    last = group.seconds[int(group.last[0])]
    return TimeBreakdown(
        attention_s=float(parts[Part.ATTENTION]),
        dense_ffn_s=float(parts[Part.DENSE_FFN]),
        router_s=float(parts[Part.ROUTER]),
        dispatch_s=float(parts[Part.DISPATCH]),
        expert_s=float(parts[Part.EXPERT]),
        combine_s=float(parts[Part.COMBINE]),
        shared_expert_s=float(parts[Part.SHARED_EXPERT]),
        head_s=float(parts[Part.HEAD]),
        recompute_s=float(parts[Part.RECOMPUTE]),
        tp_comm_s=float(parts[Part.TP_COMM]),
        cp_comm_s=float(parts[Part.CP_COMM]),
        pp_comm_s=float(group.span.hop_s[0]),
        bubble_s=float(group.span.bubble_s[0]),
        dp_comm_s=float(stage.replica_each[0] * plan.num_microbatches + last.replica_once[0]),
        optimizer_s=float(last.optimizer[0]),
        other_s=float(parts[Part.OTHER]),
        imbalance_s=float(parts[Part.IMBALANCE]),
    )


def _traffic(prepared: Prepared, group: GroupPrice, plan: Plan) -> Traffic:
    """Bytes that the busiest device of the critical stage sends in one step."""
    critical = int(group.span.critical[0])
    run, stage = group.runs[critical], group.seconds[critical]
    counts = run.counts * run.share * plan.num_microbatches
    sent = sum(
        (
            count * (time.sent_forward + time.sent_backward)[:, 0]
            for count, time in zip(counts, prepared.blocks.times, strict=True)
        ),
        start=np.zeros(len(Wire)),
    )
    hop = float(prepared.blocks.shapes.local_tokens[0]) * prepared.model.hidden_size * BF16_BYTES
    ends = (run.stage == 0) + (run.stage == plan.pp - 1)
    sends = (2 * plan.vpp - ends) * plan.num_microbatches if plan.pp > 1 else 0
    each, once = np.asarray(stage.replica.sent_each_bytes), np.asarray(stage.replica.sent_once_bytes)
    replica = float(each[0]) * plan.num_microbatches + float(once[0])
    return Traffic(
        dispatch_bytes=round(float(sent[Wire.DISPATCH])),
        combine_bytes=round(float(sent[Wire.COMBINE])),
        tp_bytes=round(float(sent[Wire.TP])),
        cp_bytes=round(float(sent[Wire.CP])),
        pp_bytes=round(hop * sends),
        dp_bytes=round(replica),
    )
