"""Calibration for people: each constant with its fate, errors before and after on runs left out, what was not used."""

from collections.abc import Sequence

from rich.text import Text

from ap_search.calibration.records import CalibrationResult, ConstantResult, Fate, Fidelity
from ap_search.report.layout import number, paragraph, render, table, texts

MAX_WIDTH = 120
SHOWN_NAMES = 12


def render_calibration(result: CalibrationResult, *, width: int, styled: bool) -> str:
    """Write the answer of `calibrate`.

    Parameters
    ----------
    result : CalibrationResult
    width : int
        Columns, 120 at most are used.
    styled : bool
        Whether to write terminal colours.
    """
    width = min(width, MAX_WIDTH)
    lines = _facts(result, width)
    moved = [constant for constant in result.constants if constant.fate is Fate.FITTED]
    lines += _section("constants that were fitted", _moved_lines(moved))
    lines += _left(result.constants, width)
    lines += _section("errors of seconds of a step", _error_lines(result))
    lines += _unused(result, width)
    lines += texts(paragraph(result.statement, width=width, label="result", indent=""), "bold")
    return render(lines, width=width, styled=styled)


def _facts(result: CalibrationResult, width: int) -> list[Text]:
    """What was fitted on what."""
    values = [
        ("runs", f"{result.rows} in {result.groups} groups, of {', '.join(result.files)}"),
        ("start", f"cluster {', '.join(result.clusters)}; software {', '.join(result.profiles)}"),
        (
            "seen",
            f"{result.combinations} combinations of constants (singular values of at least 1: "
            f"{', '.join(number(value, 2) for value in result.singular_values if value >= 1) or 'none'}); "
            f"runs scatter by {number(100 * result.scatter_ratio, 1)} %",
        ),
        ("reserve", result.reserve_statement),
    ]
    lines = texts(line for label, text in values for line in paragraph(text, width=width, label=label, indent=""))
    return [*lines, Text("")]


def _section(title: str, lines: Sequence[str]) -> list[Text]:
    """Write a table under its title, or nothing where it has no rows."""
    return [Text(title, "bold"), *texts(lines), Text("")] if lines else []


def _moved_lines(constants: Sequence[ConstantResult]) -> list[str]:
    """One line per constant that moved."""
    rows = [
        (
            constant.name,
            constant.home.value,
            constant.keys[0] + (", ..." if len(constant.keys) > 1 else ""),
            number(constant.before),
            number(constant.after),
            number(constant.gain_ratio, 3),
            number(100 * constant.known_ratio, 0),
            "at its physical bound" if constant.at_bound else "",
        )
        for constant in constants
    ]
    headers = (
        ("", "", "", "", "", "times", "known", ""),
        ("constant", "file", "key", "before", "after", "as fast", "%", ""),
    )
    return table(headers=headers, rows=rows, left=(0, 1, 2, 7)) if rows else []


def _left(constants: Sequence[ConstantResult], width: int) -> list[Text]:
    """One line per constant that stays as it is."""
    left = [constant for constant in constants if constant.fate is not Fate.FITTED]
    lines = [Text("constants that stay as they are", "bold")] if left else []
    for constant in left:
        reason = constant.reason or "identified, but not adopted"
        lines += texts(paragraph(f"{constant.name}: {reason}", width=width))
    return [*lines, Text("")] if lines else []


def _error_lines(result: CalibrationResult) -> list[str]:
    """Errors before and after, on the runs of the fit and on runs left out."""
    rows = [_error_row("these runs, shipped constants", result.before)]
    if result.adopted:
        rows.append(_error_row("these runs, fitted (they were seen)", result.fitted))
    found = result.cross_validation
    if found is not None:
        rows.append(_error_row(f"each {found.leave_out} left out, only the level fitted", found.level))
        rows.append(_error_row(f"each {found.leave_out} left out, all constants fitted", found.full))
    headers = (("", "", "bias", "median", "p90", ""), ("", "runs", "%", "%", "%", "Spearman"))
    return table(headers=headers, rows=rows, left=(0,))


def _error_row(name: str, found: Fidelity) -> tuple[str, ...]:
    """Cells of one line of errors."""
    step = found.step
    return (
        name,
        str(step.rows),
        f"{100 * step.bias_ratio:+.1f}",
        number(100 * step.median_abs_error_ratio, 1),
        number(100 * step.p90_abs_error_ratio, 1),
        "" if found.spearman is None else number(found.spearman, 2),
    )


def _unused(result: CalibrationResult, width: int) -> list[Text]:
    """Name the runs that were refused, left out, or missed."""
    lines: list[Text] = []
    for run in (run for run in result.unused if run.refused):
        lines += texts(paragraph(f"{run.id}: {run.reason}", width=width, label="refused", indent=""), "yellow")
    others = [run for run in result.unused if not run.refused]
    if others:
        reasons = dict.fromkeys(run.reason for run in others)
        text = f"{len(others)} runs: {'; '.join(list(reasons)[:SHOWN_NAMES])}"
        lines += texts(paragraph(text, width=width, label="not used", indent=""))
    if result.outliers:
        shown = ", ".join(f"{far.id} ({100 * far.error_ratio:+.0f} %)" for far in result.outliers[:SHOWN_NAMES])
        more = ", ..." if len(result.outliers) > SHOWN_NAMES else ""
        lines += texts(paragraph(f"{shown}{more}", width=width, label="outliers", indent=""))
    return [*lines, Text("")] if lines else []
