"""Rules of kernels and layers: what context parallelism, low precision, DeepEP and split backward passes take.

Some of them refuse what a trainer may run but this cost model does not price; their sentence says "not priced here".
"""

import numpy as np

from ap_search.plan.mesh import plan_placement
from ap_search.plan.plan import Dispatcher, Plan, Schedule
from ap_search.plan.table import IntArray, PlanTable
from ap_search.plan.text import dispatcher_text, recompute_text
from ap_search.result import Lever
from ap_search.search.rules.base import Broken, MeshPoster, Rule, RuleContext, not_multiple, unless, worst
from ap_search.search.rules.sizes import Sliced, context_parallel_faults, moe_kinds, product_widths
from ap_search.spec.job import Precision

_TE = "TransformerEngine transformer_engine/pytorch"
DEEPEP_NODE = 8
FUSED = (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP)
WIDTH_UNITS = {Precision.FP8: 16, Precision.MXFP8: 32}


def _cp_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.cp == 1) | (not context_parallel_faults(context.model)), table, table.cp - 1)


def _cp_describe(context: RuleContext, plan: Plan) -> Broken:
    faults = context_parallel_faults(context.model)
    text = f"cp={plan.cp} is not priced here for layers with {' and '.join(faults)}"
    return Broken(text=text, demand=plan.cp, bound=1, unit="context-parallel ranks")


def _cp_post(context: RuleContext, poster: MeshPoster) -> None:
    if context_parallel_faults(context.model):
        poster.keep("cp", lambda cp: cp == 1)


def _expert_bias_margin(context: RuleContext, table: PlanTable) -> IntArray:
    biased = any(moe.expert_bias for moe in moe_kinds(context.model))
    return unless((table.etp == 1) | (not biased), table, table.etp - 1)


def _expert_bias_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"experts with biases cannot be cut over etp={plan.etp}: each rank would add the bias"
    return Broken(text=text, demand=plan.etp, bound=1, unit="expert-tensor ranks")


def _expert_bias_post(context: RuleContext, poster: MeshPoster) -> None:
    if any(moe.expert_bias for moe in moe_kinds(context.model)):
        poster.keep("etp", lambda etp: etp == 1)


def _low_precision_widths(context: RuleContext) -> tuple[int, tuple[Sliced, ...]]:
    """Give the unit of widths in the job's precision and the widths that it binds: none in bf16."""
    unit = WIDTH_UNITS.get(context.job.precision, 1)
    return unit, product_widths(context.model) if unit > 1 else ()


def _widths_margin(context: RuleContext, table: PlanTable) -> IntArray:
    unit, widths = _low_precision_widths(context)
    degrees = ((size, getattr(table, axis) if axis else np.ones_like(table.tp)) for size, axis, _ in widths)
    return worst([not_multiple(size, unit * degree) for size, degree in degrees], table)


def _widths_describe(context: RuleContext, plan: Plan) -> Broken:
    unit, widths = _low_precision_widths(context)
    sliced = [(size, getattr(plan, axis) if axis else 1, axis, name) for size, axis, name in widths]
    size, degree, axis, name = max(sliced, key=lambda one: one[0] % (unit * one[1]))
    over = f" over {axis}={degree}" if axis else ""
    text = f"{context.job.precision}: {name} {size}{over} gives no multiple of {unit}"
    return Broken(text=text, demand=unit * degree, bound=size, unit=name)


def _widths_post(context: RuleContext, poster: MeshPoster) -> None:
    unit, widths = _low_precision_widths(context)
    for size, axis, _ in widths:
        if size % unit:
            poster.keep("tp", lambda degree: False)
        elif axis:
            poster.divide((axis,), size // unit)


def _kernels_margin(context: RuleContext, table: PlanTable) -> IntArray:
    missing = [value for value in FUSED if dispatcher_text(value) not in context.machine.fused_dispatchers]
    return unless(~np.isin(table.dispatcher, missing), table)


def _kernels_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"{dispatcher_text(plan.dispatcher)} has no kernels for {context.machine.device}"
    return Broken(text=text, demand=1, bound=0, unit="dispatchers")


def _padded_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.dispatcher != Dispatcher.DEEPEP) | (not context.job.pad_to_capacity), table)


def _padded_describe(context: RuleContext, plan: Plan) -> Broken:
    text = "deepep does not pad experts' inputs to capacity, which the job asks for"
    return Broken(text=text, demand=1, bound=0, unit="padded inputs")


def _together(context: RuleContext, table: PlanTable) -> tuple[IntArray, IntArray]:
    """Count per plan the members of an expert group in one scale-up domain, and the domains that it spans."""
    domain = context.machine.domain_size(context.job.devices)
    return plan_placement(table, group="tp-ep", domain_size=domain, world=context.job.devices)


def _node_margin(context: RuleContext, table: PlanTable) -> IntArray:
    margin = np.zeros(len(table), dtype=np.int64)
    rows = np.flatnonzero(table.dispatcher == Dispatcher.DEEPEP)
    fused = table.take(rows)
    together, domains = _together(context, fused)
    margin[rows] = np.where(domains > 1, -np.abs(together - DEEPEP_NODE), 0)
    return margin


def _node_describe(context: RuleContext, plan: Plan) -> Broken:
    together, domains = (int(counts[0]) for counts in _together(context, PlanTable.from_plans([plan])))
    group = plan.ep * plan.etp
    text = (
        f"deepep counts {DEEPEP_NODE} devices to a node, but a group of ep*etp = {group} lies on {domains} scale-up"
        f" domains, {together} to one"
    )
    return Broken(text=text, demand=together, bound=DEEPEP_NODE, unit="devices of a group in one domain")


def _split_backward_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.schedule != Schedule.ZB_H1) | (table.recompute == 0), table)


def _split_backward_describe(context: RuleContext, plan: Plan) -> Broken:
    chosen = recompute_text(plan.recompute)
    text = f"zb_h1 with recompute={chosen} is not priced here: what is recomputed would have to stay"
    return Broken(text=text, demand=1, bound=0, unit="kinds of recompute")


KERNEL_MESH_RULES: tuple[Rule, ...] = (
    Rule(
        id="cp_attention",
        sentence="cp > 1 needs full softmax attention in every layer: windows, picked keys, sinks and scans are not"
        " priced here",
        source=f"{_TE}/attention/dot_product_attention/context_parallel.py (its ring takes no windows) and"
        " tests/pytorch/attention/test_attention_with_cp.py (nor sinks); Megatron-LM"
        " megatron/core/ssm/mamba_context_parallel.py (an all-to-all of its own)",
        reads=("cp",),
        margin=_cp_margin,
        describe=_cp_describe,
        levers=("cp",),
        post=_cp_post,
    ),
    Rule(
        id="expert_bias_etp",
        sentence="experts with biases have etp = 1",
        source="Megatron-LM megatron/core/transformer/transformer_config.py (bias in MoE only with ETP 1)",
        reads=("etp",),
        margin=_expert_bias_margin,
        describe=_expert_bias_describe,
        levers=("etp",),
        post=_expert_bias_post,
    ),
    Rule(
        id="fp8_widths",
        sentence="in fp8 the inner width of every product on a rank is a multiple of 16, in mxfp8 of 32",
        source=f"{_TE}/utils.py (assert_dim_for_fp8_exec), tensor/mxfp8_tensor.py",
        reads=("tp", "etp"),
        margin=_widths_margin,
        describe=_widths_describe,
        levers=("tp", "etp"),
        job_levers=lambda context, plan: (Lever(change="precision=bf16", effect="takes any width"),),
        post=_widths_post,
    ),
)

KERNEL_DISPATCHER_RULES: tuple[Rule, ...] = (
    Rule(
        id="dispatcher_kernels",
        sentence="deepep and hybridep run on devices that have their kernels: the cluster's `fused_dispatchers`",
        source="NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/flex_dispatcher_backend.py;"
        " deepseek-ai/DeepEP README (requirements)",
        reads=("dispatcher",),
        margin=_kernels_margin,
        describe=_kernels_describe,
        levers=("dispatcher",),
    ),
    Rule(
        id="deepep_padding",
        sentence="deepep does not pad experts' inputs to capacity",
        source="Megatron-LM megatron/core/transformer/transformer_config.py (moe_pad_expert_input_to_capacity)",
        reads=("dispatcher",),
        margin=_padded_margin,
        describe=_padded_describe,
        levers=("dispatcher",),
    ),
    Rule(
        id="deepep_node",
        sentence="deepep counts 8 devices to a node: a group that leaves its scale-up domain lies 8 to a domain",
        source="deepseek-ai/DeepEP csrc/kernels/configs.cuh (NUM_MAX_NVL_PEERS), deep_ep.cpp; inside an NVL72 rack"
        " NVIDIA's published DeepSeek-V3 runs on GB200 used it at EP 32",
        reads=("ep", "etp", "dispatcher"),
        margin=_node_margin,
        describe=_node_describe,
        levers=("dispatcher", "ep"),
    ),
)

KERNEL_RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        id="zb_h1_recompute",
        sentence="zb_h1 runs without recompute: what is recomputed would have to stay for the weight gradients that it"
        " delays, which is not priced here",
        source="pytorch/pytorch issue 136766 (zero bubble with activation checkpointing runs out of memory)",
        reads=("schedule", "recompute"),
        margin=_split_backward_margin,
        describe=_split_backward_describe,
        levers=("recompute", "schedule"),
    ),
)
