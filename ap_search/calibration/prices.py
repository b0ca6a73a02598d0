"""Seconds of recorded runs under changed constants, and how they depend on each constant."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ap_search.fidelity.price import ReadyRun, step_seconds
from ap_search.spec.calibrated import as_recorded, machine_from, software_from
from ap_search.spec.constants import Constant, Content, Home, moved
from ap_search.spec.machine import Machine
from ap_search.spec.software import Software
from ap_search.spec.switches import switched

FloatArray = NDArray[np.float64]
Tell = Callable[[float], None]
# Step of a finite difference, in the logarithm of a constant, towards slower: no bound stands in that way.
_STEP = 0.05
# A surrogate never goes below this share of the price that it starts from.
_FLOOR_RATIO = 0.05
# A constant that drives less than this of a row's seconds is not looked at again.
_NOTHING_RATIO = 0.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPrices:
    """Runs with the files that their constants stand in.

    `cluster_of` and `profile_of` name each row's file; `clusters` and `profiles` hold them; `stated` is the machine of
    the cluster that a row names, against which what it says of its own hardware shows.
    """

    rows: tuple[ReadyRun, ...]
    cluster_of: tuple[str, ...]
    profile_of: tuple[str, ...]
    clusters: Mapping[str, Content]
    profiles: Mapping[str, Content]
    stated: Mapping[str, Machine]
    constants: tuple[Constant, ...]

    def files(self, log_gains: FloatArray) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Give the cluster files and the profiles with every constant moved.

        Parameters
        ----------
        log_gains : FloatArray
            Logarithm of each constant's gain, above 0 is faster, shape (constants,).

        Returns
        -------
        tuple of dict
            Clusters and profiles by name.
        """
        return self._moved(self.clusters, Home.CLUSTER, log_gains), self._moved(self.profiles, Home.SOFTWARE, log_gains)

    def _moved(self, files: Mapping[str, Content], home: Home, log_gains: FloatArray) -> dict[str, dict[str, Any]]:
        """Move the constants of one kind of file."""
        changed = {name: dict(content) for name, content in files.items()}
        for constant, gain in zip(self.constants, log_gains.tolist(), strict=True):
            if constant.home is home:
                changed = {name: moved(content, constant, gain) for name, content in changed.items()}
        return changed

    def seconds(self, log_gains: FloatArray, places: Sequence[int] | None = None) -> FloatArray:
        """Seconds of a step of some rows (all when not named) under moved constants, shape (places,).

        Parameters
        ----------
        log_gains : FloatArray
            As for `files`.
        places : sequence of int, optional
            Which rows.

        Returns
        -------
        FloatArray
        """
        clusters, profiles = self.files(log_gains)
        machines = {name: machine_from(content, name) for name, content in clusters.items()}
        softwares = {name: software_from(content, name) for name, content in profiles.items()}
        chosen = range(len(self.rows)) if places is None else places
        return step_seconds([self._changed(place, machines, softwares) for place in chosen])

    def _changed(self, place: int, machines: Mapping[str, Machine], softwares: Mapping[str, Software]) -> ReadyRun:
        """One row with the machine and the software of changed files, and what it says itself."""
        row, cluster = self.rows[place], self.cluster_of[place]
        machine = as_recorded(machines[cluster], row.run.machine, self.stated[cluster])
        software = switched(softwares[self.profile_of[place]], row.run.switches)
        return replace(row, run=replace(row.run, machine=machine), software=software)

    def uses(self, constant: Constant) -> list[int]:
        """Rows that a constant can matter to."""
        return [place for place, row in enumerate(self.rows) if row.run.label.moe or not constant.moe_only]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """Prices near a point as a sum of parts, each inversely proportional to one constant's gain.

    `base_s` (rows,) are seconds at the point `at` (constants,), `parts_s` (rows, constants) what of them each constant
    drives. A step is such a sum but for maxima inside it, so that the surrogate holds far from its point.
    """

    at: FloatArray
    base_s: FloatArray
    parts_s: FloatArray

    def seconds(self, log_gains: FloatArray) -> FloatArray:
        """Seconds under moved constants, shape (rows,)."""
        changed = self.base_s + self.parts_s @ (np.exp(self.at - log_gains) - 1.0)
        return np.asarray(np.maximum(changed, _FLOOR_RATIO * self.base_s))

    def shares(self, log_gains: FloatArray) -> FloatArray:
        """Share of a row's seconds that each constant drives, minus the slope of log seconds: (rows, constants)."""
        return np.asarray(self.parts_s * np.exp(self.at - log_gains) / self.seconds(log_gains)[:, None])

    def of(self, places: NDArray[np.int64]) -> "Surrogate":
        """Keep some rows."""
        return Surrogate(at=self.at, base_s=self.base_s[places], parts_s=self.parts_s[places])


def surrogate(prices: RowPrices, at: FloatArray, *, movable: NDArray[np.bool_], tell: Tell) -> Surrogate:
    """Price all rows at a point and beside it, once per constant.

    Parameters
    ----------
    prices : RowPrices
        Rows and constants.
    at : FloatArray
        The point: logarithms of gains, shape (constants,).
    movable : array of bool
        Constants that are looked at; the others drive nothing.
    tell : callable
        Told which share is done, 0..1.

    Returns
    -------
    Surrogate

    Notes
    -----
    A1. One-sided differences towards slower; exact where the price is a sum of parts.
    """
    uses = [prices.uses(constant) if may else [] for constant, may in zip(prices.constants, movable, strict=True)]
    return _linearised(prices, at, uses=uses, tell=tell)


def again(prices: RowPrices, known: Surrogate, at: FloatArray, *, tell: Tell) -> Surrogate:
    """Price all rows at another point, and beside it where a constant drives something; arguments as `surrogate`."""
    seen = known.parts_s > _NOTHING_RATIO * known.base_s[:, None]
    uses = [np.flatnonzero(column).tolist() for column in seen.T]
    return _linearised(prices, at, uses=uses, tell=tell)


def _linearised(prices: RowPrices, at: FloatArray, *, uses: Sequence[Sequence[int]], tell: Tell) -> Surrogate:
    """Price all rows at a point, and for each constant the rows that use it beside it."""
    base = prices.seconds(at)
    parts = np.zeros((len(base), len(at)))
    for column, places in enumerate(uses):
        tell(column / len(at))
        if places:
            slower = at.copy()
            slower[column] -= _STEP
            parts[places, column] = (prices.seconds(slower, places) - base[list(places)]) / (np.exp(_STEP) - 1.0)
    return Surrogate(at=at, base_s=base, parts_s=np.maximum(parts, 0.0))
