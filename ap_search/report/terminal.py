"""The answer for people: header, ranking, the best plan in full, what was rejected; at most 120 columns."""

import math
from collections.abc import Sequence

from rich.text import Text

from ap_search.report.breakdown import breakdown, time_parts
from ap_search.report.explain_text import infeasibility_lines, rejection_lines, violation_lines
from ap_search.report.explanation import explanation_lines
from ap_search.report.imbalance import placement_text
from ap_search.report.layout import (
    GAP,
    decimals_for,
    gib,
    name_lines,
    number,
    paragraph,
    percent,
    render,
    table,
    texts,
)
from ap_search.result import JobSummary, ModelSummary, PricedPlan, SearchResult
from ap_search.units import flops_per_s_to_tflops

MAX_WIDTH = 120
SIZE_UNITS = {"B": 1e9, "M": 1e6, "K": 1e3}

HEADERS = (
    ("", "step", "tokens/s", "TFLOP/s", "MFU", "peak memory", "largest share", ""),
    ("#", "s", "/device", "/device", "%", "GiB", "of the step", "plan"),
)


def render_search(result: SearchResult, *, width: int, styled: bool) -> str:
    """Write the answer of a search: the ranking and its best plan, or why nothing fits.

    Parameters
    ----------
    result : SearchResult
    width : int
        Columns, 120 at most are used.
    styled : bool
        Whether to write terminal colours.
    """
    width = min(width, MAX_WIDTH)
    lines = [*_header(result, width), Text("")]
    if result.plans:
        lines += [*_ranking(result.plans, width), Text(""), *_expected(result, width), *_best(result.plans[0], width)]
        lines += [*_explained(result, width), Text("")]
    elif result.infeasibility is not None:
        lines += [*infeasibility_lines(result.infeasibility, width), Text("")]
    lines += _search_lines(result, width)
    return render(lines, width=width, styled=styled)


def render_estimate(result: SearchResult, *, width: int, styled: bool) -> str:
    """Write the price of one plan, broken rules first where it cannot run; arguments as `render_search`."""
    width = min(width, MAX_WIDTH)
    priced = result.plans[0]
    lines = [*_header(result, width), Text(""), *texts(name_lines(priced.name, width=width), "bold")]
    if not priced.feasible:
        lines += [Text("not feasible", "bold red"), *violation_lines(priced.violations, width), Text("")]
    if math.isfinite(priced.step_time_s):
        lines += texts(paragraph(_key_figures(priced) + _own_devices(result), width=width, indent=""))
        lines += _expected(result, width)
    lines += [*breakdown(priced, width), *_explained(result, width)]
    return render(lines, width=width, styled=styled)


def _header(result: SearchResult, width: int) -> list[Text]:
    """Write what was asked: model, cluster, step, limits; defaults marked as assumed."""
    cluster, job = result.cluster, result.job
    each = f"{gib(cluster.device_memory_bytes)} GiB each"
    values = [
        ("model", _model_text(result.model)),
        ("cluster", f"{cluster.devices:,} x {cluster.name}, {each}"),
        ("step", _step_text(job)),
        ("limit", _limit_text(job)),
    ]
    if cluster.assumed:
        values.append(("assumed", f"for the cluster: {', '.join(cluster.assumed)}"))
    uncalibrated = [name for name, origin in cluster.provenance if origin == "default"]
    if uncalibrated:
        values.append(("default", f"constants not fitted on this cluster's measurements: {', '.join(uncalibrated)}"))
    lines = texts(line for label, text in values for line in paragraph(text, width=width, label=label, indent=""))
    for warning in result.model.warnings:
        lines += texts(paragraph(warning, width=width, label="warning", indent=""), "yellow")
    return lines


def _model_text(model: ModelSummary) -> str:
    """Write a model's size: parameters in all and active, layers by kind, experts."""
    sizes = f"{size(model.params_total)} parameters, {size(model.params_active)} active"
    mtp = f" (+ {size(model.params_mtp)} in MTP modules)" if model.params_mtp else ""
    kinds = f"{model.num_layers} layers: {len(model.dense_layers)} dense, {len(model.moe_layers)} MoE"
    experts = f" with {model.num_experts} experts, top-{model.top_k}" if model.num_experts else ""
    return f"{model.name}: {sizes}{mtp}; {kinds}{experts}"


def size(params: int) -> str:
    """Write a parameter count with three digits or more, in K, M or B: the largest unit of which there is one."""
    rounded = float(f"{params:.2e}")
    unit = next((unit for unit, worth in SIZE_UNITS.items() if rounded >= worth), "")
    worth = SIZE_UNITS.get(unit, 1)
    decimals = decimals_for(rounded / worth, 3) if unit else 0
    return f"{number(params / worth, max(1, decimals) if unit == 'B' else decimals)} {unit}".rstrip()


def _step_text(job: JobSummary) -> str:
    """Write what one step trains, and on which settings."""
    return (
        f"{job.global_batch:,} sequences{_assumed(job, 'global_batch')} of {job.seq_len:,} tokens"
        f"{_assumed(job, 'seq_len')}, {job.precision}{_assumed(job, 'precision')}, "
        f"load {job.load}{_placement(job)}{_capacity(job)}, software {job.software}, target {job.target}"
    )


def _placement(job: JobSummary) -> str:
    """Write where experts are placed, unless in order."""
    if job.placement == "contiguous":
        return ""
    return f", experts placed {placement_text(job.placement, job.redundant_experts)}"


def _capacity(job: JobSummary) -> str:
    """Write an expert's capacity, unless nothing is dropped."""
    if not job.capacity_factor:
        return ""
    return f", capacity factor {job.capacity_factor:g}{', padded to it' if job.pad_to_capacity else ''}"


def _limit_text(job: JobSummary) -> str:
    """Write what a device may hold and what stays free of it."""
    limit = f"{gib(job.memory_limit_bytes)} GiB per device{_assumed(job, 'memory_limit_bytes', 'memory_limit_gib')}"
    reserve = f"{gib(job.reserve_bytes)} GiB of it reserved{_assumed(job, 'reserve_bytes', 'reserve_gib')}"
    return f"{limit}, {reserve}"


def _assumed(job: JobSummary, *names: str) -> str:
    """Mark a value that nobody gave."""
    return " (assumed)" if any(name in job.assumed for name in names) else ""


def _key_figures(priced: PricedPlan) -> str:
    """Write a plan's step, throughput and peak memory in one sentence."""
    step, tokens, flops, mfu, memory = _figures([priced])[0]
    return f"step {step} s, {tokens} tokens/s/device, {flops} TFLOP/s/device, MFU {mfu} %, peak memory {memory} GiB"


def _own_devices(result: SearchResult) -> str:
    """Say that figures per device are of the plan's own devices, where those are not the job's."""
    plan = result.plans[0].plan
    own = plan.dp * plan.cp * plan.tp * plan.pp
    job = result.cluster.devices
    return "" if own == job else f"; per device of the {own:,} that this plan occupies, not of the job's {job:,}"


def _figures(plans: Sequence[PricedPlan]) -> list[tuple[str, str, str, str, str]]:
    """Write step, tokens/s, TFLOP/s, MFU and peak of limit of plans, each column with the same decimals."""
    tflops = [flops_per_s_to_tflops(plan.model_flops_per_s_per_device) for plan in plans]
    steps = decimals_for(min(plan.step_time_s for plan in plans), 4)
    tokens = decimals_for(min(plan.tokens_per_s_per_device for plan in plans), 4)
    flops = decimals_for(min(tflops), 4)
    return [
        (
            number(plan.step_time_s, steps),
            number(plan.tokens_per_s_per_device, tokens),
            number(plan_tflops, flops),
            percent(plan.mfu_ratio),
            f"{gib(plan.peak_memory_bytes)} of {gib(plan.memory.limit_bytes)}",
        )
        for plan, plan_tflops in zip(plans, tflops, strict=True)
    ]


def _dominant(plan: PricedPlan) -> str:
    """Name the longest part of the step with its share."""
    label, seconds = time_parts(plan.time)[0]
    return f"{label} {number(100 * seconds / plan.step_time_s, 0)} %"


def _ranking(plans: Sequence[PricedPlan], width: int) -> list[Text]:
    """Align the plans; where a name does not fit into its column, names stand whole on lines of their own."""
    figures = [(str(plan.rank), *row, _dominant(plan)) for plan, row in zip(plans, _figures(plans), strict=True)]
    rows = [(*row, plan.name) for row, plan in zip(figures, plans, strict=True)]
    lines = table(headers=HEADERS, rows=rows, left=(6, 7))
    if max(map(len, lines)) > width:
        lines = _with_names_below(table(headers=[line[:-1] for line in HEADERS], rows=figures, left=(6,)), plans, width)
    head = len(HEADERS) + 1
    return [*texts(lines[:head], "bold"), *texts(lines[head:])]


def _with_names_below(lines: Sequence[str], plans: Sequence[PricedPlan], width: int) -> list[str]:
    """Set each plan's name on the line below its figures."""
    head = len(HEADERS) + 1
    indent = " " * (len(lines[head - 1].split()[0]) + len(GAP))
    named = [
        (figures, *name_lines(plan.name, width=width, indent=indent))
        for figures, plan in zip(lines[head:], plans, strict=True)
    ]
    return [*lines[:head], *(line for block in named for line in block)]


def _expected(result: SearchResult, width: int) -> list[Text]:
    """Write how far recorded runs on this machine were from their predictions, and where figures come from."""
    expected, first = result.fidelity, result.plans[0]
    if expected is None:
        return []
    band, which = result.step_time_band_s(first), "the first plan's" if result.search.priced > 1 else "this"
    figures = "" if band is None else f"{which} step from {' to '.join(number(end) for end in band)} s; "
    origins: dict[str, list[str]] = {}
    for name, origin in expected.provenance:
        origins.setdefault(origin, []).append(name.replace("_", " "))
    said = "; ".join(f"{', '.join(names)}: {origin}" for origin, names in origins.items())
    values = (("expect", figures + expected.statement), ("origin", said))
    lines = [line for label, text in values for line in paragraph(text, width=width, label=label, indent="")]
    return [*texts(lines), Text("")]


def _best(best: PricedPlan, width: int) -> list[Text]:
    """Write the first plan in full."""
    return [*texts(["Best plan:", *name_lines(best.name, width=width)], "bold"), *breakdown(best, width)]


def _explained(result: SearchResult, width: int) -> list[Text]:
    """Write the groups and the MoE layer's path of the first plan, where they were asked for."""
    return [] if result.explanation is None else explanation_lines(result.explanation, width)


def _search_lines(result: SearchResult, width: int) -> list[Text]:
    """Write how far the search went, how sure the best plan is, and what was rejected."""
    search = result.search
    counts = (
        f"{search.candidates:,} candidates, {search.priced:,} priced, {search.feasible:,} feasible, "
        f"in {number(search.elapsed_s, 2)} s"
    )
    lines = paragraph(counts, width=width, label="search", indent="")
    if result.plans:
        lines += paragraph(_optimality_text(result), width=width, label="optimal", indent="")
    if not search.rejections:
        return texts(lines)
    return [*texts([*lines, ""]), *rejection_lines(search.rejections, width)]


def _optimality_text(result: SearchResult) -> str:
    """Write the statement, and the bound where one is known."""
    optimality = result.search.optimality
    if optimality.lower_bound_s is None or optimality.gap_ratio == 0.0:
        return optimality.statement
    gap = "" if optimality.gap_ratio is None else f", the best plan is {percent(optimality.gap_ratio)} % above it"
    return f"{optimality.statement}; no plan is faster than {number(optimality.lower_bound_s)} s{gap}"
