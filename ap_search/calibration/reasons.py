"""Why a constant was left as it is, in words."""

import numpy as np
from numpy.typing import NDArray

from ap_search.calibration.fit import SEEN_SHARE_RATIO, Fit, Problem, scaled_shares
from ap_search.calibration.prices import FloatArray

_COLLINEAR = 0.9


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
    twin = _twin(place, scaled, found)
    if twin is not None:
        return f"collinear with {names[twin]}: the runs cannot tell them apart"
    used = shares[:, place] >= SEEN_SHARE_RATIO
    count = len(np.unique(groups[used]))
    if count < 2:
        return f"too few runs: {int(used.sum())} of one group, where it drives {100 * most:.0f} % of a step at most"
    return f"too weak: it drives {100 * most:.0f} % of a step at most, runs scatter by {100 * found.scatter:.0f} %"


def _twin(place: int, scaled: FloatArray, found: Fit) -> int | None:
    """The kept constant whose effect on the runs is nearly the same."""
    norms = np.sqrt((scaled**2).sum(axis=0))
    likeness = (scaled.T @ scaled[:, place]) / np.maximum(norms * norms[place], 1e-300)
    likeness = np.where(found.kept, likeness, 0.0)
    best = int(likeness.argmax())
    return best if likeness[best] > _COLLINEAR else None
