"""Reasons for people: broken rules, what was rejected, why nothing fits and what would help."""

from collections.abc import Sequence

from rich.text import Text

from ap_search.report.layout import LABEL_WIDTH, gib, in_unit, name_lines, paragraph, table, texts
from ap_search.result import Infeasibility, Lever, PricedPlan, Rejection, Violation

NESTED = "    "


def violation_lines(violations: Sequence[Violation], width: int) -> list[Text]:
    """Write each broken rule: its sentence, what it demands and allows, and what would help."""
    lines: list[Text] = []
    for broken in violations:
        lines += texts(paragraph(f"{broken.rule_id}: {broken.message}", width=width), "red")
        figures = f"needs {in_unit(broken.demand, broken.unit)}, allowed {in_unit(broken.bound, broken.unit)}"
        lines += texts(paragraph(figures, width=width, indent=NESTED))
        lines += lever_lines(broken.levers, width, NESTED)
    return lines


def lever_lines(levers: Sequence[Lever], width: int, indent: str = "  ") -> list[Text]:
    """Write each change with its effect."""
    wrapped = [
        paragraph(f"{lever.change}: {lever.effect}", width=width, label="try", indent=indent) for lever in levers
    ]
    return texts(line for lines in wrapped for line in lines)


def rejection_lines(rejections: Sequence[Rejection], width: int) -> list[Text]:
    """Write the rules that dropped plans, the most frequent first: count, reason, one example."""
    ranked = sorted(rejections, key=lambda rejection: -rejection.count)
    digits = max((len(f"{rejection.count:,}") for rejection in ranked), default=0)
    lines = [Text("Rejected plans, by rule:")]
    for rejection in ranked:
        count = f"{rejection.count:>{digits},}"
        lines += texts(paragraph(f"{rejection.rule_id}: {rejection.message}", width=width, label=count))
        if rejection.example:
            indent = " " * (len("  ") + max(digits + 2, LABEL_WIDTH))
            lines += texts(name_lines(f"e.g. {rejection.example}", width=width, indent=indent), "dim")
    return lines


def infeasibility_lines(reason: Infeasibility, width: int) -> list[Text]:
    """Write why nothing fits: the sentence, the nearest plan, the clash of rules, what would help."""
    lines = texts(paragraph(f"Nothing feasible: {reason.message}", width=width, indent=""), "bold red")
    if reason.nearest is not None:
        lines += [Text(""), *_nearest_lines(reason.nearest, width)]
    if reason.clash:
        lines += texts(["", "These rules cannot hold together:"])
        clash = [paragraph(f"{rule.rule_id}: {rule.sentence}", width=width) for rule in reason.clash]
        lines += texts(line for wrapped in clash for line in wrapped)
    if reason.levers:
        lines += [*texts(["", "What would help:"]), *lever_lines(reason.levers, width)]
    if reason.smallest_devices is not None:
        lines += texts(["", f"Smallest device count on which something fits: {reason.smallest_devices:,}"], "bold")
    return lines


def _nearest_lines(nearest: PricedPlan, width: int) -> list[Text]:
    """Write what the nearest plan needs: stage, moment, largest tensors."""
    lines = [Text("The nearest plan:"), *texts(name_lines(nearest.name, width=width, indent="  "), "bold")]
    if not nearest.memory.stages:
        return lines + violation_lines(nearest.violations, width)
    stage, limit_bytes = nearest.memory.peak_stage, nearest.memory.limit_bytes
    excess_bytes = stage.total_bytes - limit_bytes
    over = f" ({gib(excess_bytes)} GiB too many)" if excess_bytes > 0 else ""
    need = f"stage {stage.stage}, {stage.moment}: {gib(stage.total_bytes)} of {gib(limit_bytes)} GiB{over}"
    lines += texts(paragraph(need, width=width))
    rows = [(name, gib(size_bytes, 2)) for name, size_bytes in stage.largest]
    if rows:
        tensors = table(headers=[("largest tensors", "GiB")], rows=rows, left=(0,))
        lines += texts("  " + line for line in tensors)
    return lines
