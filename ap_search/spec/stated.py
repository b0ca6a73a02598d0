"""Totals that a file states of itself, as written by people: `671B`, `1T`, 46702792704."""

import re
from dataclasses import dataclass, replace

from ap_search.spec.blocks import Model
from ap_search.spec.parameters import params_total

TOLERANCE_RATIO = 0.01
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SMALLEST_COUNT = 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of parameters and half a unit of its last written digit."""

    text: str
    count: float
    half_digit: float

    def agrees(self, count: int) -> bool:
        """Whether a count lies within 1 %, or within what the figure's last digit leaves open."""
        return abs(count - self.count) <= max(TOLERANCE_RATIO * self.count, self.half_digit)


def parse_figure(written: object, default_unit: str = "") -> Figure | None:
    """Read a figure such as `671B`, `1T`, `46.7` (with `default_unit` B) or a plain number; None where it is none."""
    if isinstance(written, bool) or not isinstance(written, int | float | str):
        return None
    found = re.fullmatch(r"\s*([0-9][0-9,_]*)(\.[0-9]+)?\s*([KMBGT]?)\s*", str(written), re.IGNORECASE)
    if not found:
        return None
    digits, decimals, unit = found.group(1).replace(",", "").replace("_", ""), found.group(2) or "", found.group(3)
    scale = _UNITS[(unit or default_unit).upper()]
    count = float(digits + decimals) * scale
    half_digit = scale / 2 / 10 ** max(0, len(decimals) - 1) if scale > 1 else 0.0
    return Figure(text=str(written), count=count, half_digit=half_digit)


def check_stated(model: Model, key: str, written: object) -> Model:
    """Add a warning that names both figures where the total that a file states contradicts the count.

    Parameters
    ----------
    model : Model
        As read.
    key : str
        The key that states the total; one that ends in `b` or `billion(s)` counts billions.
    written : object
        Its value.

    Returns
    -------
    Model
        The model, with one warning more where the count is off by over 1 % and over the figure's own rounding.

    Notes
    -----
    A1. A bare number below 100,000 counts billions: no model is that small, and people write 671 for 671B.
    """
    in_billions = re.search(r"(_b|billions?)$", key) is not None
    figure = parse_figure(written, "B" if in_billions else "")
    if figure and figure.count < _SMALLEST_COUNT:
        figure = parse_figure(written, "B")
    count = params_total(model)
    if figure is None or not figure.count or figure.agrees(count):
        return model
    gap = 100 * (count / figure.count - 1)
    line = f"{key} states {figure.text} parameters, but this configuration counts {count:,} ({gap:+.1f} %)"
    return replace(model, warnings=(*model.warnings, line))
