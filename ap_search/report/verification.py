"""Verification for people: what was executed, every check with its figures, why some need not agree."""

from rich.text import Text

from ap_search.report.layout import count, number, paragraph, render, table, texts
from ap_search.result.verification import Check, Verification

MAX_WIDTH = 120
WHERE_WIDTH = 34


def render_verification(result: Verification, *, width: int, styled: bool) -> str:
    """Write the answer of `verify`.

    Parameters
    ----------
    result : Verification
    width : int
        Columns, 120 at most are used.
    styled : bool
        Whether to write terminal colours.
    """
    width = min(width, MAX_WIDTH)
    lines = texts(_asked_lines(result, width))
    lines += [Text(""), *_table_lines(result), Text("")]
    lines += _exception_lines(result, width)
    failed = [check.name for check in result.checks if not check.ok]
    total = len(result.checks)
    verdict = f"{len(failed)} of {total} checks failed: {', '.join(failed)}" if failed else f"all {total} checks hold"
    lines += texts(paragraph(verdict, width=width, indent=""), "bold red" if failed else "bold green")
    return render(lines, width=width, styled=styled)


def _asked_lines(result: Verification, width: int) -> list[str]:
    """Say what was executed."""
    batch = f"{result.global_batch:,} sequences of {result.seq_len:,} tokens, {result.steps} steps in {result.dtype}"
    losses = " ".join(number(loss, digits=6) for loss in result.losses)
    where = f"{result.world_size} processes, {result.backend}, torch {result.torch_version}"
    pairs = (("model", result.model), ("plan", result.plan), ("step", batch), ("ran on", where), ("loss", losses))
    return [line for label, text in pairs for line in paragraph(text, width=width, label=label, indent="")]


def _table_lines(result: Verification) -> list[Text]:
    """One line per check; those that fail stand out."""
    rows = [_cells(check) for check in result.checks]
    headers = (("check", "", "expected", "actual", "tolerance", "unit", "where"),)
    head, rule, *body = table(headers=headers, rows=rows, left=(0, 1, 5, 6))
    styles = ["" if check.ok else "bold red" for check in result.checks]
    return [Text(head), Text(rule), *(Text(line, style) for line, style in zip(body, styles, strict=True))]


def _cells(check: Check) -> tuple[str, ...]:
    """Write one check."""
    verdict = "FAILED" if not check.ok else ("exception" if check.exception else "ok")
    figures = (check.expected, check.actual, check.tolerance)
    shown = [_figure(value, check.unit) for value in figures]
    where = check.where if len(check.where) <= WHERE_WIDTH else check.where[: WHERE_WIDTH - 3] + "..."
    return (check.name, verdict, *shown, check.unit, where)


def _figure(value: float | None, unit: str) -> str:
    """Write one figure; `-` for what is no number."""
    if value is None:
        return "-"
    return f"{value:.1e}" if unit == "ratio" and value else count(value)


def _exception_lines(result: Verification, width: int) -> list[Text]:
    """Say why figures need not agree."""
    named = [check for check in result.checks if check.exception]
    lines = [Text("exceptions", "bold")] if named else []
    for check in named:
        lines += texts(paragraph(f"{check.name}: {check.exception}", width=width))
    return [*lines, Text("")] if lines else []
