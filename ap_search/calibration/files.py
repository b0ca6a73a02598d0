"""The files that a calibration writes: whole cluster files and profiles, with where each constant is from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ap_search.calibration.prices import FloatArray, RowPrices
from ap_search.calibration.rows import UsableRows
from ap_search.spec.band import Band
from ap_search.spec.calibrated import SUFFIX, machine_from, signed, software_from, yaml_text
from ap_search.spec.cluster_defaults import RESERVE_GIB
from ap_search.spec.constants import Home
from ap_search.spec.run import MemoryKind, Run
from ap_search.units import bytes_to_gib, gib_to_bytes

# More than this of a device kept free is no reserve but another process, or another unit.
_MOST_RESERVE_RATIO = 0.3
_RESERVE = "reserve_gib"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The reserve that runs show, bytes; None where they do not, and the statement says why."""

    reserve_bytes: int | None
    statement: str


def measured_reserve(usable: UsableRows) -> Reserve:
    """What devices hold beyond allocated tensors, from runs that print both.

    Parameters
    ----------
    usable : UsableRows
        The runs.

    Returns
    -------
    Reserve

    Notes
    -----
    A1. nvidia-smi minus allocated is all of the reserve; the allocator's pool minus allocated lacks context and
    communicators, for which the default's fixed part is added. The largest over a run's stages, the median over runs.
    """
    found = [(row.run.label.id, extra) for row in usable.rows if (extra := _beyond_allocated(row.run)) is not None]
    if not found:
        return Reserve(reserve_bytes=None, statement="no run prints allocated memory beside reserved or nvidia-smi")
    size = float(np.median([extra for _, extra in found]))
    most = _MOST_RESERVE_RATIO * min(row.run.machine.device_memory_bytes for row in usable.rows)
    if not 0 <= size <= most:
        reason = f"runs show {bytes_to_gib(size):.1f} GiB beyond allocated tensors, such as {found[0][0]}: no reserve"
        return Reserve(reserve_bytes=None, statement=f"{reason}; check kinds and units of memory")
    text = f"{bytes_to_gib(size):.2f} GiB beyond allocated tensors, median of {len(found)} runs that print both"
    return Reserve(reserve_bytes=round(size), statement=text)


def _beyond_allocated(run: Run) -> float | None:
    """What one run holds beyond allocated tensors, bytes."""
    peaks = {reading.kind: reading.peak_bytes for reading in run.measured.memory}
    allocated = peaks.get(MemoryKind.ALLOCATED)
    if allocated is None or run.measured.oom or run.measured.failed:
        return None
    if MemoryKind.NVIDIA_SMI in peaks:
        return float(peaks[MemoryKind.NVIDIA_SMI] - allocated)
    if MemoryKind.RESERVED in peaks:
        return float(peaks[MemoryKind.RESERVED] - allocated + gib_to_bytes(RESERVE_GIB))
    return None


def file_text(
    prices: RowPrices,
    log_gains: FloatArray,
    *,
    home: Home,
    origin: str,
    reserve: Reserve | None,
    bands: Mapping[str, Band],
) -> str:
    """Write the calibrated file of one kind.

    Parameters
    ----------
    prices : RowPrices
        The files; there is one of this kind.
    log_gains : FloatArray
        Logarithm of each constant's gain, shape (constants,).
    home : Home
        Which kind.
    origin : str
        What the constants were calibrated on.
    reserve : Reserve, optional
        The reserve to set in a cluster file.
    bands : mapping
        Kind of model -> errors on runs left out.

    Returns
    -------
    str
        YAML that `--cluster` or `--software` takes; it has been read back.
    """
    (content,) = prices.files(log_gains)[0 if home is Home.CLUSTER else 1].values()
    changed = [
        constant for constant, gain in zip(prices.constants, log_gains, strict=True) if constant.home is home and gain
    ]
    whole = signed(content, changed, origin)
    if reserve is not None and reserve.reserve_bytes is not None:
        whole = _with_reserve(whole, reserve, origin)
    errors = {kind: asdict(band) for kind, band in bands.items()}
    whole = whole | {"name": _calibrated_name(str(whole["name"])), "left_out_errors": errors}
    (machine_from if home is Home.CLUSTER else software_from)(whole, "calibrated")
    return yaml_text(whole, f"Written by ap-search calibrate: {origin}.")


def _calibrated_name(name: str) -> str:
    """Name of a calibrated file; calibrating it again adds nothing."""
    return name if name.endswith(SUFFIX) else f"{name}{SUFFIX}"


def _with_reserve(content: dict[str, Any], reserve: Reserve, origin: str) -> dict[str, Any]:
    """Set the reserve of a cluster file."""
    sources = content["sources"] | {_RESERVE: f"{origin}: {reserve.statement}"}
    assumed = [key for key in content["assumed"] if key != _RESERVE]
    size = round(bytes_to_gib(reserve.reserve_bytes or 0), 3)
    return content | {_RESERVE: size, "sources": sources, "assumed": assumed}
