"""The public function: fit the constants that recorded runs identify, judge them, write them down."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ap_search.calibration.files import Reserve, file_text, measured_reserve
from ap_search.calibration.fit import BoolArray, Fit, Problem, group_weights, scaled_shares
from ap_search.calibration.fit import fit as fit_constants
from ap_search.calibration.judge import Judged, Trial, choose, cross_validate, fidelity, fit_on, left_out_bands
from ap_search.calibration.prices import FloatArray, RowPrices, again, surrogate
from ap_search.calibration.reasons import unidentified
from ap_search.calibration.records import CalibrationResult, ConstantResult, Fate, Outlier
from ap_search.calibration.rows import (
    UsableRows,
    bounds,
    check_unmixed,
    refuse_nonsense,
    row_prices,
    units_of,
    usable_rows,
)
from ap_search.errors import SpecError
from ap_search.fidelity.price import Progress
from ap_search.fidelity.validate import DEFAULT_CLUSTER, log_run, selected_runs
from ap_search.spec.band import Band
from ap_search.spec.constants import CONSTANTS, Constant, Content, Home, values_of
from ap_search.spec.run import Run, UnusableRun

LEAVE_OUT = ("group", "source", "model", "hardware")
FIT = ("cluster", "software")
# A row is named as an outlier beyond three scatters, and never under 15 %.
_OUTLIER_SCATTERS, _OUTLIER_RATIO = 3.0, 0.15


def calibrate(
    files: Sequence[str | Path],
    *,
    cluster: str | Path | None = None,
    software: str | Path | None = None,
    fit: str | Iterable[str] = FIT,
    leave_out: str = "group",
    quality: str | Iterable[str] | None = None,
    hardware: str | None = None,
    group: str | None = None,
    only: str | None = None,
    source: str | None = None,
    date: str = "",
    progress: Progress | None = None,
) -> CalibrationResult:
    """Fit the few constants of a cluster and of a software profile that recorded runs identify (seconds of a step).

    Parameters
    ----------
    files : sequence of str or Path
        Files of recorded runs (docs/guides/your-own-runs.md), or names of sets that ship.
    cluster, software : str or Path, optional
        The files to start from; otherwise the cluster that the runs name, and the profile of each run.
    fit : str or iterable of str
        Which constants: of `cluster`, of `software`, or of both.
    leave_out : str
        What is left out whole when the fit is judged: `group`, `source`, `model` or `hardware`.
    quality, hardware, group, only, source
        Which runs, as for `validate`.
    date : str
        Written into the files beside what they were calibrated on.
    progress : callable, optional
        Called with what is being done and which share of it is done, 0..1.

    Returns
    -------
    CalibrationResult
        Each constant with its fate, errors before and after, the files' texts.

    Raises
    ------
    SpecError
        When a file has faults, no run is of use, or runs of several machines are to become one file.

    Source: docs/guides/calibrate.md.
    """
    tell = progress or _quiet
    wanted = _Wanted(
        cluster=cluster,
        software=software,
        homes=_homes(fit),
        leave_out=_known(leave_out, LEAVE_OUT, "leave_out"),
        files=tuple(Path(file).name for file in files),
        date=date,
    )
    runs = selected_runs(
        files, quality=quality, hardware=hardware, group=group, only=only, source=source, progress=tell
    )
    return _calibrated(runs, wanted, tell)


def calibrate_log(
    log: str | Path,
    *,
    model: str | Path,
    devices: int,
    plan: str,
    cluster: str | Path = DEFAULT_CLUSTER,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    software: str | Path | None = None,
    fit: str | Iterable[str] = FIT,
    date: str = "",
    progress: Progress | None = None,
) -> CalibrationResult:
    """Set the level of a stack (its speed against the model's, a ratio) by the log of one Megatron-LM run.

    Parameters
    ----------
    log, model, devices, plan, cluster, global_batch, seq_len, precision, software
        As for `validate_log`.
    fit, date, progress
        As for `calibrate`.

    Returns
    -------
    CalibrationResult

    Raises
    ------
    SpecError
        When the log or another input has faults.

    Source: docs/guides/calibrate.md.
    """
    run = log_run(
        log,
        model=model,
        devices=devices,
        plan=plan,
        cluster=cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
    )
    wanted = _Wanted(
        cluster=cluster,
        software=software,
        homes=_homes(fit),
        leave_out=LEAVE_OUT[0],
        files=(Path(log).name,),
        date=date,
    )
    return _calibrated([run], wanted, progress or _quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What a call asks for, beside its runs."""

    cluster: str | Path | None
    software: str | Path | None
    homes: set[Home]
    leave_out: str
    files: tuple[str, ...]
    date: str


def _calibrated(runs: Iterable[Run | UnusableRun], wanted: _Wanted, tell: Progress) -> CalibrationResult:
    """Fit, judge, write."""
    cluster, software, homes, leave_out = wanted.cluster, wanted.software, wanted.homes, wanted.leave_out
    usable = usable_rows(runs)
    check_unmixed(usable, cluster=cluster, software=software, homes=homes)
    usable, prices = _sensible(usable, row_prices(usable, cluster=cluster, software=software), tell)
    trial, base_s = _trial(usable, prices, homes=homes, leave_out=leave_out, tell=tell)
    several = int(trial.units.max()) > 0
    judged = (
        cross_validate(trial, leave_out=leave_out, base_s=base_s, tell=lambda share: tell("cross-validating", share))
        if several
        else None
    )
    return _result(trial, judged, base_s=base_s, files=wanted.files, date=wanted.date)


def _homes(asked: str | Iterable[str]) -> set[Home]:
    """Read which constants to fit."""
    words = [asked] if isinstance(asked, str) else list(asked)
    return {Home(_known(word, FIT, "fit")) for word in words}


def _known(word: str, words: Sequence[str], name: str) -> str:
    """Check one word of a list."""
    if word not in words:
        raise SpecError(name, f"is {word!r}", " ".join(words))
    return word


def _quiet(what: str, share: float) -> None:
    """Report nothing."""


def _sensible(usable: UsableRows, prices: RowPrices, tell: Progress) -> tuple[UsableRows, RowPrices]:
    """Leave out the rows whose time cannot be; refuse the files where nothing else is left."""
    tell("pricing runs", 0.0)
    base = prices.seconds(np.zeros(len(prices.constants)))
    refused = refuse_nonsense(usable, prices, base_s=base, highest=bounds(prices)[1])
    if len(refused) == len(usable.rows):
        raise SpecError.of([fault for each in refused for fault in SpecError(each.id, each.reason).faults])
    names = {each.id for each in refused}
    places = [place for place, row in enumerate(usable.rows) if row.run.label.id not in names]
    kept = usable.of(places, refused)
    return kept, replace(
        prices,
        rows=kept.rows,
        cluster_of=tuple(prices.cluster_of[place] for place in places),
        profile_of=tuple(prices.profile_of[place] for place in places),
    )


def _trial(
    usable: UsableRows, prices: RowPrices, *, homes: set[Home], leave_out: str, tell: Progress
) -> tuple[Trial, FloatArray]:
    """Linearise the prices, twice, and say which constants may move; with seconds under the shipped constants."""
    lowest, highest = bounds(prices)
    level = _level(prices.constants, homes)
    full = np.array([constant.home in homes and not constant.level for constant in prices.constants]) | level
    full &= highest > lowest
    groups = units_of(usable.rows, "group")
    near = surrogate(prices, np.zeros(len(full)), movable=full, tell=_part(tell, 0))
    problem = Problem(
        surrogate=near,
        log_measured=np.log(usable.measured_s),
        weights=group_weights(groups),
        spreads=np.array([constant.spread_ratio for constant in prices.constants]),
        level=level,
        lowest=lowest,
        highest=highest,
    )
    at = fit_constants(problem, full).log_gains
    problem = replace(problem, surrogate=again(prices, near, at, tell=_part(tell, 1)))
    units = units_of(usable.rows, leave_out)
    trial = Trial(
        usable=usable, prices=prices, problem=problem, units=units, groups=groups, level=level & full, full=full
    )
    return trial, near.base_s


def _level(constants: Sequence[Constant], homes: set[Home]) -> BoolArray:
    """Which constant stands for the level: the profile's where it is fitted, since the cluster's means the same."""
    home = Home.SOFTWARE if Home.SOFTWARE in homes else Home.CLUSTER
    return np.array([constant.level and constant.home is home for constant in constants])


def _part(tell: Progress, turn: int) -> Callable[[float], None]:
    """Progress of one of two passes."""
    return lambda share: tell("slopes of the constants", (turn + share) / 2)


def _result(
    trial: Trial, judged: Judged | None, *, base_s: FloatArray, files: tuple[str, ...], date: str
) -> CalibrationResult:
    """Fit on all rows what was chosen, and put the answer together."""
    usable, prices = trial.usable, trial.prices
    chosen, statement = choose(judged.found if judged else None)
    every = np.arange(len(usable.rows))
    found = fit_on(trial, every, trial.level if chosen == "level" else trial.full)
    after_s = prices.seconds(found.log_gains)
    before, fitted = fidelity(usable, base_s), fidelity(usable, after_s)
    if chosen != "none" and not found.kept.any():
        chosen, statement = "none", "not adopted: the runs identify no constant"
    constants = _constants(trial, found, chosen)
    origin = f"calibrated on {len(usable.rows)} runs of {', '.join(files)}{f', {date}' if date else ''}"
    reserve = measured_reserve(usable)
    singular = _singular_values(trial, found)
    texts: dict[Home, str] = {}
    if chosen != "none":
        bands = left_out_bands(usable, judged.seconds[chosen]) if judged else {}
        texts = {home: _text(trial, found, home, origin=origin, reserve=reserve, bands=bands) for home in Home}
    return CalibrationResult(
        files=files,
        clusters=tuple(sorted(set(prices.cluster_of))),
        profiles=tuple(sorted(set(prices.profile_of))),
        rows=len(usable.rows),
        groups=int(trial.groups.max()) + 1,
        chosen=chosen,
        statement=statement,
        constants=constants,
        combinations=int((singular >= 1.0).sum()),
        singular_values=tuple(float(f"{value:.6g}") for value in singular),
        scatter_ratio=found.scatter,
        before=before,
        fitted=before if chosen == "none" else fitted,
        cross_validation=judged.found if judged else None,
        unused=usable.unused,
        outliers=_outliers(usable, after_s, found.scatter),
        reserve_bytes=reserve.reserve_bytes if texts.get(Home.CLUSTER) else None,
        reserve_statement=reserve.statement,
        cluster_text=texts.get(Home.CLUSTER, ""),
        software_text=texts.get(Home.SOFTWARE, ""),
    )


def _singular_values(trial: Trial, found: Fit) -> FloatArray:
    """How strongly the runs see each combination of the constants that may move, largest first."""
    return np.asarray(np.linalg.svd(scaled_shares(trial.problem, found)[:, trial.full], compute_uv=False))


def _text(trial: Trial, found: Fit, home: Home, *, origin: str, reserve: Reserve, bands: Mapping[str, Band]) -> str:
    """The file of one kind, where it was fitted."""
    if not any(movable and constant.home is home for constant, movable in zip(CONSTANTS, trial.full, strict=True)):
        return ""
    kept = reserve if home is Home.CLUSTER else None
    return file_text(trial.prices, found.log_gains, home=home, origin=origin, reserve=kept, bands=bands)


def _constants(trial: Trial, found: Fit, chosen: str) -> tuple[ConstantResult, ...]:
    """Say of each constant of the fitted files what became of it."""
    problem, prices = trial.problem, trial.prices
    names = tuple(constant.name for constant in prices.constants)
    reasons = unidentified(problem, found, names=names, groups=trial.groups)
    gains = found.log_gains if chosen != "none" else np.zeros(len(names))
    shares = problem.surrogate.shares(found.log_gains).max(axis=0)
    after = prices.files(gains)
    results = []
    for place in np.flatnonzero(trial.full).tolist():
        constant, kept = prices.constants[place], bool(found.kept[place])
        fate = Fate.NOT_IDENTIFIED if not kept else Fate.NOT_ADOPTED if chosen == "none" else Fate.FITTED
        reason = reasons[place]
        if not kept and chosen == "level" and not constant.level:
            reason = "only the level was set"
        results.append(
            ConstantResult(
                name=constant.name,
                home=constant.home,
                keys=constant.keys,
                effect=constant.effect,
                fate=fate,
                before=_value(constant, prices.clusters, prices.profiles),
                after=_value(constant, *after),
                gain_ratio=float(np.exp(gains[place])),
                known_ratio=float(found.known_ratio[place]),
                largest_share_ratio=float(shares[place]),
                at_bound=kept and bool(found.log_gains[place] in (problem.lowest[place], problem.highest[place])),
                reason=reason,
            )
        )
    return tuple(results)


def _value(constant: Constant, clusters: Mapping[str, Content], profiles: Mapping[str, Content]) -> float:
    """Value of a constant's first key in the first file that has it."""
    files = clusters if constant.home is Home.CLUSTER else profiles
    return next(value for content in files.values() for key in constant.keys for value in values_of(content, key))


def _outliers(usable: UsableRows, predicted_s: FloatArray, scatter: float) -> tuple[Outlier, ...]:
    """Runs that the fitted constants miss, worst first."""
    errors = predicted_s / usable.measured_s - 1
    far = np.abs(np.log1p(errors)) > max(_OUTLIER_SCATTERS * scatter, _OUTLIER_RATIO)
    order = np.argsort(-np.abs(np.log1p(errors)), kind="stable")
    return tuple(
        Outlier(id=usable.rows[place].run.label.id, error_ratio=float(errors[place])) for place in order if far[place]
    )
