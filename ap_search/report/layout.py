"""Plain text for people: numbers with few digits, aligned columns, blocks side by side, names that stay whole."""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from ap_search.units import bytes_to_gib

GAP = "  "
LABEL_WIDTH = 9


def decimals_for(reference: float, digits: int) -> int:
    """Count the decimals that show `reference` with `digits` significant digits (0 to 7)."""
    if not math.isfinite(reference) or reference == 0:
        return 0
    return min(7, max(0, digits - 1 - math.floor(math.log10(abs(reference)))))


def number(value: float, decimals: int | None = None, *, digits: int = 4) -> str:
    """Write a number with thousands separators: so many decimals, or significant digits; `-` if it is not finite."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.{decimals_for(value, digits) if decimals is None else decimals}f}"


def count(value: float) -> str:
    """Write a number as whole as it is: no decimals for an integer, four significant digits otherwise."""
    return number(value, 0 if math.isfinite(value) and value == int(value) else None)


def gib(size_bytes: float, decimals: int = 1) -> str:
    """Write bytes as GiB, without the unit."""
    return number(bytes_to_gib(size_bytes), decimals)


def percent(ratio: float) -> str:
    """Write a ratio as a percentage with one decimal, without the sign."""
    return number(100 * ratio, 1)


def in_unit(value: float, unit: str) -> str:
    """Write a value with its unit; bytes become GiB."""
    if unit == "bytes":
        return f"{gib(value, max(1, decimals_for(bytes_to_gib(value), 3)))} GiB"
    return f"{count(value)} {unit}".rstrip()


def table(*, headers: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Align rows under their header lines and a rule.

    Parameters
    ----------
    headers : sequence of header lines, each one text per column
    rows : sequence of rows, each one text per column
    left : columns aligned to the left, others to the right

    Returns
    -------
    list of str
        Header lines, the rule, and one line per row, without trailing blanks.
    """
    widths = [max(len(line[column]) for line in (*headers, *rows)) for column in range(len(headers[0]))]
    rule = ["-" * width for width in widths]
    return [aligned(line, widths, left) for line in (*headers, rule, *rows)]


def aligned(cells: Sequence[str], widths: Sequence[int], left: Sequence[int]) -> str:
    """Join cells padded to their widths."""
    padded = (
        cell.ljust(width) if column in left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return GAP.join(padded).rstrip()


def side_by_side(first: Sequence[str], second: Sequence[str], width: int) -> list[str]:
    """Set two blocks beside each other where they fit into `width` columns, otherwise one below the other."""
    start = max(map(len, first), default=0) + 6
    if start + max(map(len, second), default=0) > width:
        return [*first, "", *second]
    return [f"{one:<{start}}{other}".rstrip() for one, other in zip_longest(first, second, fillvalue="")]


def paragraph(text: str, *, width: int, label: str = "", indent: str = "  ") -> list[str]:
    """Wrap a text behind a label, later lines under its first word; words (plan names) are never cut."""
    label_width = max(LABEL_WIDTH, len(label) + len(GAP)) if label else 0
    return textwrap.wrap(
        " ".join(text.split()),
        width=width,
        initial_indent=indent + label.ljust(label_width),
        subsequent_indent=indent + " " * label_width,
        break_long_words=False,
        break_on_hyphens=False,
    )


def name_lines(name: str, *, width: int, indent: str = "") -> list[str]:
    """Write a plan's name in one line; one longer than the page goes on below, cut after a hyphen."""
    lines = [indent]
    for part in re.findall(r"[^-]+-?|-", name):
        if len(lines[-1]) + len(part) > width and lines[-1].strip():
            lines.append(indent)
        lines[-1] += part
    return lines


def texts(lines: Iterable[str], style: str = "") -> list[Text]:
    """Give lines one style."""
    return [Text(line, style) for line in lines]


def render(lines: Iterable[Text], *, width: int, styled: bool) -> str:
    """Write lines as text, with terminal colours if `styled`; nothing is cut or wrapped here."""
    page = io.StringIO()
    console = Console(file=page, width=width, force_terminal=styled, highlight=False, markup=False, emoji=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    return page.getvalue()
