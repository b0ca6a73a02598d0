"""Errors and order of predictions, on the runs of a fit and on runs that it did not see."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.calibration.fit import BoolArray, Fit, Problem, fit, group_weights
from ap_search.calibration.prices import FloatArray, RowPrices
from ap_search.calibration.records import CrossValidation, Fidelity
from ap_search.calibration.rows import UsableRows
from ap_search.fidelity.bands import KINDS, ratio_band
from ap_search.fidelity.records import RowResult, Status
from ap_search.fidelity.statistics import error_stats, ranked_groups
from ap_search.spec.band import Band

# Ranks of a few plans change by steps: a loss under this is none.
ORDER_SLACK = 0.005


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """What is cross-validated: the rows, their prices and units, the problem, and which constants each way may move."""

    usable: UsableRows
    prices: RowPrices
    problem: Problem
    units: NDArray[np.int64]
    groups: NDArray[np.int64]
    level: BoolArray
    full: BoolArray


def fidelity(usable: UsableRows, predicted_s: FloatArray) -> Fidelity:
    """Errors of some predictions, and the order inside groups.

    Parameters
    ----------
    usable : UsableRows
        Runs with measured seconds.
    predicted_s : FloatArray
        Seconds, shape (rows,).

    Returns
    -------
    Fidelity
    """
    rows = [
        RowResult(
            label=row.run.label,
            status=Status.PRICED,
            run=row.run,
            plan=row.plan,
            measured_step_time_s=measured,
            predicted_step_time_s=predicted,
        )
        for row, measured, predicted in zip(usable.rows, usable.measured_s.tolist(), predicted_s.tolist(), strict=True)
    ]
    stats = error_stats(row.step_error_ratio for row in rows)
    assert stats is not None
    order = [group.spearman for group in ranked_groups(rows)]
    return Fidelity(step=stats, spearman=float(np.median(order)) if order else None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """A cross-validation with its predictions: seconds of each run by a fit that did not see it, by way of fitting."""

    found: CrossValidation
    seconds: dict[str, FloatArray]


def cross_validate(trial: Trial, *, leave_out: str, base_s: FloatArray, tell: Callable[[float], None]) -> Judged:
    """Price every unit by fits on all other units.

    Parameters
    ----------
    trial : Trial
        With at least two units.
    leave_out : str
        What a unit is.
    base_s : FloatArray
        Seconds under the shipped constants, shape (rows,).
    tell : callable
        Told which share is done, 0..1.

    Returns
    -------
    Judged

    Notes
    -----
    A1. What is identified is decided anew in every fit. With one unit left to fit on, only the level is.
    A2. Fits use the surrogate of all rows' prices, whose point came from a fit on all rows; the unit that is left out
    is priced by the model itself.
    """
    level_s, full_s = np.empty(len(base_s)), np.empty(len(base_s))
    count = int(trial.units.max()) + 1
    for unit in range(count):
        tell(unit / count)
        train, test = np.flatnonzero(trial.units != unit), np.flatnonzero(trial.units == unit)
        for candidates, seconds in ((trial.level, level_s), (trial.full if count > 2 else trial.level, full_s)):
            found = fit_on(trial, train, candidates)
            seconds[test] = trial.prices.seconds(found.log_gains, test.tolist())
    validation = CrossValidation(
        leave_out=leave_out,
        units=count,
        before=fidelity(trial.usable, base_s),
        level=fidelity(trial.usable, level_s),
        full=fidelity(trial.usable, full_s),
    )
    return Judged(found=validation, seconds={"level": level_s, "full": full_s})


def left_out_bands(usable: UsableRows, predicted_s: FloatArray) -> dict[str, Band]:
    """Measured over predicted by kind of model.

    Parameters
    ----------
    usable : UsableRows
    predicted_s : FloatArray
        Seconds by fits that did not see the run, shape (rows,).

    Returns
    -------
    dict
        `dense` and `moe`, those that there are.
    """
    ratios: dict[str, list[float]] = {}
    for row, ratio in zip(usable.rows, (usable.measured_s / predicted_s).tolist(), strict=True):
        ratios.setdefault(KINDS[row.run.label.moe], []).append(ratio)
    return {kind: band for kind, found in sorted(ratios.items()) if (band := ratio_band(found)) is not None}


def fit_on(trial: Trial, places: NDArray[np.int64], candidates: BoolArray) -> Fit:
    """Fit on some rows."""
    return fit(trial.problem.of(places, group_weights(trial.groups[places])), candidates)


def choose(found: CrossValidation | None) -> tuple[str, str]:
    """Choose between the shipped constants, the level alone and the whole fit.

    Parameters
    ----------
    found : CrossValidation, optional
        None where there is one unit only.

    Returns
    -------
    tuple of str
        `full`, `level` or `none`, and why.
    """
    if found is None:
        return "level", "all runs are of one group: nothing can be left out to judge by, so only the level was set"
    refused = []
    for name, after in sorted((("level", found.level), ("full", found.full)), key=lambda way: _score(way[1])):
        worse = _worse(found.before, after)
        if not worse:
            return name, f"the median error on each {found.leave_out} left out {_change(found.before, after)}"
        refused.append(worse)
    return "none", f"not adopted: on each {found.leave_out} left out {refused[0]}"


def _score(after: Fidelity) -> float:
    """What is small where a way of fitting is good: median and 90th percentile together."""
    return after.step.median_abs_error_ratio + after.step.p90_abs_error_ratio


def _worse(before: Fidelity, after: Fidelity) -> str:
    """Say what got worse, or nothing."""
    if after.step.median_abs_error_ratio >= before.step.median_abs_error_ratio:
        return f"the median error {_change(before, after)}"
    if before.spearman is not None and (after.spearman or 0.0) < before.spearman - ORDER_SLACK:
        return f"the order inside groups would get worse: Spearman {before.spearman:.2f} to {after.spearman or 0.0:.2f}"
    return ""


def _change(before: Fidelity, after: Fidelity) -> str:
    """Say how a median error changes."""
    old, new = before.step.median_abs_error_ratio, after.step.median_abs_error_ratio
    return f"{'falls' if new < old else 'would go'} from {100 * old:.1f} % to {100 * new:.1f} %"
