"""One plan in full: effective values, where its time goes, what its devices hold and send."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich.text import Text

from ap_search.plan.layout import layout_text
from ap_search.plan.plan import Plan
from ap_search.plan.text import dispatcher_text, recompute_text, schedule_text, sharding_text
from ap_search.report.imbalance import imbalance_lines
from ap_search.report.layout import (
    decimals_for,
    gib,
    number,
    paragraph,
    percent,
    side_by_side,
    table,
    texts,
)
from ap_search.result import PricedPlan, StageMemory, StateBytes, TimeBreakdown, Traffic
from ap_search.units import bytes_to_gib

TIME_LABELS = {
    "attention_s": "attention",
    "dense_ffn_s": "dense FFN",
    "router_s": "router",
    "dispatch_s": "dispatch",
    "expert_s": "experts",
    "combine_s": "combine",
    "shared_expert_s": "shared experts",
    "head_s": "head and loss",
    "recompute_s": "recompute",
    "tp_comm_s": "TP comm.",
    "cp_comm_s": "CP comm.",
    "pp_comm_s": "PP comm.",
    "bubble_s": "bubble",
    "dp_comm_s": "DP comm.",
    "optimizer_s": "optimizer",
    "other_s": "other",
    "imbalance_s": "imbalance",
}
RISKY_SPARE_RATIO = 0.05
AXES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp")


def time_parts(time: TimeBreakdown) -> list[tuple[str, float]]:
    """List the parts that take time with their seconds, the longest first."""
    parts = [(TIME_LABELS[name], seconds) for name, seconds in asdict(time).items() if seconds > 0]
    return sorted(parts, key=lambda part: -part[1])


def breakdown(priced: PricedPlan, width: int) -> list[Text]:
    """Write effective values, time, memory, stages and traffic of one plan."""
    lines = effective_values(priced.plan, width)
    if not priced.memory.stages:
        return texts(lines)
    lines += ["", *side_by_side(_time_table(priced), _memory_table(priced), width)]
    lines += _risk_lines(priced, width)
    if priced.plan.pp > 1:
        lines += ["", *_stage_table(priced)]
    lines += ["", *_hidden_lines(priced, width), *_traffic_lines(priced.traffic, width)]
    if priced.imbalance is not None:
        lines += imbalance_lines(priced.imbalance, step_s=priced.step_time_s, width=width)
    return texts(lines)


def _risk_lines(priced: PricedPlan, width: int) -> list[str]:
    """Warn of a plan that fits with little to spare; nothing for others."""
    spare = 1.0 - priced.peak_memory_bytes / priced.memory.limit_bytes
    if not 0.0 <= spare < RISKY_SPARE_RATIO:
        return []
    text = (
        f"{100 * spare:.1f} % of the limit is spare: runs that published so little ran out of memory now and then; "
        "--reserve-gib keeps more free"
    )
    return ["", *paragraph(text, width=width, label="at risk")]


def effective_values(plan: Plan, width: int) -> list[str]:
    """Write every axis and knob with the value it took, defaults filled in."""
    batch = f"{plan.mbs} sequence{'s' if plan.mbs > 1 else ''}, {plan.num_microbatches:,} per replica and step"
    knobs = (
        f"sharding {sharding_text(plan.sharding)}, recompute {recompute_text(plan.recompute)}, "
        f"dispatcher {dispatcher_text(plan.dispatcher)}, schedule {schedule_text(plan.schedule)}, "
        f"sequence parallel {'on' if plan.sequence_parallel else 'off'}"
    )
    values = [
        ("axes", ", ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)),
        ("batch", f"micro-batches of {batch}"),
        ("knobs", knobs),
    ]
    if plan.pp > 1:
        stages = "virtual stages" if plan.vpp > 1 else "stages"
        values.append(("layers", f"{layout_text(plan.layout)} on the {stages}, in order"))
    return [line for label, text in values for line in paragraph(text, width=width, label=label)]


def _time_table(priced: PricedPlan) -> list[str]:
    """Align the parts of the step with their seconds and shares."""
    step = priced.step_time_s
    decimals = decimals_for(step, 5)
    rows = [
        (label, number(seconds, decimals), percent(seconds / step))
        for label, seconds in [*time_parts(priced.time), ("step", step)]
    ]
    return table(headers=[(f"time of the step{_critical_stage(priced)}", "s", "%")], rows=rows, left=(0,))


def _critical_stage(priced: PricedPlan) -> str:
    """Name the stage that paces several."""
    return f", critical stage {priced.critical_stage}" if len(priced.stage_times_s) > 1 else ""


def _memory_table(priced: PricedPlan) -> list[str]:
    """Align what a device of the fullest stage holds with its share of the limit."""
    stage, limit_bytes = priced.memory.peak_stage, priced.memory.limit_bytes
    decimals = decimals_for(bytes_to_gib(limit_bytes), 4)
    parts = [*memory_parts(stage), ("peak", stage.total_bytes), ("limit", limit_bytes)]
    rows = [(label, gib(size, decimals), percent(size / limit_bytes)) for label, size in parts]
    place = f"stage {stage.stage}, " if priced.plan.pp > 1 else ""
    return table(headers=[(f"memory: {place}{stage.moment}", "GiB", "% of limit")], rows=rows, left=(0,))


def memory_parts(stage: StageMemory) -> list[tuple[str, int]]:
    """List the parts of a stage's memory that are not empty with their bytes."""
    parts = [
        *_state_parts("shared", stage.shared),
        *_state_parts("expert", stage.expert),
        ("router", stage.router_bytes),
        ("activations", stage.activations_bytes),
        ("dispatch buffers", stage.dispatch_bytes),
        ("logits and loss", stage.logits_bytes),
        ("other buffers", stage.buffers_bytes),
        ("reserve", stage.reserve_bytes),
    ]
    return [(label, size_bytes) for label, size_bytes in parts if size_bytes]


def _state_parts(owner: str, state: StateBytes) -> list[tuple[str, int]]:
    """List the three states of one class of parameters."""
    return [
        (f"{owner} weights", state.weights_bytes),
        (f"{owner} gradients", state.gradients_bytes),
        (f"{owner} optimizer", state.optimizer_bytes),
    ]


def _stage_table(priced: PricedPlan) -> list[str]:
    """Align the pipeline stages, equal neighbours in one row."""
    rows: list[tuple[str, ...]] = []
    cells = [_stage_cells(priced, index) for index in range(len(priced.memory.stages))]
    for values, run in groupby(enumerate(cells), key=lambda item: item[1]):
        stages = [index for index, _ in run]
        name = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        rows.append((name, *values))
    headers: list[tuple[str, ...]] = [
        ("", "", "busy", "peak", "states", "activations", "buffers", "reserve", ""),
        ("stage", "layers", "s", "GiB", "GiB", "GiB", "GiB", "GiB", "worst moment"),
    ]
    if not priced.stage_times_s:
        headers, rows = [_without_busy(line) for line in headers], [_without_busy(row) for row in rows]
    return table(headers=headers, rows=rows, left=(len(headers[0]) - 1,))


def _without_busy(cells: Sequence[str]) -> tuple[str, ...]:
    """Leave the busy seconds out."""
    return (*cells[:2], *cells[3:])


def _stage_cells(priced: PricedPlan, index: int) -> tuple[str, ...]:
    """Write one stage's layers, busy seconds, and memory: model states, activations, buffers, reserve."""
    stage = priced.memory.stages[index]
    busy_s = priced.stage_times_s[index] if priced.stage_times_s else math.nan
    sizes = (
        stage.total_bytes,
        stage.shared.total_bytes + stage.expert.total_bytes + stage.router_bytes,
        stage.activations_bytes + stage.logits_bytes,
        stage.dispatch_bytes + stage.buffers_bytes,
        stage.reserve_bytes,
    )
    layers = str(priced.plan.layout.stage_layers[index])
    return (layers, number(busy_s, decimals_for(priced.step_time_s, 4)), *(gib(size) for size in sizes), stage.moment)


def _hidden_lines(priced: PricedPlan, width: int) -> list[str]:
    """Write which communication runs beside compute, and so in no part of the step, and what is not in effect."""
    seconds = [(name.split("_")[0].upper(), value) for name, value in asdict(priced.hidden).items()]
    decimals = decimals_for(priced.step_time_s, 4)
    shown = [f"{name} {number(value, decimals)}" for name, value in seconds if value >= 0.5 * 10**-decimals]
    text = f"communication beside compute, seconds per step: {', '.join(shown)}"
    lines = paragraph(text, width=width, label="hidden") if shown else []
    return lines + [line for note in priced.notes for line in paragraph(note, width=width, label="note")]


def _traffic_lines(traffic: Traffic, width: int) -> list[str]:
    """Write what the busiest device sends in one step."""
    sent = [
        (name.removesuffix("_bytes").replace("_", " "), size_bytes)
        for name, size_bytes in asdict(traffic).items()
        if size_bytes
    ]
    text = ", ".join(f"{name} {number(bytes_to_gib(size_bytes), digits=3)}" for name, size_bytes in sent)
    return paragraph(f"GiB per step by the busiest device: {text or 'nothing'}", width=width, label="sends")
