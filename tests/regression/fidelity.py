"""What the fidelity regression holds: errors on the recorded runs that ship, rounded, and which of them got worse."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ap_search import validate
from ap_search.fidelity.records import ErrorStats, RankedGroup, Slice, ValidationResult

FILE = Path(__file__).parent / "fidelity.yaml"
COMMAND = "python -m tests.regression.update_fidelity"
# Errors are in percent with two decimals: a tenth of a percent is noise of rounding, not of the model.
SLACK_PERCENT = 0.1
SLACK_SPEARMAN = 0.005
# Lower is better for everything but these.
HIGHER_IS_BETTER = ("coverage", "spearman")


def snapshot(result: ValidationResult) -> dict[str, Any]:
    """Keep what the regression watches."""
    summary = result.summary
    return {
        "all": {
            "coverage": _percent(summary.coverage_ratio),
            **_errors("time", summary.step),
            **_errors("memory", summary.memory),
            "oom_called_safe": len(summary.feasibility.called_safe),
            "trained_called_full": len(summary.feasibility.called_full),
        },
        "memory": {kind: _errors("memory", stats) for kind, stats in summary.memory_kinds},
        "kinds": _slices(result.kinds),
        "hardware": _slices(result.hardware),
        "sources": _slices(result.sources),
        "groups": {group.group: _order(group) for group in result.groups},
    }


def _percent(ratio: float) -> float:
    return round(100 * ratio, 2)


def _errors(what: str, stats: ErrorStats | None) -> dict[str, float]:
    if stats is None:
        return {}
    return {
        f"{what}_median": _percent(stats.median_abs_error_ratio),
        f"{what}_p90": _percent(stats.p90_abs_error_ratio),
    }


def _slices(parts: tuple[Slice, ...]) -> dict[str, dict[str, float]]:
    return {part.name: _errors("time", part.step) | _errors("memory", part.memory) for part in parts}


def _order(group: RankedGroup) -> dict[str, float]:
    return {"spearman": round(group.spearman, 3), "regret": _percent(group.top1_regret_ratio)}


def measured_now() -> dict[str, Any]:
    """Validate the runs that ship, and keep what the regression watches."""
    return snapshot(validate())


def recorded() -> dict[str, Any]:
    """What the committed file says."""
    kept: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return kept


def written(kept: dict[str, Any]) -> str:
    """The text of the file."""
    head = f"# Errors on configs/runs, percent; they may not get worse. Rewritten by {COMMAND} only.\n"
    return head + yaml.safe_dump(kept, sort_keys=False, width=120)


def changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Name every figure that differs by more than the slack: whether it got worse, and how.

    A figure that is gone got worse; a new one did not.
    """
    old, new = dict(_figures(before)), dict(_figures(now))
    for path in dict.fromkeys([*old, *new]):
        if path not in new:
            yield True, f"{path}: {old[path]:g} -> gone"
        elif path not in old:
            yield False, f"{path}: new, {new[path]:g}"
        else:
            higher = path.split(".")[-1] in HIGHER_IS_BETTER
            loss = (old[path] - new[path]) if higher else (new[path] - old[path])
            slack = SLACK_SPEARMAN if path.endswith("spearman") else SLACK_PERCENT
            if abs(loss) > slack:
                yield loss > 0, f"{path}: {old[path]:g} -> {new[path]:g}"


def _figures(kept: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for key, value in kept.items():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            yield from _figures(value, here)
        else:
            yield here, float(value)
