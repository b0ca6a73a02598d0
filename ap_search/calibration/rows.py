"""Which recorded runs calibration can use, which it refuses as nonsense, and the files that their constants are in."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ap_search.calibration.prices import FloatArray, RowPrices
from ap_search.calibration.records import UnusedRun
from ap_search.errors import SpecError
from ap_search.fidelity.measured import measured_step_s
from ap_search.fidelity.price import Makers, ReadyRun, profile_name, ready_run
from ap_search.fidelity.records import RowResult
from ap_search.spec.calibrated import cluster_content, machine_from, software_content
from ap_search.spec.constants import CONSTANTS, Constant, Content, Home, room
from ap_search.spec.machine import Machine
from ap_search.spec.presets import preset_names
from ap_search.spec.run import Run, UnusableRun

# A run this many times slower than predicted is a slip (milliseconds for seconds, another batch), not a slow run.
SLOWEST_FACTOR = 15.0
# What a run may be faster than the least that physics leaves of the model's own count.
FASTEST_RATIO = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UsableRows:
    """Runs with a price and a measured time: `measured_s` has their seconds, `unused` names the others."""

    rows: tuple[ReadyRun, ...]
    measured_s: FloatArray
    unused: tuple[UnusedRun, ...]

    def of(self, places: Sequence[int], unused: Iterable[UnusedRun]) -> "UsableRows":
        """Keep some rows, and name more that are not used."""
        return UsableRows(
            rows=tuple(self.rows[place] for place in places),
            measured_s=self.measured_s[list(places)],
            unused=(*self.unused, *unused),
        )


def usable_rows(runs: Iterable[Run | UnusableRun]) -> UsableRows:
    """Sort out the runs that can be compared in time.

    Parameters
    ----------
    runs : iterable of Run or UnusableRun
        What the readers gave.

    Returns
    -------
    UsableRows

    Raises
    ------
    SpecError
        When none is left.
    """
    rows, measured, unused, makers = [], [], [], Makers()
    for place, run in enumerate(runs):
        found = _usable(run, place, makers)
        if isinstance(found, UnusedRun):
            unused.append(found)
        else:
            rows.append(found[0])
            measured.append(found[1])
    if not rows:
        shown = "; ".join(f"{each.id}: {each.reason}" for each in unused[:3])
        raise SpecError("--runs", f"no run has a measured time and a price ({shown})")
    return UsableRows(rows=tuple(rows), measured_s=np.array(measured), unused=tuple(unused))


def _usable(run: Run | UnusableRun, place: int, makers: Makers) -> tuple[ReadyRun, float] | UnusedRun:
    """One run with its measured seconds, or why it is of no use."""
    if isinstance(run, UnusableRun):
        return UnusedRun(id=run.label.id, reason=run.reason, refused=False)
    ready = ready_run(run, place=place, forced=None, makers=makers)
    if isinstance(ready, RowResult):
        return UnusedRun(id=run.label.id, reason=ready.reason, refused=False)
    seconds = measured_step_s(run, ready.plan)
    if seconds is None:
        return UnusedRun(id=run.label.id, reason="no time measured", refused=False)
    return ready, seconds


def row_prices(usable: UsableRows, *, cluster: str | Path | None, software: str | Path | None) -> RowPrices:
    """Find the files that the rows' constants stand in.

    Parameters
    ----------
    usable : UsableRows
        The rows.
    cluster, software : str or Path, optional
        A file for every row, in place of its own.

    Returns
    -------
    RowPrices
        With every constant that those files have.

    Raises
    ------
    SpecError
        When a file has faults.
    """
    named = [row.run.machine.name for row in usable.rows]
    cluster_of = tuple(named if cluster is None else [str(cluster)] * len(named))
    profile_of = tuple(profile_name(row.run) if software is None else str(software) for row in usable.rows)
    clusters = {name: cluster_content(name) for name in dict.fromkeys(cluster_of)}
    return RowPrices(
        rows=usable.rows,
        cluster_of=cluster_of,
        profile_of=profile_of,
        clusters=clusters,
        profiles={name: software_content(name) for name in dict.fromkeys(profile_of)},
        stated={name: _stated(name, content, named, cluster_of) for name, content in clusters.items()},
        constants=CONSTANTS,
    )


def _stated(file: str, content: Content, named: Sequence[str], cluster_of: Sequence[str]) -> Machine:
    """The machine that rows of a file name: the preset of that name, else the file itself."""
    name = next(name for name, of in zip(named, cluster_of, strict=True) if of == file)
    known = name in preset_names("clusters")
    return machine_from(cluster_content(name) if known else content, name)


def check_unmixed(
    usable: UsableRows, *, cluster: str | Path | None, software: str | Path | None, homes: set[Home]
) -> None:
    """Refuse runs of several machines, or of several profiles, where one file is to be fitted on all of them.

    Parameters
    ----------
    usable : UsableRows
        The rows.
    cluster, software : str or Path, optional
        What was named for all rows.
    homes : set of Home
        Files to be fitted.

    Raises
    ------
    SpecError
        Names what is in the files, and how to choose.
    """
    machines = Counter(row.run.machine.name for row in usable.rows)
    if Home.CLUSTER in homes and len(machines) > 1:
        raise SpecError("--runs", f"runs of several clusters: {_counts(machines)}; choose one with --hardware")
    (machine,) = machines if len(machines) == 1 else (None,)
    if cluster is None and machine is not None and machine not in preset_names("clusters"):
        raise SpecError("--cluster", f"required: the runs' cluster {machine!r} is no preset", "the path of its file")
    presets = preset_names("clusters")
    if machine in presets and cluster in presets and cluster != machine:
        raise SpecError(
            "--cluster", f"is {cluster}, but the runs are of {machine}", f"{machine}, or a file of your own"
        )
    profiles = Counter(profile_name(row.run) for row in usable.rows)
    if Home.SOFTWARE in homes and software is None and len(profiles) > 1:
        reason = f"runs of several software profiles: {_counts(profiles)}; name the one to start from with --software"
        raise SpecError("--runs", f"{reason}, or choose runs with --source")


def _counts(found: Mapping[str, int]) -> str:
    """Names with their numbers of runs."""
    return ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))


def bounds(prices: RowPrices) -> tuple[FloatArray, FloatArray]:
    """How far each constant may move in every file that has it: logarithms of gains, lowest and highest."""
    ends = [_bounds_of(prices, constant) for constant in prices.constants]
    return np.array([low for low, _ in ends]), np.array([high for _, high in ends])


def _bounds_of(prices: RowPrices, constant: Constant) -> tuple[float, float]:
    """What all files of a constant's kind leave it."""
    files = prices.clusters if constant.home is Home.CLUSTER else prices.profiles
    ends = [room(content, constant) for content in files.values()]
    return max(low for low, _ in ends), min(high for _, high in ends)


def refuse_nonsense(
    usable: UsableRows, prices: RowPrices, *, base_s: FloatArray, highest: FloatArray
) -> list[UnusedRun]:
    """Name the rows whose time cannot be.

    Parameters
    ----------
    usable : UsableRows
        The rows.
    prices : RowPrices
        Their prices.
    base_s : FloatArray
        Seconds under the shipped constants, shape (rows,).
    highest : FloatArray
        The physical bound of each constant.

    Returns
    -------
    list of UnusedRun
        In the order of the rows.

    Notes
    -----
    A1. No run is faster than the model's own count of its work with every efficiency at 1, every rate at its link's,
    five times less of every communication exposed and ten times fewer launches.
    A2. A run over fifteen times slower than predicted is a slip: published ones that are truly slow reach ten.
    """
    least_s = prices.seconds(highest)
    refused = []
    for row, seconds, base, least in zip(
        usable.rows, usable.measured_s.tolist(), base_s.tolist(), least_s.tolist(), strict=True
    ):
        reason = _nonsense(seconds, base, least)
        if reason:
            refused.append(UnusedRun(id=row.run.label.id, reason=reason, refused=True))
    return refused


def _nonsense(seconds: float, base_s: float, least_s: float) -> str:
    """Say why one time cannot be, or nothing."""
    if seconds < FASTEST_RATIO * least_s:
        return (
            f"measured {seconds:.4g} s, but with every efficiency at 1 and every rate at its link's the step takes "
            f"{least_s:.4g} s: check the unit, batch, devices and plan"
        )
    if seconds > SLOWEST_FACTOR * base_s:
        return f"measured {seconds:.4g} s is {seconds / base_s:.0f} times the {base_s:.4g} s predicted: check the unit"
    return ""


def units_of(rows: Sequence[ReadyRun], leave_out: str) -> NDArray[np.int64]:
    """Number the units that are left out whole, shape (rows,); a row that names none is a unit of its own.

    Parameters
    ----------
    rows : sequence of ReadyRun
    leave_out : str
        `group`, `source`, `model` or `hardware`.

    Returns
    -------
    NDArray
        Numbers from 0 in order of appearance.
    """
    names = [_unit(row, leave_out) or f"row {place}" for place, row in enumerate(rows)]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([order[name] for name in names], dtype=np.int64)


def _unit(row: ReadyRun, leave_out: str) -> Any:
    """What a row belongs to."""
    label = row.run.label
    if leave_out == "source":
        return label.source.split(";")[0].strip()
    if leave_out == "model":
        return row.run.model
    return row.run.machine.name if leave_out == "hardware" else label.group
