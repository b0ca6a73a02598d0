"""Bands of errors by machine and kind of model, from validation: the file that answers draw on."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ap_search.fidelity.records import RowResult, Status, ValidationResult
from ap_search.spec.band import Band

KINDS = {False: "dense", True: "moe"}
Bands = tuple[tuple[str, str, Band | None, Band | None], ...]
"""Per machine and kind of model: its name, the kind, bands of seconds of a step and of peak memory."""


def bands_of(result: ValidationResult) -> Bands:
    """Summarise validation by machine and kind of model.

    Parameters
    ----------
    result : ValidationResult
        Priced runs.

    Returns
    -------
    Bands
        In alphabetical order, ratios of measured over predicted.
    """
    members: dict[tuple[str, str], list[RowResult]] = defaultdict(list)
    for row in result.rows:
        if row.status is Status.PRICED:
            members[row.label.hardware, KINDS[row.label.moe]].append(row)
    return tuple(
        (*key, _band([row.step_error_ratio for row in rows]), _band([row.memory_error_ratio for row in rows]))
        for key, rows in sorted(members.items())
    )


def _band(errors: Sequence[float | None]) -> Band | None:
    """Turn errors (predicted over measured, minus 1) into a band of measured over predicted."""
    return ratio_band([1 / (1 + error) for error in errors if error is not None])


def ratio_band(ratios: Sequence[float]) -> Band | None:
    """Summarise ratios of measured over predicted; None where there are none, four decimals."""
    if not ratios:
        return None
    low, middle, high = (round(value, 4) for value in np.quantile(ratios, [0.1, 0.5, 0.9]).tolist())
    return Band(rows=len(ratios), median_ratio=middle, p10_ratio=low, p90_ratio=high)
