"""Rules of the batch and the pipeline: micro-batches, tokens to dispatch, virtual stages, layouts, schedules."""

import numpy as np

from ap_search.plan.layout import layout_text
from ap_search.plan.plan import Plan, Schedule
from ap_search.plan.table import IntArray, PlanTable
from ap_search.result import Lever
from ap_search.search.rules.base import (
    Broken,
    Rule,
    RuleContext,
    holds_everywhere,
    nearest_multiples,
    not_multiple,
    unless,
)
from ap_search.search.rules.mesh import REQUIREMENT
from ap_search.search.rules.sizes import moe_kinds

_SCHEDULES = "Megatron-LM megatron/core/pipeline_parallel/schedules.py"
_ARGUMENTS = "Megatron-LM megatron/training/arguments.py"


def _batch_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return not_multiple(context.job.global_batch, table.mbs * table.dp)


def _batch_describe(context: RuleContext, plan: Plan) -> Broken:
    batch, unit = context.job.global_batch, plan.mbs * plan.dp
    text = f"global batch {batch} does not divide by mbs*dp = {plan.mbs}*{plan.dp} = {unit}"
    return Broken(text=text, demand=unit, bound=batch, unit="sequences")


def _token_parts(plan: Plan) -> int:
    return plan.cp * (plan.tp if plan.sequence_parallel else 1)


def _tokens_margin(context: RuleContext, table: PlanTable) -> IntArray:
    parts = table.cp * np.where(table.sequence_parallel > 0, table.tp, 1)
    held = context.job.seq_len * table.mbs
    return unless((held % parts == 0) | (not moe_kinds(context.model)), table, held % parts)


def _tokens_describe(context: RuleContext, plan: Plan) -> Broken:
    held, parts = context.job.seq_len * plan.mbs, _token_parts(plan)
    text = f"{held} tokens of a micro-batch do not divide into whole tokens over cp*tp = {parts} ranks for dispatch"
    return Broken(text=text, demand=parts, bound=held, unit="tokens")


def _stage_count_margin(context: RuleContext, table: PlanTable) -> IntArray:
    if context.given_layout:
        return holds_everywhere(table)
    return np.asarray(np.minimum(context.model.num_layers - table.pp * table.vpp, 0))


def _stage_count_describe(context: RuleContext, plan: Plan) -> Broken:
    stages, layers = plan.pp * plan.vpp, context.model.num_layers
    text = f"{layers} layers cannot fill pp={plan.pp} x vpp={plan.vpp} = {stages} virtual stages"
    return Broken(text=text, demand=stages, bound=layers, unit="virtual stages")


def _layout_margin(context: RuleContext, table: PlanTable) -> IntArray:
    layers = context.model.num_layers
    placed = [abs(layers - sum(layout.chunk_layers)) for layout in table.layouts]
    guessed = [
        0
        if context.explicit_layout or context.given_layout or layout.even
        else max(layers % (layout.pp * layout.vpp), 1)
        for layout in table.layouts
    ]
    return -np.maximum(np.array(placed, dtype=np.int64), guessed)[table.layout]


def _layout_describe(context: RuleContext, plan: Plan) -> Broken:
    layers, stages = context.model.num_layers, plan.pp * plan.vpp
    placed = sum(plan.layout.chunk_layers)
    if placed != layers:
        text = f"the layout places {placed} of {layers} layers"
        return Broken(text=text, demand=placed, bound=layers, unit="layers")
    text = (
        f"{layers} layers do not divide over pp={plan.pp} x vpp={plan.vpp} = {stages} virtual stages;"
        " Megatron-LM refuses, older versions silently drop layers"
    )
    return Broken(text=text, demand=layers % stages, bound=0, unit="layers left over")


def _layout_lever(context: RuleContext, plan: Plan) -> tuple[Lever, ...]:
    """Offer the layout that the plan was priced with, to be asked for by name."""
    if sum(plan.layout.chunk_layers) != context.model.num_layers:
        return ()
    change = "stage_layers=" + layout_text(plan.layout)
    return (Lever(change=change, effect="an uneven layout that is asked for is legal, empty stages too"),)


def _vpp_pipeline_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.vpp == 1) | (table.pp > 1), table)


def _vpp_pipeline_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"vpp={plan.vpp} interleaves chunks over pipeline stages, but pp=1"
    return Broken(text=text, demand=2, bound=plan.pp, unit="pipeline stages")


def _vpp_schedule_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.vpp > 1) == (table.schedule == Schedule.INTERLEAVED), table)


def _vpp_schedule_describe(context: RuleContext, plan: Plan) -> Broken:
    if plan.schedule is Schedule.INTERLEAVED:
        text, bound = "the interleaved schedule needs vpp > 1, but vpp=1", 2
    else:
        text, bound = f"vpp={plan.vpp} chunks per stage run on the interleaved schedule only", 1
    return Broken(text=text, demand=plan.vpp, bound=bound, unit="chunks per stage")


def _vpp_microbatches_margin(context: RuleContext, table: PlanTable) -> IntArray:
    short = np.minimum(table.num_microbatches - table.pp, 0)
    return np.where(table.schedule == Schedule.INTERLEAVED, short, 0)


def _vpp_microbatches_describe(context: RuleContext, plan: Plan) -> Broken:
    text = (
        f"{plan.num_microbatches} micro-batches are fewer than pp={plan.pp}: interleaving needs a group of N with"
        " pp <= N <= micro-batches"
    )
    return Broken(text=text, demand=plan.pp, bound=plan.num_microbatches, unit="micro-batches")


def _dualpipe_margin(context: RuleContext, table: PlanTable) -> IntArray:
    short = np.maximum(2 * table.pp - table.num_microbatches, 0)
    faults = table.pp % 2 + table.num_microbatches % 2 + short
    return np.where(table.schedule == Schedule.DUALPIPE, -faults, 0)


def _dualpipe_describe(context: RuleContext, plan: Plan) -> Broken:
    text = (
        f"dualpipe feeds the pipeline from both ends: pp={plan.pp} and the {plan.num_microbatches} micro-batches must"
        f" be even, and micro-batches at least 2*pp = {2 * plan.pp}"
    )
    return Broken(text=text, demand=2 * plan.pp, bound=plan.num_microbatches, unit="micro-batches")


def _zb_h1_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.schedule != Schedule.ZB_H1) | (table.pp > 1), table)


def _zb_h1_describe(context: RuleContext, plan: Plan) -> Broken:
    text = "zb_h1 fills pipeline bubbles with weight gradients, but pp=1 has no bubbles"
    return Broken(text=text, demand=2, bound=plan.pp, unit="pipeline stages")


BATCH_RULES: tuple[Rule, ...] = (
    Rule(
        id="batch",
        sentence="mbs*dp divides the global batch (dp without cp)",
        source="Megatron-LM megatron/core/num_microbatches_calculator.py",
        reads=("mbs", "dp"),
        margin=_batch_margin,
        describe=_batch_describe,
        levers=("mbs",),
        job_levers=lambda context, plan: nearest_multiples(
            "global_batch", context.job.global_batch, plan.mbs * plan.dp
        ),
    ),
    Rule(
        id="token_dispatch",
        sentence="each rank dispatches a whole number of tokens: seq_len*mbs/(cp*tp), at least one",
        source=f"{REQUIREMENT}; Megatron-LM megatron/core/transformer/moe/token_dispatcher.py",
        reads=("mbs", "cp", "tp"),
        margin=_tokens_margin,
        describe=_tokens_describe,
        levers=("mbs", "tp", "cp"),
    ),
)

PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        id="vpp_needs_pipeline",
        sentence="vpp > 1 needs pp > 1",
        source=_ARGUMENTS,
        reads=("pp", "vpp"),
        margin=_vpp_pipeline_margin,
        describe=_vpp_pipeline_describe,
        levers=("vpp", "pp"),
    ),
    Rule(
        id="vpp_schedule",
        sentence="the schedule is interleaved exactly where vpp > 1",
        source=_SCHEDULES,
        reads=("vpp", "schedule"),
        margin=_vpp_schedule_margin,
        describe=_vpp_schedule_describe,
        levers=("schedule", "vpp"),
    ),
    Rule(
        id="layer_per_stage",
        sentence="every virtual stage holds a decoder layer: pp*vpp is at most the layers, unless a layout is given",
        source=_ARGUMENTS,
        reads=("pp", "vpp"),
        margin=_stage_count_margin,
        describe=_stage_count_describe,
        levers=("pp", "vpp"),
        job_levers=lambda context, plan: () if context.explicit_layout else _layout_lever(context, plan),
    ),
    Rule(
        id="stage_layers",
        sentence="the layout places every layer once; an uneven one has been asked for",
        source=f"{_ARGUMENTS}, megatron/core/transformer/transformer_config.py; NVIDIA/Megatron-LM issues 1304 and 468",
        reads=("pp", "vpp"),
        margin=_layout_margin,
        describe=_layout_describe,
        levers=("pp", "vpp"),
        job_levers=_layout_lever,
    ),
    Rule(
        id="vpp_microbatches",
        sentence="the interleaved schedule has at least pp micro-batches (a group N with pp <= N <= micro-batches)",
        source=f"{_SCHEDULES}; NVIDIA/Megatron-LM issue 5022",
        reads=("pp", "dp", "mbs", "schedule"),
        margin=_vpp_microbatches_margin,
        describe=_vpp_microbatches_describe,
        levers=("vpp", "mbs", "pp"),
        job_levers=lambda context, plan: (
            Lever(
                change=f"global_batch={plan.pp * plan.dp * plan.mbs}",
                effect=f"{plan.pp} micro-batches",
            ),
        ),
    ),
    Rule(
        id="dualpipe",
        sentence="dualpipe has an even pp, and an even number of micro-batches, at least 2*pp",
        source="deepseek-ai/DualPipe dualpipe/dualpipe.py",
        reads=("pp", "dp", "mbs", "schedule"),
        margin=_dualpipe_margin,
        describe=_dualpipe_describe,
        levers=("schedule", "mbs", "pp"),
    ),
    Rule(
        id="zb_h1",
        sentence="zb_h1 needs pp > 1",
        source="sail-sg/zero-bubble-pipeline-parallelism README",
        reads=("pp", "schedule"),
        margin=_zb_h1_margin,
        describe=_zb_h1_describe,
        levers=("schedule", "pp"),
    ),
)
