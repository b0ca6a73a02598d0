"""Statistics of validation: errors of some rows, order inside groups, what memory says of runs that ended early."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ap_search.fidelity.records import (
    ErrorStats,
    Feasibility,
    RankedGroup,
    RowResult,
    Slice,
    Status,
    Summary,
    ValidationResult,
)
from ap_search.plan.plan import Plan

FloatArray = NDArray[np.float64]
FEWEST_PLANS = 4
SAFE_ROOM_RATIO = 0.05


def error_stats(errors: Iterable[float | None]) -> ErrorStats | None:
    """Median, bias and 90th percentile of errors; None where there are none."""
    known = np.array([error for error in errors if error is not None], dtype=np.float64)
    if not len(known):
        return None
    return ErrorStats(
        rows=len(known),
        bias_ratio=float(np.median(known)),
        median_abs_error_ratio=float(np.median(np.abs(known))),
        p90_abs_error_ratio=float(np.quantile(np.abs(known), 0.9)),
    )


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: FloatArray = (last - (counts - 1) / 2)[inverse]
    return shared


def spearman(first: FloatArray, second: FloatArray) -> float:
    """Rank correlation of two lists, -1..1; 0 where one of them is constant."""
    one, two = ranks(first), ranks(second)
    one, two = one - one.mean(), two - two.mean()
    scale = float(np.sqrt((one**2).sum() * (two**2).sum()))
    return float((one * two).sum()) / scale if scale else 0.0


def ranked_groups(rows: Sequence[RowResult]) -> tuple[RankedGroup, ...]:
    """Rank the plans of each group that is one job on one machine.

    Parameters
    ----------
    rows : sequence of RowResult
        All rows.

    Returns
    -------
    tuple of RankedGroup
        Groups with one model, cluster, device count, sequence and precision and at least four distinct plans.

    Notes
    -----
    A1. Plans are compared by seconds per token, so that groups whose batch differs can be ranked too.
    A2. Several runs of one plan count once, by their median.
    """
    members = defaultdict(list)
    for row in rows:
        if row.label.group and row.step_error_ratio is not None:
            members[row.label.group].append(row)
    groups = (_ranked(name, found) for name, found in members.items())
    return tuple(group for group in groups if group is not None)


def _job(row: RowResult) -> object:
    """What all runs of a ranking share."""
    run = row.run
    assert run is not None
    return run.model, run.machine, run.devices, run.seq_len, run.precision


def _ranked(name: str, rows: list[RowResult]) -> RankedGroup | None:
    """Rank one group, or say that it is none to be ranked."""
    plans: dict[Plan | None, list[RowResult]] = defaultdict(list)
    for row in rows:
        plans[row.plan].append(row)
    if len(plans) < FEWEST_PLANS or len({_job(row) for row in rows}) > 1:
        return None
    lists = list(plans.values())
    measured = np.array([_per_token(found, lambda row: row.measured_step_time_s) for found in lists])
    predicted = np.array([_per_token(found, lambda row: row.predicted_step_time_s) for found in lists])
    # Of plans that are predicted to be equally fast the slowest counts: nothing tells a user to take the other.
    chosen = int(np.lexsort((-measured, predicted))[0])
    fastest = int(measured.argmin())
    return RankedGroup(
        group=name,
        hardware=rows[0].label.hardware,
        moe=rows[0].label.moe,
        rows=len(rows),
        plans=len(plans),
        spearman=spearman(measured, predicted),
        top1_regret_ratio=float(measured[chosen] / measured[fastest] - 1),
        chosen=lists[chosen][0].label.id,
        fastest=lists[fastest][0].label.id,
    )


def _per_token(rows: list[RowResult], seconds: Callable[[RowResult], float | None]) -> float:
    """Median seconds per token of some runs of one plan."""
    values = []
    for row in rows:
        step_s, run = seconds(row), row.run
        assert step_s is not None and run is not None
        values.append(step_s / (run.global_batch * run.seq_len))
    return float(np.median(values))


def slices(rows: Sequence[RowResult], name: Callable[[RowResult], str]) -> tuple[Slice, ...]:
    """Errors of the priced rows by a name, in alphabetical order."""
    members = defaultdict(list)
    for row in rows:
        if row.status is Status.PRICED:
            members[name(row)].append(row)
    return tuple(
        Slice(
            name=key,
            rows=len(found),
            step=error_stats(row.step_error_ratio for row in found),
            memory=error_stats(row.memory_error_ratio for row in found),
        )
        for key, found in sorted(members.items())
    )


def feasibility(rows: Sequence[RowResult]) -> Feasibility:
    """Compare predicted memory with what became of the runs."""
    known = [row for row in rows if row.room_ratio is not None and row.run is not None]
    oom = [row for row in known if row.run and row.run.measured.oom]
    ran = [row for row in known if not row.ended_early]
    return Feasibility(
        oom_rows=len(oom),
        called_safe=tuple(row.label.id for row in oom if (row.room_ratio or 0.0) > SAFE_ROOM_RATIO),
        ran_rows=len(ran),
        called_full=tuple(row.label.id for row in ran if (row.least_room_ratio or 0.0) < 0),
    )


def source_name(row: RowResult) -> str:
    """A source without the place inside it: what stands before the first semicolon."""
    return row.label.source.split(";")[0].strip() or "not stated"


def summarise(rows: Sequence[RowResult]) -> ValidationResult:
    """Put all statistics of some rows together.

    Parameters
    ----------
    rows : sequence of RowResult
        All rows, priced or not.

    Returns
    -------
    ValidationResult
    """
    groups = ranked_groups(rows)
    return ValidationResult(
        rows=tuple(rows),
        summary=_summary(rows, groups),
        sources=slices(rows, source_name),
        hardware=slices(rows, lambda row: row.label.hardware),
        kinds=slices(rows, lambda row: "moe" if row.label.moe else "dense"),
        software=slices(rows, lambda row: row.software),
        groups=groups,
    )


def _summary(rows: Sequence[RowResult], groups: tuple[RankedGroup, ...]) -> Summary:
    """All rows together."""
    counts = Counter(row.status for row in rows)
    priced = [row for row in rows if row.status is Status.PRICED]
    kinds = defaultdict(list)
    for row in priced:
        for reading in row.memory if not row.ended_early else ():
            kinds[reading.kind.value].append(reading.error_ratio)
    fields = Counter(name for row in priced for name in {line.split(":")[0] for line in row.assumed})
    regrets = [group.top1_regret_ratio for group in groups]
    return Summary(
        rows=len(rows),
        priced=counts[Status.PRICED],
        refused=counts[Status.REFUSED],
        skipped=counts[Status.SKIPPED],
        coverage_ratio=counts[Status.PRICED] / len(rows) if rows else 0.0,
        step=error_stats(row.step_error_ratio for row in priced),
        memory=error_stats(row.memory_error_ratio for row in priced),
        memory_kinds=tuple((kind, stats) for kind, found in sorted(kinds.items()) if (stats := error_stats(found))),
        feasibility=feasibility(rows),
        assumed=tuple(fields.most_common()),
        group_spearman_median=float(np.median([group.spearman for group in groups])) if groups else None,
        group_regret_median_ratio=float(np.median(regrets)) if groups else None,
        group_regret_p90_ratio=float(np.quantile(regrets, 0.9)) if groups else None,
    )
