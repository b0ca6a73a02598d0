"""Measured against predicted as one self-contained page: two scatter plots, facts of each run on hover."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ap_search.fidelity.records import RowResult, Status, ValidationResult
from ap_search.units import bytes_to_gib

SIZE = 560
MARGIN = 64
BAND_RATIO = 0.2
COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#7f7f7f",
    "#bcbd22",
    "#393b79",
    "#843c39",
    "#637939",
    "#8c6d31",
    "#7b4173",
    "#3182bd",
)

_PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>ap-search: measured against predicted</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }}
svg {{ background: #fafafa; border: 1px solid #ddd; }} text {{ font-size: 11px; fill: #444; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 24px; }}
.axis {{ stroke: #ddd; }} .even {{ stroke: #444; }} .band {{ stroke: #bbb; stroke-dasharray: 4 4; }}
circle, rect.run {{ fill-opacity: .65; stroke: #fff; stroke-width: .5; }}
circle:hover, rect.run:hover {{ stroke: #000; stroke-width: 2; }}
label {{ margin-right: 16px; white-space: nowrap; }} .dot {{ display: inline-block; width: 10px; height: 10px; }}
#tip {{ position: fixed; pointer-events: none; white-space: pre-line; background: #222; color: #fff; padding: 6px 8px;
 border-radius: 4px; font-size: 12px; max-width: 520px; display: none; }}
</style></head><body>
<h1>Measured against predicted</h1>
<p>{summary}</p>
<p>Circles are dense models, squares MoE. On the line both agree, on the broken ones they differ by {band} %.
Rest the mouse on a run for its facts; clear a box to hide a cluster.</p>
<p>{legend}</p>
<div class="plots">{plots}</div><div id="tip"></div>
<script>
const tip = document.getElementById("tip");
document.querySelectorAll("[data-tip]").forEach(mark => {{
  mark.addEventListener("mousemove", event => {{
    tip.textContent = mark.dataset.tip;
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 12, innerWidth - 540) + "px";
    tip.style.top = event.clientY + 12 + "px";
  }});
  mark.addEventListener("mouseleave", () => {{ tip.style.display = "none"; }});
}});
document.querySelectorAll("input[data-hardware]").forEach(box => box.addEventListener("change", () =>
  document.querySelectorAll(`[data-on="${{CSS.escape(box.dataset.hardware)}}"]`).forEach(mark => {{
    mark.style.display = box.checked ? "" : "none";
  }})));
</script></body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """One run in a plot: both figures in the plot's unit."""

    row: RowResult
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """A logarithmic axis over both figures, in whole decades."""

    low: int
    high: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "_Scale":
        """Cover some positive values."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(low=low, high=max(high, low + 1))

    def at(self, value: float) -> float:
        """Pixels from the origin of a value."""
        inner = SIZE - 2 * MARGIN
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return MARGIN + inner * min(1.0, max(0.0, share))


def plot_page(result: ValidationResult) -> str:
    """Draw measured against predicted, time in seconds and memory in GiB.

    Parameters
    ----------
    result : ValidationResult

    Returns
    -------
    str
        One HTML page that needs nothing beside itself.
    """
    rows = [row for row in result.rows if row.status is Status.PRICED and not row.ended_early]
    names = sorted({row.label.hardware for row in rows})
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    plots = [
        _plot("time of a step, seconds", _marks(rows, _times), colours),
        _plot("peak memory, GiB", _marks(rows, _peaks), colours),
    ]
    return _PAGE.format(
        summary=escape(_summary(result)),
        band=round(100 * BAND_RATIO),
        legend="".join(_legend(name, colour) for name, colour in colours.items()),
        plots="".join(plots),
    )


def _summary(result: ValidationResult) -> str:
    """Say how many runs there are and how far off they are."""
    parts = [f"{result.summary.priced} of {result.summary.rows} runs priced"]
    for what, stats in (("time", result.summary.step), ("memory", result.summary.memory)):
        if stats is not None:
            median, p90 = 100 * stats.median_abs_error_ratio, 100 * stats.p90_abs_error_ratio
            parts.append(f"{what}: median error {median:.1f} %, 90th percentile {p90:.1f} % of {stats.rows}")
    return "; ".join(parts) + "."


def _legend(name: str, colour: str) -> str:
    """Write the box that shows or hides one cluster."""
    box = f'<input type="checkbox" checked data-hardware="{escape(name)}">'
    return f'<label>{box} <span class="dot" style="background:{colour}"></span> {escape(name)}</label>'


def _times(row: RowResult) -> tuple[float | None, float | None]:
    """Seconds, measured and predicted."""
    return row.measured_step_time_s, row.predicted_step_time_s


def _peaks(row: RowResult) -> tuple[float | None, float | None]:
    """GiB, measured and predicted."""
    if not row.memory:
        return None, None
    return bytes_to_gib(row.memory[0].measured_bytes), bytes_to_gib(row.memory[0].predicted_bytes)


def _marks(rows: Iterable[RowResult], figures: Callable[[RowResult], tuple[float | None, float | None]]) -> list[_Mark]:
    """Runs of which both figures are known."""
    marks = []
    for row in rows:
        measured, predicted = figures(row)
        if measured and predicted:
            marks.append(_Mark(row=row, measured=measured, predicted=predicted))
    return marks


def _plot(title: str, marks: Sequence[_Mark], colours: dict[str, str]) -> str:
    """Draw one plot, nothing where no run has both figures."""
    if not marks:
        return ""
    scale = _Scale.over([value for mark in marks for value in (mark.measured, mark.predicted)])
    middle = SIZE / 2
    parts = [
        *_grid(scale),
        *(_line(scale, factor, "even" if factor == 1 else "band") for factor in (1, 1 + BAND_RATIO, 1 - BAND_RATIO)),
        *(_mark(mark, scale, colours[mark.row.label.hardware]) for mark in marks),
        f'<text x="{middle}" y="{SIZE - 16}" text-anchor="middle">measured</text>',
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">predicted</text>',
    ]
    drawing = f'<svg width="{SIZE}" height="{SIZE}" viewBox="0 0 {SIZE} {SIZE}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"


def _grid(scale: _Scale) -> Iterable[str]:
    """Draw a line for each decade, both ways."""
    low, high = MARGIN, SIZE - MARGIN
    for decade in range(scale.low, scale.high + 1):
        at = scale.at(10.0**decade)
        yield f'<line class="axis" x1="{at:.1f}" y1="{low}" x2="{at:.1f}" y2="{high}"/>'
        yield f'<line class="axis" x1="{low}" y1="{SIZE - at:.1f}" x2="{high}" y2="{SIZE - at:.1f}"/>'
        yield f'<text x="{at:.1f}" y="{high + 16}" text-anchor="middle">{10.0**decade:g}</text>'
        yield f'<text x="{low - 6}" y="{SIZE - at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'


def _line(scale: _Scale, factor: float, kind: str) -> str:
    """Draw where predicted is a multiple of measured."""
    low, high = 10.0**scale.low * max(1.0, 1 / factor), 10.0**scale.high * min(1.0, 1 / factor)
    (left, bottom), (right, top) = ((scale.at(value), SIZE - scale.at(value * factor)) for value in (low, high))
    return f'<line class="{kind}" x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{top:.1f}"/>'


def _mark(mark: _Mark, scale: _Scale, colour: str) -> str:
    """Draw one run with its facts."""
    label = mark.row.label
    x, y = scale.at(mark.measured), SIZE - scale.at(mark.predicted)
    facts = (
        label.id,
        f"measured {mark.measured:.4g}, predicted {mark.predicted:.4g} ({mark.predicted / mark.measured - 1:+.1%})",
        f"{label.hardware}, {mark.row.run.devices if mark.row.run else 0} devices, software {mark.row.software}",
        mark.row.plan_name,
        label.source,
    )
    told = escape("\n".join(facts), quote=True)
    common = f'data-on="{escape(label.hardware)}" data-tip="{told}" fill="{colour}"'
    if label.moe:
        return f'<rect class="run" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {common}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {common}/>'
