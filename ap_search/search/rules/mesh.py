"""Rules of the two meshes: how many devices, and what tensor, context and expert parallelism divide."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from ap_search.plan.plan import Plan
from ap_search.plan.table import IntArray, PlanTable
from ap_search.result import Lever
from ap_search.search.rules.base import (
    Broken,
    MeshPoster,
    Rule,
    RuleContext,
    nearest_multiples,
    not_multiple,
    unless,
    worst,
)
from ap_search.search.rules.sizes import (
    Divided,
    expert_widths,
    experts,
    ffn_widths,
    heads,
    hidden,
    kv_heads,
    moe_kinds,
    shared_widths,
)
from ap_search.spec.blocks import Model

REQUIREMENT = "EP estimation requirement 001, section 3.3"


_WORLD_SOURCE = f"Megatron-LM megatron/core/parallel_state.py, arguments.py; {REQUIREMENT}"


def divides(*, id: str, sentence: str, source: str, axis: str, sizes: Callable[[Model], Divided]) -> Rule:
    """Make the rule that an axis divides some sizes of the model.

    Parameters
    ----------
    id, sentence, source : str
        As for `Rule`.
    axis : str
        The mesh axis.
    sizes : callable
        The sizes that it must divide, none where the rule has nothing to say.

    Returns
    -------
    Rule
    """

    def margin(context: RuleContext, table: PlanTable) -> IntArray:
        return worst([not_multiple(size, getattr(table, axis)) for size, _ in sizes(context.model)], table)

    def describe(context: RuleContext, plan: Plan) -> Broken:
        degree = getattr(plan, axis)
        size, name = max(sizes(context.model), key=lambda one: one[0] % degree)
        text = f"{size} {name} do not divide over {axis}={degree} ({size} % {degree} = {size % degree})"
        return Broken(text=text, demand=degree, bound=size, unit=name)

    def post(context: RuleContext, poster: MeshPoster) -> None:
        for size, _ in sizes(context.model):
            poster.divide((axis,), size)

    return Rule(
        id=id,
        sentence=sentence,
        source=source,
        reads=(axis,),
        margin=margin,
        describe=describe,
        levers=(axis,),
        post=post,
    )


def _world(axes: tuple[str, ...], quotient: str, *, id: str, sentence: str) -> Rule:
    """Make the rule that `axes` divide the devices; the `quotient` axis is what remains (dp may be given)."""
    given = quotient == "dp"

    def product(table: PlanTable) -> IntArray:
        return np.asarray(np.prod([getattr(table, axis) for axis in axes], axis=0, dtype=np.int64))

    def margin(context: RuleContext, table: PlanTable) -> IntArray:
        devices, inner = context.job.devices, product(table)
        missed = np.abs(devices - inner * table.dp) if given else 0
        return np.where(devices % inner > 0, not_multiple(devices, inner), -missed)

    def describe(context: RuleContext, plan: Plan) -> Broken:
        devices, inner = context.job.devices, math.prod(getattr(plan, axis) for axis in axes)
        degrees = "*".join(str(getattr(plan, axis)) for axis in axes)
        shown = f"{'*'.join(axes)} = {degrees} = {inner}"
        if devices % inner:
            text = f"{devices} devices do not divide by {shown}"
            return Broken(text=text, demand=inner, bound=devices, unit="devices")
        text = f"{quotient}={plan.dp} times {shown} is not the {devices} devices"
        return Broken(text=text, demand=inner * plan.dp, bound=devices, unit="devices")

    def job_levers(context: RuleContext, plan: Plan) -> tuple[Lever, ...]:
        inner = math.prod(getattr(plan, axis) for axis in axes)
        return nearest_multiples("devices", context.job.devices, inner) if context.job.devices % inner else ()

    return Rule(
        id=id,
        sentence=sentence,
        source=_WORLD_SOURCE,
        reads=(*axes, "dp") if given else axes,
        margin=margin,
        describe=describe,
        levers=(*axes, "dp") if given else axes,
        job_levers=job_levers,
        post=lambda context, poster: poster.equal((*axes, quotient), context.job.devices),
    )


def _kv_margin(context: RuleContext, table: PlanTable) -> IntArray:
    tp = table.tp
    return worst([-np.minimum(count % tp, tp % count) for count, _ in kv_heads(context.model)], table)


def _kv_describe(context: RuleContext, plan: Plan) -> Broken:
    count = max((count for count, _ in kv_heads(context.model)), key=lambda one: min(one % plan.tp, plan.tp % one))
    text = f"{count} key/value heads neither divide over tp={plan.tp} nor divide it"
    return Broken(text=text, demand=plan.tp, bound=count, unit="key/value heads")


def _divides_or_is_divided(count: int, tp: int) -> bool:
    return count % tp == 0 or tp % count == 0


def _kv_post(context: RuleContext, poster: MeshPoster) -> None:
    for count, _ in kv_heads(context.model):
        poster.keep("tp", partial(_divides_or_is_divided, count))


def _needs_experts_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless(bool(moe_kinds(context.model)) | (table.ep * table.etp == 1), table, table.ep * table.etp - 1)


def _needs_experts_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"{context.model.name} is dense: there are no experts to spread over ep={plan.ep}, etp={plan.etp}"
    return Broken(text=text, demand=plan.ep * plan.etp, bound=1, unit="devices per expert group")


def _needs_experts_post(context: RuleContext, poster: MeshPoster) -> None:
    if not moe_kinds(context.model):
        poster.keep("ep", lambda ep: ep == 1)
        poster.keep("etp", lambda etp: etp == 1)


def _copies_margin(context: RuleContext, table: PlanTable) -> IntArray:
    copies = context.job.redundant_experts
    return worst([not_multiple(size + copies, table.ep) for size, _ in experts(context.model) if copies], table)


def _copies_describe(context: RuleContext, plan: Plan) -> Broken:
    copies = context.job.redundant_experts
    size = max((size + copies for size, _ in experts(context.model)), key=lambda one: one % plan.ep)
    text = f"{size - copies} experts and {copies} redundant ones do not divide over ep={plan.ep}"
    return Broken(text=text, demand=plan.ep, bound=size, unit="experts and copies")


def _copies_post(context: RuleContext, poster: MeshPoster) -> None:
    copies = context.job.redundant_experts
    for size in (size + copies for size, _ in experts(context.model) if copies):
        poster.divide(("ep",), size)


def _sequence_cp_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return np.where(table.cp > 1, not_multiple(context.job.seq_len, 2 * table.cp), 0)


def _sequence_cp_describe(context: RuleContext, plan: Plan) -> Broken:
    seq_len = context.job.seq_len
    text = f"sequence length {seq_len} does not divide by 2*cp = {2 * plan.cp} (two chunks per rank balance causality)"
    return Broken(text=text, demand=2 * plan.cp, bound=seq_len, unit="tokens")


def _sequence_parts(plan: Plan) -> int:
    return plan.cp * (plan.tp if plan.sequence_parallel else 1)


def _sequence_tp_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return not_multiple(context.job.seq_len, table.cp * np.where(table.sequence_parallel > 0, table.tp, 1))


def _sequence_tp_describe(context: RuleContext, plan: Plan) -> Broken:
    seq_len, parts = context.job.seq_len, _sequence_parts(plan)
    text = f"sequence length {seq_len} does not divide over cp={plan.cp} and, by sequence parallelism, tp={plan.tp}"
    return Broken(text=text, demand=parts, bound=seq_len, unit="tokens")


def _sequence_parallel_tp_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.sequence_parallel == 0) | (table.tp > 1), table)


def _sequence_parallel_tp_describe(context: RuleContext, plan: Plan) -> Broken:
    text = "sequence parallelism is on, but tp=1: there are no tensor-parallel ranks to split the sequence over"
    return Broken(text=text, demand=2, bound=plan.tp, unit="tensor-parallel ranks")


def _moe_sequence_parallel_margin(context: RuleContext, table: PlanTable) -> IntArray:
    on_or_alone = (table.sequence_parallel > 0) | (table.tp == 1)
    return unless(on_or_alone | (not moe_kinds(context.model)), table)


def _moe_sequence_parallel_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"MoE training with tp={plan.tp} needs sequence parallelism, which is off"
    return Broken(text=text, demand=plan.tp, bound=1, unit="tensor-parallel ranks")


def routing_faults(context: RuleContext) -> tuple[str, ...]:
    """List what is wrong with the router's own sizes, whatever the plan.

    Parameters
    ----------
    context : RuleContext
        Model and capacity factor.

    Returns
    -------
    tuple of str
        One clause per fault; empty for a dense model.
    """
    faults: list[str] = []
    for moe in moe_kinds(context.model):
        per_group = moe.num_experts // moe.num_groups
        checks = (
            (1 <= moe.top_k <= moe.num_experts, f"top_k={moe.top_k} of {moe.num_experts} experts"),
            (moe.num_experts % moe.num_groups == 0, f"{moe.num_experts} experts in {moe.num_groups} groups"),
            (1 <= moe.topk_groups <= moe.num_groups, f"topk_groups={moe.topk_groups} of {moe.num_groups} groups"),
            (
                moe.num_groups == 1 or moe.top_k <= moe.topk_groups * per_group,
                f"top_k={moe.top_k} out of {moe.topk_groups} groups of {per_group} experts",
            ),
            (context.job.capacity_factor >= 0, f"capacity factor {context.job.capacity_factor:g}"),
        )
        faults += [text for fine, text in checks if not fine]
    return tuple(dict.fromkeys(faults))


def _routing_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return np.full(len(table), -len(routing_faults(context)), dtype=np.int64)


def _routing_describe(context: RuleContext, plan: Plan) -> Broken:
    faults = routing_faults(context)
    return Broken(text="no legal routing: " + "; ".join(faults), demand=len(faults), bound=0, unit="faults")


MESH_RULES: tuple[Rule, ...] = (
    Rule(
        id="routing",
        sentence="the router can choose: its groups hold top_k experts, and the capacity factor is not negative",
        source=f"Megatron-LM megatron/core/transformer/transformer_config.py (group-limited routing); {REQUIREMENT}",
        reads=(),
        margin=_routing_margin,
        describe=_routing_describe,
    ),
    divides(
        id="heads_tp",
        sentence="tp divides the heads of every attention kind",
        source=f"Megatron-LM megatron/core/transformer/transformer_config.py; {REQUIREMENT}",
        axis="tp",
        sizes=heads,
    ),
    Rule(
        id="kv_heads_tp",
        sentence="tp divides the key/value heads, or they divide tp (each is then held by several ranks)",
        source="Megatron-LM transformer_config.py, attention.py (the second since pull request 2565, December 2025)",
        reads=("tp",),
        margin=_kv_margin,
        describe=_kv_describe,
        levers=("tp",),
        post=_kv_post,
    ),
    divides(
        id="hidden_tp",
        sentence="tp divides the hidden size",
        source=REQUIREMENT,
        axis="tp",
        sizes=hidden,
    ),
    divides(
        id="ffn_tp",
        sentence="tp divides the width of the dense feed-forward",
        source="Megatron-LM megatron/core/tensor_parallel/layers.py (linear layers split exactly)",
        axis="tp",
        sizes=ffn_widths,
    ),
    divides(
        id="shared_expert_tp",
        sentence="tp divides the total width of the shared experts",
        source="Megatron-LM megatron/core/tensor_parallel/layers.py, transformer/moe/shared_experts.py",
        axis="tp",
        sizes=shared_widths,
    ),
    Rule(
        id="ep_needs_experts",
        sentence="a dense model has no experts: ep = etp = 1",
        source="Megatron-LM megatron/training/arguments.py (ep > 1 needs num_experts)",
        reads=("ep", "etp"),
        margin=_needs_experts_margin,
        describe=_needs_experts_describe,
        levers=("ep", "etp"),
        post=_needs_experts_post,
    ),
    divides(
        id="experts_ep",
        sentence="ep divides the number of experts",
        source=f"Megatron-LM megatron/training/arguments.py; {REQUIREMENT}",
        axis="ep",
        sizes=experts,
    ),
    Rule(
        id="redundant_experts_ep",
        sentence="ep divides the experts and redundant experts together: each rank holds as many",
        source="deepseek-ai/EPLB eplb.py (replicas % GPUs); deepseek-ai/LPLB lplb/planner.py",
        reads=("ep",),
        margin=_copies_margin,
        describe=_copies_describe,
        levers=("ep",),
        job_levers=lambda context, plan: nearest_multiples("redundant_experts", context.job.redundant_experts, plan.ep),
        post=_copies_post,
    ),
    divides(
        id="expert_ffn_etp",
        sentence="etp divides the hidden width of an expert",
        source=f"Megatron-LM megatron/core/tensor_parallel/layers.py (divide); {REQUIREMENT}",
        axis="etp",
        sizes=expert_widths,
    ),
    Rule(
        id="sequence_cp",
        sentence="with cp > 1, 2*cp divides the sequence length",
        source="Megatron-LM megatron/training/arguments.py",
        reads=("cp",),
        margin=_sequence_cp_margin,
        describe=_sequence_cp_describe,
        levers=("cp",),
        job_levers=lambda context, plan: nearest_multiples("seq_len", context.job.seq_len, 2 * plan.cp),
        post=lambda context, poster: poster.keep("cp", lambda cp: cp == 1 or context.job.seq_len % (2 * cp) == 0),
    ),
    Rule(
        id="sequence_tp",
        sentence="cp, times tp under sequence parallelism, divides the sequence length",
        source="Megatron-LM megatron/core/pipeline_parallel/schedules.py (tensor shapes are s//cp//tp)",
        reads=("cp", "tp"),
        margin=_sequence_tp_margin,
        describe=_sequence_tp_describe,
        levers=("tp", "cp"),
        job_levers=lambda context, plan: nearest_multiples("seq_len", context.job.seq_len, _sequence_parts(plan)),
        post=lambda context, poster: poster.divide(("cp", "tp"), context.job.seq_len),
    ),
    Rule(
        id="sequence_parallel_needs_tp",
        sentence="sequence parallelism needs tp > 1",
        source="Megatron-LM megatron/core/model_parallel_config.py",
        reads=("tp",),
        margin=_sequence_parallel_tp_margin,
        describe=_sequence_parallel_tp_describe,
        levers=("sequence_parallel", "tp"),
    ),
    Rule(
        id="moe_needs_sequence_parallel",
        sentence="MoE training with tp > 1 runs with sequence parallelism",
        source="Megatron-LM megatron/core/transformer/moe/moe_layer.py (MoELayer.forward raises)",
        reads=("tp",),
        margin=_moe_sequence_parallel_margin,
        describe=_moe_sequence_parallel_describe,
        levers=("sequence_parallel", "tp"),
    ),
    _world(
        ("tp", "cp", "pp"),
        "dp",
        id="world_dense",
        sentence="the dense mesh fills the devices: tp*cp*pp divides them, dp is the quotient",
    ),
    _world(
        ("etp", "ep", "pp"),
        "edp",
        id="world_expert",
        sentence="the expert mesh fills the same devices: etp*ep*pp divides them, edp is the quotient",
    ),
)
