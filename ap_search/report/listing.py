"""Lists of presets for people: models, clusters, software profiles."""

from collections.abc import Sequence

from ap_search.report.layout import gib, number, paragraph, render, table, texts
from ap_search.report.terminal import MAX_WIDTH, size
from ap_search.result import ClusterRow, ModelSummary, SoftwareRow
from ap_search.units import bytes_per_s_to_gbit, bytes_per_s_to_gbyte, flops_per_s_to_tflops


def render_models(models: Sequence[ModelSummary], *, width: int, styled: bool) -> str:
    """Write the model presets: size, layers, experts; arguments as `render_search`."""
    rows = [
        (
            model.name,
            size(model.params_total),
            size(model.params_active),
            size(model.params_mtp) if model.params_mtp else "-",
            str(len(model.dense_layers)),
            str(len(model.moe_layers)),
            str(model.num_experts or "-"),
            str(model.top_k or "-"),
        )
        for model in models
    ]
    headers = (
        ("", "parameters", "active", "MTP", "dense", "MoE", "", ""),
        ("model", "", "", "", "layers", "layers", "experts", "top-k"),
    )
    return _render_table(table(headers=headers, rows=rows, left=(0,)), width, styled)


def render_clusters(clusters: Sequence[ClusterRow], *, width: int, styled: bool) -> str:
    """Write the cluster presets: specification figures per device; arguments as `render_search`."""
    rows = [
        (
            row.name,
            row.device,
            gib(row.memory_bytes),
            number(flops_per_s_to_tflops(row.peak_bf16_flops_per_s), 0),
            str(row.devices_per_domain),
            number(bytes_per_s_to_gbyte(row.scale_up_bytes_per_s), 0),
            number(bytes_per_s_to_gbit(row.network_bytes_per_s), 0),
            str(row.sources),
        )
        for row in clusters
    ]
    headers = (
        ("", "", "memory", "bf16", "devices", "scale-up", "network", "values"),
        ("cluster", "device", "GiB", "TFLOP/s", "/domain", "GB/s", "Gbit/s", "sourced"),
    )
    return _render_table(table(headers=headers, rows=rows, left=(0, 1)), width, styled)


def render_software(profiles: Sequence[SoftwareRow], *, width: int, styled: bool) -> str:
    """Write the software profiles with their descriptions; arguments as `render_search`."""
    lines = []
    for profile in profiles:
        lines += texts([profile.name], "bold")
        lines += texts(paragraph(profile.description, width=min(width, MAX_WIDTH)))
    return render(lines, width=width, styled=styled)


def _render_table(lines: Sequence[str], width: int, styled: bool) -> str:
    """Write a table with two header lines in bold."""
    return render([*texts(lines[:3], "bold"), *texts(lines[3:])], width=width, styled=styled)
