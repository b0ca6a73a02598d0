"""Calibration as the documented JSON (`schema_version` 1): keys may be added, never renamed."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ap_search.result.json import JSON_SCHEMA_VERSION, strict_json
from ap_search.version import __version__

if TYPE_CHECKING:
    from ap_search.calibration.records import CalibrationResult, Fidelity

_STATS = ("rows", "bias_ratio", "median_abs_error_ratio", "p90_abs_error_ratio")
_TEXTS = ("cluster_text", "software_text")


def calibration_json(result: "CalibrationResult") -> dict[str, Any]:
    """Turn the answer of `calibrate` into an object of plain values; the files' texts are not in it."""
    plain = {name: value for name, value in asdict(result).items() if name not in _TEXTS}
    left_out = result.cross_validation
    plain |= {"before": _fidelity(result.before), "fitted": _fidelity(result.fitted)}
    if left_out is not None:
        plain["cross_validation"] = {
            "leave_out": left_out.leave_out,
            "units": left_out.units,
            **{name: _fidelity(getattr(left_out, name)) for name in ("before", "level", "full")},
        }
    head = {"schema_version": JSON_SCHEMA_VERSION, "tool_version": __version__, "adopted": result.adopted}
    answer: dict[str, Any] = strict_json(head | plain)
    return answer


def _fidelity(found: "Fidelity") -> dict[str, Any]:
    """Name errors as `validate` does, with the order beside."""
    stats = {f"step_{name}": getattr(found.step, name) for name in _STATS}
    return {**stats, "group_spearman_median": found.spearman}
