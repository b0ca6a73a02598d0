"""Tables of validation as Markdown, for a page that is generated and dated."""

from collections import Counter
from collections.abc import Sequence

from ap_search.fidelity.records import (
    BestPlan,
    ErrorStats,
    RankedGroup,
    RowResult,
    Slice,
    Space,
    Standing,
    Status,
    Summary,
    ValidationResult,
)

WORST = 15


def markdown_tables(result: ValidationResult, *, date: str, command: str) -> str:
    """Write all tables of a validation.

    Parameters
    ----------
    result : ValidationResult
    date, command : str
        When and how it was made.

    Returns
    -------
    str
        Markdown that ends with a newline.
    """
    parts = [
        f"Made on {date} by `{command}`; errors are predicted over measured, minus 1, in percent.",
        _overall(result.summary),
        _slices("source", result.sources),
        _slices("hardware", result.hardware),
        _slices("kind of model", result.kinds),
        _slices("software profile", result.software),
        _memory_kinds(result.summary),
        _groups(result.groups),
        _best_plans(result.best_plans),
        _feasibility(result.summary),
        _worst(result.rows),
        _unpriced(result.rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Write a table; the first columns are aligned to the left."""
    rules = ["---" if column < left else "--:" for column in range(len(headers))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rules, *rows))


def _cells(stats: ErrorStats | None) -> tuple[str, str, str, str]:
    """Four cells of one figure's errors."""
    if stats is None:
        return ("", "", "", "")
    median, p90 = f"{100 * stats.median_abs_error_ratio:.1f}", f"{100 * stats.p90_abs_error_ratio:.1f}"
    return (str(stats.rows), f"{100 * stats.bias_ratio:+.1f}", median, p90)


def _overall(summary: Summary) -> str:
    """Write everything together."""
    counts = f"{summary.priced} of {summary.rows} runs priced ({100 * summary.coverage_ratio:.1f} %)"
    lines = [f"{counts}, {summary.refused} refused, {summary.skipped} skipped."]
    rows = [("time of a step", *_cells(summary.step)), ("peak memory", *_cells(summary.memory))]
    return "\n\n".join([*lines, _table(("all", "runs", "bias", "median", "p90"), rows)])


def _slices(title: str, parts: Sequence[Slice]) -> str:
    """Write the errors by one name."""
    headers = (title, "runs", "time", "bias", "median", "p90", "memory", "bias", "median", "p90")
    return _table(headers, [(part.name, str(part.rows), *_cells(part.step), *_cells(part.memory)) for part in parts])


def _memory_kinds(summary: Summary) -> str:
    """Write the errors of every reading by its kind."""
    rows = [(kind, *_cells(stats)) for kind, stats in summary.memory_kinds]
    return _table(("memory by kind", "readings", "bias", "median", "p90"), rows) if rows else ""


def _groups(groups: Sequence[RankedGroup]) -> str:
    """Write the order inside groups."""
    rows = [
        (
            group.group,
            group.hardware,
            str(group.plans),
            f"{group.spearman:.2f}",
            f"{100 * group.top1_regret_ratio:.1f}",
            group.chosen,
        )
        for group in groups
    ]
    headers = ("group", "hardware", "plans", "Spearman", "regret %", "first in prediction")
    return _table(headers, rows, left=2) if rows else ""


def _best_plans(best: Sequence[BestPlan]) -> str:
    """Write where the search puts the best measured plans, ranks of how many feasible ones."""
    rows = []
    for one in best:
        places = {place.space: place for place in one.standings}
        whole = places[Space.ALL]
        lead = f"{100 * whole.lead_ratio:.1f}"
        rows.append((one.group, one.plan, *(_place(places[space]) for space in Space), whole.first, lead, _left(whole)))
    headers = ("group", "best measured plan", "all", "held", "tried", "ranks first", "lead %", "% left if kept")
    return _table(headers, rows, left=2) if rows else ""


def _place(place: Standing) -> str:
    """Write a rank and of how many."""
    return f"{place.rank:,} of {place.feasible:,}"


def _left(place: Standing) -> str:
    """Write which knobs make the lead: what is left of it where they keep the measured plan's value."""
    return ", ".join(f"{knob} {100 * lead:.1f}" for knob, lead in place.left)


def _feasibility(summary: Summary) -> str:
    """Write what memory says against what became of runs."""
    fate = summary.feasibility
    safe, full = ", ".join(fate.called_safe) or "none", ", ".join(fate.called_full) or "none"
    return (
        f"Of {fate.oom_rows} runs that ended for want of memory, called safe by more than 5 % of memory: {safe}.\n\n"
        f"Of {fate.ran_rows} runs that trained, predicted over the limit: {full}."
    )


def _worst(rows: Sequence[RowResult]) -> str:
    """Write the runs whose time is furthest off."""
    known = [(abs(error), row) for row in rows if (error := row.step_error_ratio) is not None]
    known.sort(key=lambda pair: -pair[0])
    cells = [
        (
            row.label.id,
            row.label.hardware,
            f"{row.measured_step_time_s or 0.0:.4g}",
            f"{row.predicted_step_time_s or 0.0:.4g}",
            f"{100 * (row.step_error_ratio or 0.0):+.0f}",
            row.plan_name,
        )
        for _, row in known[:WORST]
    ]
    headers = ("furthest off", "hardware", "measured s", "predicted s", "error %", "plan")
    return _table(headers, cells, left=2) if cells else ""


def _unpriced(rows: Sequence[RowResult]) -> str:
    """Write why runs have no price."""
    reasons = Counter((row.status.value, row.reason) for row in rows if row.status is not Status.PRICED)
    cells = [(reason, status, str(count)) for (status, reason), count in reasons.most_common()]
    return _table(("without a price", "", "runs"), cells, left=2) if cells else ""
