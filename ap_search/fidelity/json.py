"""Validation as the documented JSON (`schema_version` 1): keys may be added, never renamed."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ap_search.result.json import JSON_SCHEMA_VERSION, strict_json
from ap_search.version import __version__

if TYPE_CHECKING:
    from ap_search.fidelity.records import (
        BestPlan,
        ErrorStats,
        MemoryComparison,
        RowResult,
        Slice,
        Summary,
        ValidationResult,
    )

_STATS = ("rows", "bias_ratio", "median_abs_error_ratio", "p90_abs_error_ratio")


def validation_json(result: "ValidationResult") -> dict[str, Any]:
    """Turn the answer of `validate` into an object of plain values."""
    answer: dict[str, Any] = strict_json(
        {
            "schema_version": JSON_SCHEMA_VERSION,
            "tool_version": __version__,
            "rows": [_row(row) for row in result.rows],
            "summary": _summary(result.summary),
            "groups": [asdict(group) for group in result.groups],
            "best_plans": [_best_plan(best) for best in result.best_plans],
            "per_source": [_slice(part) for part in result.sources],
            "per_hardware": [_slice(part) for part in result.hardware],
            "per_kind": [_slice(part) for part in result.kinds],
            "per_software": [_slice(part) for part in result.software],
        }
    )
    return answer


def _best_plan(best: "BestPlan") -> dict[str, Any]:
    """Turn the place of a measured plan into an object, one entry of `standings` per space."""
    places = [
        asdict(place) | {"space": place.space.value, "left": {knob: lead for knob, lead in place.left}}
        for place in best.standings
    ]
    return asdict(best) | {"standings": places}


def _row(row: "RowResult") -> dict[str, Any]:
    """Turn one run into an object."""
    label, reading = row.label, row.memory[0] if row.memory else None
    return {
        "id": label.id,
        "status": row.status.value,
        "reason": row.reason,
        "measured_step_time_s": row.measured_step_time_s,
        "predicted_step_time_s": row.predicted_step_time_s,
        "step_error_ratio": row.step_error_ratio,
        "measured_peak_bytes": reading.measured_bytes if reading else None,
        "predicted_peak_bytes": reading.predicted_bytes if reading else row.fullest_bytes,
        "memory_error_ratio": row.memory_error_ratio,
        "limit_bytes": row.limit_bytes,
        "fullest_stage_bytes": row.fullest_bytes,
        "fits": None if row.room_ratio is None else row.room_ratio >= 0,
        "oom": row.run is not None and row.run.measured.oom,
        "failed": row.run is not None and row.run.measured.failed,
        "source": label.source,
        "group": label.group,
        "quality": label.quality,
        "hardware": label.hardware,
        "kind": "moe" if label.moe else "dense",
        "software": row.software,
        "plan": row.plan_name,
        "assumed": list(row.assumed),
        "memory": [_reading(each) for each in row.memory],
        "time": None if row.time is None else asdict(row.time),
    }


def _reading(reading: "MemoryComparison") -> dict[str, Any]:
    """Turn one peak into an object."""
    return {
        "kind": reading.kind.value,
        "stage": reading.stage.value,
        "measured_bytes": reading.measured_bytes,
        "predicted_bytes": reading.predicted_bytes,
        "error_ratio": reading.error_ratio,
        "stages": [
            {"stage": stage, "measured_bytes": measured, "predicted_bytes": predicted}
            for stage, measured, predicted in reading.stages
        ],
    }


def _stats(prefix: str, stats: "ErrorStats | None") -> dict[str, Any]:
    """Name the statistics of one figure: `step_median_abs_error_ratio`."""
    return {f"{prefix}_{name}": None if stats is None else getattr(stats, name) for name in _STATS}


def _slice(part: "Slice") -> dict[str, Any]:
    """Turn one part of the rows into an object."""
    return {"name": part.name, "rows": part.rows, **_stats("step", part.step), **_stats("memory", part.memory)}


def _summary(summary: "Summary") -> dict[str, Any]:
    """Turn the summary into an object."""
    return {
        "rows": summary.rows,
        "priced": summary.priced,
        "refused": summary.refused,
        "skipped": summary.skipped,
        "coverage_ratio": summary.coverage_ratio,
        **_stats("step", summary.step),
        **_stats("memory", summary.memory),
        "memory_by_kind": [{"kind": kind, **asdict(stats)} for kind, stats in summary.memory_kinds],
        "feasibility": asdict(summary.feasibility),
        "assumed": [{"field": field, "rows": rows} for field, rows in summary.assumed],
        "group_spearman_median": summary.group_spearman_median,
        "group_regret_median_ratio": summary.group_regret_median_ratio,
        "group_regret_p90_ratio": summary.group_regret_p90_ratio,
    }
