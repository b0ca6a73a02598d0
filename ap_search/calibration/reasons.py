"""Why a constant was left as it is, in words."""

import numpy as np
from numpy.typing import NDArray

from ap_search.calibration.fit import SEEN_SHARE_RATIO, Fit, Problem, scaled_shares
from ap_search.calibration.prices import FloatArray

# A constant is collinear with others where they explain this much of its effect on the runs.
_COLLINEAR_RATIO = 0.9
# Of those, one is named that explains as much as this of what all explain.
_NAMED_RATIO = 0.3


def unidentified(problem: Problem, found: Fit, *, names: tuple[str, ...], groups: NDArray[np.int64]) -> tuple[str, ...]:
    """Say of each constant why the runs do not identify it; nothing of those that were kept.

    Parameters
    ----------
    problem : Problem
        All rows.
    found : Fit
        The fit on them.
    names : tuple of str
        The constants' names.
    groups : NDArray
        Group of each row, shape (rows,).

    Returns
    -------
    tuple of str
        One text per constant.
    """
    shares = problem.surrogate.shares(found.log_gains)
    scaled = scaled_shares(problem, found)
    return tuple(
        "" if found.kept[place] else _reason(place, shares, scaled, found=found, names=names, groups=groups)
        for place in range(len(names))
    )


def _reason(
    place: int,
    shares: FloatArray,
    scaled: FloatArray,
    *,
    found: Fit,
    names: tuple[str, ...],
    groups: NDArray[np.int64],
) -> str:
    """Why one constant was left."""
    most = float(shares[:, place].max(initial=0.0))
    if most < SEEN_SHARE_RATIO:
        return f"it drives {100 * most:.1f} % of a step at most" if most > 0 else "no run depends on it"
    twins = _twins(place, scaled, found)
    if twins:
        return f"collinear with {' and '.join(names[twin] for twin in twins)}: the runs cannot tell them apart"
    used = shares[:, place] >= SEEN_SHARE_RATIO
    count = len(np.unique(groups[used]))
    if count < 2:
        return f"too few runs: {int(used.sum())} of one group, where it drives {100 * most:.0f} % of a step at most"
    return f"too weak: it drives {100 * most:.0f} % of a step at most, runs scatter by {100 * found.scatter:.0f} %"


def _twins(place: int, scaled: FloatArray, found: Fit) -> list[int]:
    """Kept constants that together do nearly the same to the runs."""
    kept = np.flatnonzero(found.kept)
    if not len(kept):
        return []
    wanted, others = scaled[:, place], scaled[:, kept]
    weights, *_ = np.linalg.lstsq(others, wanted, rcond=None)
    missed = float(((wanted - others @ weights) ** 2).sum() / (wanted**2).sum())
    parts = np.abs(weights) * np.sqrt((others**2).sum(axis=0))
    named = parts >= _NAMED_RATIO * parts.max()
    return kept[named].tolist() if 1 - missed >= _COLLINEAR_RATIO else []
