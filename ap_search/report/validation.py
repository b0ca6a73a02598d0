"""Validation for people: every run measured and predicted, then errors by source, hardware and kind, then groups."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from ap_search.fidelity.records import (
    BestPlan,
    ErrorStats,
    RankedGroup,
    RowResult,
    Slice,
    Status,
    Summary,
    ValidationResult,
)
from ap_search.report.layout import gib, name_lines, number, paragraph, render, table, texts

MAX_WIDTH = 120
ID_WIDTH = 52
NAME_WIDTH = 58
SHOWN_NAMES = 12


def render_validation(result: ValidationResult, *, width: int, styled: bool, rows: bool = True) -> str:
    """Write the answer of `validate`.

    Parameters
    ----------
    result : ValidationResult
    width : int
        Columns, 120 at most are used.
    styled : bool
        Whether to write terminal colours.
    rows : bool
        Whether to list every priced run before the tables.
    """
    width = min(width, MAX_WIDTH)
    lines: list[Text] = []
    if rows:
        lines += _section("runs", _row_lines(result.rows))
    lines += _unpriced(result.rows, width)
    for title, parts in (
        ("by source", result.sources),
        ("by hardware", result.hardware),
        ("by kind of model", result.kinds),
        ("by software profile", result.software),
    ):
        lines += _section(title, _slice_lines(parts))
    lines += _section("groups that are rankings", _group_lines(result.groups))
    lines += _section("best measured plans in the search's own ranking", _best_plan_lines(result.best_plans, width))
    lines += _summary_lines(result.summary, width)
    return render(lines, width=width, styled=styled)


def _section(title: str, lines: Sequence[str]) -> list[Text]:
    """Write a table under its title, or nothing where it has no rows."""
    return [Text(title, "bold"), *texts(lines), Text("")] if lines else []


def _row_lines(rows: Iterable[RowResult]) -> list[str]:
    """One line per priced run."""
    cells = [
        (
            _cut(row.label.id, ID_WIDTH),
            _seconds(row.measured_step_time_s),
            _seconds(row.predicted_step_time_s),
            _signed(row.step_error_ratio),
            gib(row.memory[0].measured_bytes) if row.memory else "",
            gib(row.memory[0].predicted_bytes) if row.memory else gib(row.fullest_bytes or 0.0),
            _signed(row.memory_error_ratio),
            _fate(row),
        )
        for row in rows
        if row.status is Status.PRICED
    ]
    headers = (
        ("", "measured", "predicted", "error", "measured", "predicted", "error", ""),
        ("run", "s", "s", "%", "GiB", "GiB", "%", ""),
    )
    return table(headers=headers, rows=cells, left=(0, 7)) if cells else []


def _fate(row: RowResult) -> str:
    """Say how a run ended where it did not train, and what memory says against it."""
    if row.run is not None and row.run.measured.oom:
        return "out of memory"
    if row.run is not None and row.run.measured.failed:
        return "failed"
    return "over the limit" if (row.room_ratio or 0.0) < 0 else ""


def _unpriced(rows: Iterable[RowResult], width: int) -> list[Text]:
    """Say why runs have no price: each reason with their number and one name."""
    without = [row for row in rows if row.status is not Status.PRICED]
    reasons = Counter((row.status.value, row.reason) for row in without)
    first = {(row.status.value, row.reason): row.label.id for row in reversed(without)}
    lines = [Text("without a price", "bold")] if reasons else []
    for (status, reason), count in reasons.most_common():
        text = f"{count} {status}, such as {first[status, reason]}: {reason}"
        lines += texts(paragraph(text, width=width))
    return [*lines, Text("")] if lines else []


def _slice_lines(parts: Sequence[Slice]) -> list[str]:
    """One line per part of the runs."""
    cells = [(_cut(part.name, NAME_WIDTH), str(part.rows), *_cells(part.step), *_cells(part.memory)) for part in parts]
    headers = (
        ("", "", "time", "bias", "median", "p90", "memory", "bias", "median", "p90"),
        ("", "runs", "runs", "%", "%", "%", "runs", "%", "%", "%"),
    )
    return table(headers=headers, rows=cells, left=(0,)) if cells else []


def _cells(stats: ErrorStats | None) -> tuple[str, str, str, str]:
    """Four cells of one figure's errors."""
    if stats is None:
        return ("", "", "", "")
    return (
        str(stats.rows),
        _signed(stats.bias_ratio),
        number(100 * stats.median_abs_error_ratio, 1),
        number(100 * stats.p90_abs_error_ratio, 1),
    )


def _group_lines(groups: Sequence[RankedGroup]) -> list[str]:
    """One line per group."""
    cells = [
        (
            _cut(group.group, NAME_WIDTH),
            group.hardware,
            str(group.rows),
            str(group.plans),
            number(group.spearman, 2),
            number(100 * group.top1_regret_ratio, 1),
        )
        for group in groups
    ]
    headers = (("", "", "", "", "", "regret"), ("group", "hardware", "runs", "plans", "Spearman", "%"))
    return table(headers=headers, rows=cells, left=(0, 1)) if cells else []


def _best_plan_lines(best: Sequence[BestPlan], width: int) -> list[str]:
    """Each group's best measured plan, its place among three sets of plans, and what stands before it."""
    lines = []
    for one in best:
        fits = "" if one.fits else ", predicted over the limit"
        lines += [f"{one.group}: {one.run}{fits}", *name_lines(one.plan, width=width, indent="  measured  ")]
        for place in one.standings:
            lead = f"lead {number(100 * place.lead_ratio, 1)} %"
            lines.append(f"  {place.space.value:<8}  rank {place.rank:,} of {place.feasible:,}, {lead}")
            if place.lead_ratio:
                left = ", ".join(f"{knob} {number(100 * lead, 1)} %" for knob, lead in place.left)
                lines += name_lines(place.first, width=width, indent=" " * 12)
                lines += paragraph(f"left where kept: {left or 'all of it'}", width=width, indent=" " * 12)
    return lines


def _summary_lines(summary: Summary, width: int) -> list[Text]:
    """Everything together, last so that it stands where a reader of a terminal looks."""
    counts = f"{summary.priced} of {summary.rows} priced ({number(100 * summary.coverage_ratio, 1)} %)"
    values = [("runs", f"{counts}, {summary.refused} refused, {summary.skipped} skipped")]
    values += [("time", _sentence(summary.step))]
    values += [("memory", _sentence(summary.memory))]
    values += [(f"  {kind}", _sentence(stats)) for kind, stats in summary.memory_kinds]
    if summary.group_spearman_median is not None:
        regret = f"{number(100 * (summary.group_regret_median_ratio or 0.0), 1)} %, 90th percentile "
        regret += f"{number(100 * (summary.group_regret_p90_ratio or 0.0), 1)} %"
        values.append(("order", f"Spearman {number(summary.group_spearman_median, 2)}, regret {regret} (medians)"))
    fate = summary.feasibility
    values.append(("oom", f"{fate.oom_rows} runs, {_names(fate.called_safe)} called safe by more than 5 % of memory"))
    values.append(("fits", f"{fate.ran_rows} runs trained, {_names(fate.called_full)} predicted over the limit"))
    assumed = ", ".join(f"{field} {rows}" for field, rows in summary.assumed)
    values.append(("assumed", f"rows per field: {assumed}" if assumed else "nothing"))
    lines = [Text("summary", "bold")]
    for label, text in values:
        lines += texts(paragraph(text, width=width, label=label, indent=""))
    return lines


def _sentence(stats: ErrorStats | None) -> str:
    """Errors in words."""
    if stats is None:
        return "nothing to compare"
    median, p90 = number(100 * stats.median_abs_error_ratio, 1), number(100 * stats.p90_abs_error_ratio, 1)
    return f"{stats.rows} runs, median error {median} %, 90th percentile {p90} %, bias {_signed(stats.bias_ratio)} %"


def _names(names: Sequence[str]) -> str:
    """Count names, and list the first."""
    more = ", ..." if len(names) > SHOWN_NAMES else ""
    return f"{len(names)} ({', '.join(names[:SHOWN_NAMES])}{more})" if names else "0"


def _seconds(value: float | None) -> str:
    """Write seconds, nothing where they are unknown."""
    return "" if value is None else number(value)


def _signed(ratio: float | None) -> str:
    """Write a ratio as a percentage with its sign."""
    return "" if ratio is None else f"{100 * ratio:+.1f}"


def _cut(text: str, width: int) -> str:
    """Cut a name to a width, its end kept."""
    return text if len(text) <= width else f"{text[: width // 2 - 2]}...{text[-(width - width // 2 - 1) :]}"
