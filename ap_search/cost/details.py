"""One plan in full: every stage, every part, as frozen records; the same arrays as the search, with one row."""

from math import ceil

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.flops import model_flops_per_token
from ap_search.cost.group import PlanGroup, plan_group
from ap_search.cost.overlap import unpaired_reason
from ap_search.cost.parts import Wire
from ap_search.cost.prepared import prepare
from ap_search.cost.rows import as_breakdown, exposed_parts_s
from ap_search.cost.stage_memory import Moment, StageBytes, stage_bytes
from ap_search.cost.stages import StageRun, stage_runs
from ap_search.cost.state import ParamBytes
from ap_search.cost.step import GroupTime, StageSeconds, group_time
from ap_search.plan.plan import Plan
from ap_search.plan.table import PlanTable
from ap_search.plan.text import plan_name
from ap_search.result import (
    HiddenTime,
    MemoryBreakdown,
    PricedPlan,
    StageMemory,
    StateBytes,
    Traffic,
    Violation,
)
from ap_search.spec.job import Precision
from ap_search.units import BF16_BYTES, Quantity

FloatArray = NDArray[np.float64]
LARGEST_SHOWN = 4
# Sums of floats may exceed a whole number of bytes by less than this.
ROUNDING_BYTES = 1e-3


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
    A2. Figures per device are of the devices that the plan occupies and of the sequences that it trains: the job's,
        unless it breaks the rules of the world or the batch.

    Source: docs/cost-model/.
    """
    group = plan_group(prepare(context, PlanTable.from_plans([plan])), np.zeros(1, dtype=np.int64))
    runs = stage_runs(group.context.model, group.layout, schedule=group.schedule, every=True)
    timed = group_time(group, runs)
    job, critical = context.job, int(timed.span.critical[0])
    step_s = float(timed.step_s[0])
    own = plan.dp * plan.cp * plan.tp * plan.pp
    tokens = plan.dp * plan.mbs * plan.num_microbatches * job.seq_len / step_s / own
    rate = tokens * model_flops_per_token(context.model, job.seq_len)
    machine = context.machine
    peak = machine.peak_bf16_flops_per_s if job.precision is Precision.BF16 else machine.peak_fp8_flops_per_s
    memory = MemoryBreakdown(
        limit_bytes=job.memory_limit_bytes,
        stages=tuple(_stage_memory(run.stage, stage_bytes(group, run)) for run in runs),
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
        time=as_breakdown(exposed_parts_s(group, runs, timed)[:, 0]),
        hidden=_hidden(group, runs, timed),
        notes=tuple(note for note in (unpaired_reason(group.context, plan),) if note),
        traffic=stage_traffic(group, runs[critical], timed.seconds[critical]),
        critical_stage=runs[critical].stage,
        stage_times_s=tuple(
            float(stage.forward[0] + stage.backward[0] + stage.replica_each[0]) * plan.num_microbatches
            - float(hidden[:, 0].sum())
            for stage, hidden in zip(timed.seconds, timed.paired_by_run, strict=True)
        ),
    )


def _whole(array: Quantity) -> int:
    """Round the only entry of an array of bytes up to whole ones."""
    return ceil(float(np.asarray(array)[0]) - ROUNDING_BYTES)


def _state(params: FloatArray, kept: ParamBytes) -> StateBytes:
    """Weights, gradients and optimizer state of some parameters in whole bytes."""
    return StateBytes(
        weights_bytes=_whole(params * kept.weights),
        gradients_bytes=_whole(params * kept.gradients),
        optimizer_bytes=_whole(params * kept.optimizer),
    )


def _stage_memory(stage: int, parts: StageBytes) -> StageMemory:
    """Turn the arrays of one stage (one row) into a record of whole bytes."""
    shared = _state(parts.shared, parts.shared_kept)
    expert = _state(parts.expert, parts.expert_kept)
    router = _whole(parts.router * parts.shared_kept.total)
    named = (
        ("expert weights", expert.weights_bytes),
        ("expert gradients", expert.gradients_bytes),
        ("expert optimizer state", expert.optimizer_bytes),
        ("shared weights", shared.weights_bytes),
        ("shared gradients", shared.gradients_bytes),
        ("shared optimizer state", shared.optimizer_bytes),
        ("router state", router),
        ("activations in flight", _whole(parts.activations)),
        ("dispatch state and buffers", _whole(parts.dispatch)),
        ("logits and loss", _whole(parts.logits)),
        ("gradient buckets and workspaces", _whole(parts.buffers)),
    )
    ranked = sorted(named, key=lambda pair: -pair[1])
    return StageMemory(
        stage=stage,
        moment=Moment(int(parts.moment[0])).name.lower(),
        shared=shared,
        expert=expert,
        router_bytes=router,
        activations_bytes=_whole(parts.activations),
        dispatch_bytes=_whole(parts.dispatch),
        logits_bytes=_whole(parts.logits),
        buffers_bytes=_whole(parts.buffers),
        reserve_bytes=ceil(parts.reserve),
        largest=tuple(pair for pair in ranked[:LARGEST_SHOWN] if pair[1] > 0),
    )


def _hidden(group: PlanGroup, runs: tuple[StageRun, ...], timed: GroupTime) -> HiddenTime:
    """Communication seconds of the critical stage that run beside compute."""
    critical, plan = int(timed.span.critical[0]), group.table.row(0)
    run, stage = runs[critical], timed.seconds[critical]
    counts = run.counts * run.share * plan.num_microbatches
    beside = sum(
        (count * time.hidden[:, 0] for count, time in zip(counts, group.prepared.blocks.times, strict=True)),
        start=np.zeros(len(Wire)),
    )
    last = timed.seconds[int(timed.last[0])]
    each = np.asarray(stage.replica.forward_s + stage.replica.backward_s) - stage.replica_each
    once = np.asarray(last.replica.reduce_s + last.replica.gather_s) - last.replica_once
    return HiddenTime(
        ep_comm_s=float(beside[Wire.DISPATCH] + timed.paired[:, 0].sum()),
        tp_comm_s=float(beside[Wire.TP]),
        cp_comm_s=float(beside[Wire.CP]),
        dp_comm_s=float(each[0] * plan.num_microbatches + once[0]),
    )


def stage_traffic(group: PlanGroup, run: StageRun, seconds: StageSeconds) -> Traffic:
    """Count what the busiest device of one stage sends in one step, bytes.

    Parameters
    ----------
    group : PlanGroup
        One plan.
    run : StageRun
        The stage.
    seconds : StageSeconds
        What `stage_seconds` gave for it.

    Returns
    -------
    Traffic
        Whole bytes, the device itself left out.

    Notes
    -----
    A1. The first and the last stage send one tensor fewer per micro-batch than middle ones.

    Source: docs/cost-model/dispatch.md, docs/cost-model/data-parallel.md, docs/cost-model/pipeline.md.
    """
    plan = group.table.row(0)
    counts = run.counts * run.share * plan.num_microbatches
    sent = sum(
        (
            count * (time.sent_forward_bytes + time.sent_backward_bytes)[:, 0]
            for count, time in zip(counts, group.prepared.blocks.times, strict=True)
        ),
        start=np.zeros(len(Wire)),
    )
    hop = float(group.local_tokens[0]) * group.context.model.hidden_size * BF16_BYTES
    ends = (run.stage == 0) + (run.stage == plan.pp - 1)
    sends = (2 * plan.vpp - ends) * plan.num_microbatches if plan.pp > 1 else 0
    each, once = np.asarray(seconds.replica.sent_each_bytes), np.asarray(seconds.replica.sent_once_bytes)
    replica = float(each[0]) * plan.num_microbatches + float(once[0])
    return Traffic(
        dispatch_bytes=round(float(sent[Wire.DISPATCH])),
        combine_bytes=round(float(sent[Wire.COMBINE])),
        tp_bytes=round(float(sent[Wire.TP])),
        cp_bytes=round(float(sent[Wire.CP])),
        pp_bytes=round(hop * sends),
        dp_bytes=round(replica),
    )
