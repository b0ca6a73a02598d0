"""The fit: few logarithms of gains, pulled towards the shipped constants, robust against outliers."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.calibration.prices import Surrogate

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

# A constant is identified where the runs take away two thirds of its variance; of a pair that they
# cannot tell apart they take away half.
IDENTIFIED_RATIO = 0.667
# A constant that drives less than this of every step cannot be seen.
SEEN_SHARE_RATIO = 0.02
# Scatter of runs about the model, in logarithms: never under what one plan measured twice differs by (3 %); what dense
# runs of one stack scatter by (8 %) while there are too few to tell.
_LEAST_SCATTER, _USUAL_SCATTER, _ENOUGH_ROWS = 0.03, 0.08, 8
# How near most levels are to the shipped one, in logarithms.
_NEAR_LEVEL = 0.07
_MAD_TO_SIGMA = 1.4826
# Residuals beyond this many scatters lose weight (95 % efficient for normal errors).
_CAUCHY = 2.385
_TURNS, _CENTRED_TURNS, _SCATTER_TURNS, _CONVERGED = 60, 5, 4, 1e-7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What is fitted.

    Attributes
    ----------
    surrogate : Surrogate
        Prices of the rows.
    log_measured : FloatArray
        Logarithm of measured seconds, shape (rows,).
    weights : FloatArray
        Weight of each row, shape (rows,): rows of a large group count less each.
    spreads : FloatArray
        Standard deviation of each constant's logarithm before any run is seen, shape (constants,).
    level : BoolArray
        Constants that stand for a stack's level, shape (constants,).
    lowest, highest : FloatArray
        Physical bounds, shape (constants,).
    """

    surrogate: Surrogate
    log_measured: FloatArray
    weights: FloatArray
    spreads: FloatArray
    level: BoolArray
    lowest: FloatArray
    highest: FloatArray

    def residuals(self, log_gains: FloatArray) -> FloatArray:
        """Logarithm of measured over predicted seconds, shape (rows,)."""
        return np.asarray(self.log_measured - np.log(self.surrogate.seconds(log_gains)))

    def pull(self, log_gains: FloatArray, kept: BoolArray, *, heavy: bool) -> FloatArray:
        """Inverse prior variance of the constants that are kept, shape (kept,).

        A level has heavy tails: most stacks lie within the scatter of the shipped one, and some are far off. What one
        run shows within its scatter moves little, what it shows beyond moves nearly whole.
        """
        spreads = self.spreads
        if heavy:
            spreads = np.where(self.level, np.minimum(spreads, np.hypot(_NEAR_LEVEL, log_gains)), spreads)
        return np.asarray(1.0 / spreads[kept] ** 2)

    def of(self, places: NDArray[np.int64], weights: FloatArray) -> "Problem":
        """Keep some rows, with weights of their own."""
        return replace(
            self, surrogate=self.surrogate.of(places), log_measured=self.log_measured[places], weights=weights
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """A fit: gains (logarithms; 0 where a constant was left), scatter of the rows, what each constant gained.

    `known_ratio` (constants,) is the share of each constant's uncertainty that the rows take away, fitted together with
    the others that were kept; `kept` says which were.
    """

    log_gains: FloatArray
    scatter: float
    kept: BoolArray
    known_ratio: FloatArray


def group_weights(groups: NDArray[np.int64]) -> FloatArray:
    """Weight of each row: one over the root of its group's size, so that no large group decides alone."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / np.sqrt(counts[inverse]))


def fit(problem: Problem, candidates: BoolArray) -> Fit:
    """Fit the constants among some candidates that the rows identify.

    Parameters
    ----------
    problem : Problem
        Rows and priors.
    candidates : array of bool
        Constants that may move, shape (constants,).

    Returns
    -------
    Fit

    Notes
    -----
    A1. From all candidates, the one that the rows say least about is left out until each of the rest is identified:
    the rows take away two thirds of its prior variance, given the others.
    """
    kept = candidates.copy()
    while True:
        gains, scatter, weights = _solve(problem, kept)
        known = _known(problem, gains, kept=kept, precision=weights / scatter**2)
        weakest = int(np.where(kept, np.round(known, 6), np.inf).argmin()) if kept.any() else 0
        if not kept.any() or known[weakest] >= IDENTIFIED_RATIO:
            return Fit(log_gains=gains, scatter=scatter, kept=kept, known_ratio=known)
        kept[weakest] = False


def _solve(problem: Problem, kept: BoolArray) -> tuple[FloatArray, float, FloatArray]:
    """Gains, scatter and final weights of the rows for a set of constants."""
    gains = np.zeros(len(kept))
    scatter = _scatter(problem.residuals(gains), centred=True)
    weights = problem.weights
    for turn in range(_SCATTER_TURNS):
        gains, weights = _reweighted(problem, kept, gains, scatter=scatter, centred=turn == 0)
        again = _scatter(problem.residuals(gains), centred=False)
        if abs(again - scatter) < 1e-4:
            break
        scatter = again
    return gains, scatter, weights


def _reweighted(
    problem: Problem, kept: BoolArray, gains: FloatArray, *, scatter: float, centred: bool
) -> tuple[FloatArray, FloatArray]:
    """Gauss-Newton with reweighting, from some gains on.

    In the first turns, and where rows are few, a common offset makes no outliers; in the first turns the level is free
    of its pull towards the shipped one.
    """
    weights, few = problem.weights, len(problem.weights) < _ENOUGH_ROWS
    for turn in range(_TURNS):
        residuals = problem.residuals(gains)
        start = centred and turn < _CENTRED_TURNS
        offset = np.median(residuals) if start or few else 0.0
        weights = problem.weights / (1.0 + ((residuals - offset) / (_CAUCHY * scatter)) ** 2)
        slopes, prior = problem.surrogate.shares(gains)[:, kept], np.diag(problem.pull(gains, kept, heavy=not start))
        pull = (slopes * (weights / scatter**2)[:, None]).T
        # Shares are minus the slopes of log seconds: a residual above 0 (slower than predicted) asks for less gain.
        wanted = np.linalg.solve(pull @ slopes + prior, -pull @ residuals - prior @ gains[kept])
        before = gains.copy()
        gains = gains.copy()
        gains[kept] = np.clip(gains[kept] + wanted, problem.lowest[kept], problem.highest[kept])
        if not start and np.abs(gains - before).max(initial=0.0) < _CONVERGED:
            break
    return gains, weights


def _scatter(residuals: FloatArray, *, centred: bool) -> float:
    """Robust standard deviation of residuals; what few rows have in common is their level, and no scatter."""
    few = len(residuals) < _ENOUGH_ROWS
    rest = residuals - np.median(residuals) if centred or few else residuals
    least = _USUAL_SCATTER if few else _LEAST_SCATTER
    return max(least, _MAD_TO_SIGMA * float(np.median(np.abs(rest))))


def _known(problem: Problem, gains: FloatArray, *, kept: BoolArray, precision: FloatArray) -> FloatArray:
    """Share of each kept constant's prior variance that the rows take away; 0 for the others."""
    known = np.zeros(len(kept))
    if kept.any():
        slopes = problem.surrogate.shares(gains)[:, kept]
        information = (slopes * precision[:, None]).T @ slopes + np.diag(1.0 / problem.spreads[kept] ** 2)
        known[kept] = 1.0 - np.diag(np.linalg.inv(information)) / problem.spreads[kept] ** 2
    return known


def scaled_shares(problem: Problem, found: Fit) -> FloatArray:
    """The Jacobian in units of scatter and prior spread, shape (rows, constants).

    Parameters
    ----------
    problem : Problem
    found : Fit
        Where to take it.

    Returns
    -------
    FloatArray
        Its singular values say how many combinations of constants the rows identify: those at 1 or above.
    """
    root = np.sqrt(problem.weights)[:, None] / found.scatter
    return np.asarray(problem.surrogate.shares(found.log_gains) * root * problem.spreads)
