"""Pricing recorded runs: each with its own software, all plans of one job at once."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.rows import RowPrice, price_rows
from ap_search.cost.step import price_table
from ap_search.errors import SpecError
from ap_search.fidelity.measured import compare_memory, measured_step_s
from ap_search.fidelity.records import RowResult, Status
from ap_search.fidelity.unknown import alternatives, said
from ap_search.plan.plan import Plan
from ap_search.plan.table import PlanTable
from ap_search.plan.text import names_layout, parse_plan, plan_name
from ap_search.search.layouts import LayoutMaker
from ap_search.search.lplb import lplb_min_max
from ap_search.search.rules import RuleContext, violations
from ap_search.spec.job import Job
from ap_search.spec.make_job import make_job
from ap_search.spec.presets import preset_names, remembered
from ap_search.spec.profiles import load_software
from ap_search.spec.run import Run, Unusable, UnusableRun
from ap_search.spec.software import Software
from ap_search.spec.switches import switched

Progress = Callable[[str, float], None]
Makers = dict[object, LayoutMaker]
DEFAULT_SOFTWARE = "default"
_loaded = remembered("software", load_software)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadyRun:
    """A run that can be priced: its place among the rows, its plan, and what it is priced with."""

    place: int
    run: Run
    plan: Plan
    software: Software
    job: Job
    assumed: tuple[str, ...]


def software_for(run: Run, forced: Software | None = None) -> Software:
    """Choose the software profile of a run.

    Parameters
    ----------
    run : Run
        Its own profile, its source, what it says of overlap and CUDA graphs.
    forced : Software, optional
        A profile for every run, taken as it is.

    Returns
    -------
    Software

    Notes
    -----
    A1. In this order: the forced profile; the run's own; the one with the longest of its `recognised_by` words in the
    run's source; the default. All but the forced one take over what the run says of its software.

    Raises
    ------
    SpecError
        When a profile is neither a preset nor a file.
    """
    if forced is not None:
        return forced
    return switched(_loaded(profile_name(run)), run.switches)


def load_forced(software: str | None) -> Software | None:
    """Load the profile that a call forces on every run; None where each run chooses. SpecError where there is none."""
    return None if software is None else _loaded(software)


def profile_name(run: Run) -> str:
    """Name (or path) of the profile that a run states, or that recognises its source; the default's otherwise."""
    return run.software or _recognised(run.label.source)


@lru_cache(maxsize=4096)
def _recognised(source: str) -> str:
    """Name of the profile whose longest word stands in a source."""
    profiles = [_loaded(name) for name in preset_names("software")]
    words = [(len(word), word.lower(), profile.name) for profile in profiles for word in profile.recognised_by]
    found = [(size, name) for size, word, name in words if word in source.lower()]
    return max(found, default=(0, DEFAULT_SOFTWARE))[1]


def price_runs(runs: Sequence[Run | UnusableRun], *, software: str | None, progress: Progress) -> tuple[RowResult, ...]:
    """Price recorded runs.

    Parameters
    ----------
    runs : sequence of Run or UnusableRun
        What the readers gave.
    software : str, optional
        A profile for every run; None lets each run choose.
    progress : callable
        Told what is being done and which share of it is done, 0..1.

    Returns
    -------
    tuple of RowResult
        In the order of `runs`.

    Notes
    -----
    A1. A rule that a plan breaks refuses it, even if it ran: the row then says which.
    """
    forced = load_forced(software)
    results: list[RowResult | None] = [None] * len(runs)
    jobs: dict[object, list[ReadyRun]] = defaultdict(list)
    makers: Makers = {}
    for place, run in enumerate(runs):
        progress("reading plans", place / len(runs))
        if isinstance(run, UnusableRun):
            made: ReadyRun | RowResult = unusable(run)
        else:
            made = ready_run(run, place=place, forced=forced, makers=makers)
        if isinstance(made, RowResult):
            results[place] = made
        else:
            jobs[_key(made)].append(made)
    done = len(runs) - sum(len(ready) for ready in jobs.values())
    for ready in jobs.values():
        progress("pricing runs", done / len(runs))
        for one, result in zip(ready, _priced(ready), strict=True):
            results[one.place] = result
        done += len(ready)
    return tuple(result for result in results if result is not None)


def unusable(run: UnusableRun) -> RowResult:
    """Pass on why a row could not be read."""
    status = Status.REFUSED if run.why is Unusable.REFUSED else Status.SKIPPED
    return RowResult(label=run.label, status=status, reason=run.reason)


def ready_run(run: Run, *, place: int, forced: Software | None, makers: Makers) -> ReadyRun | RowResult:
    """Make job and plan of a run and judge the plan, or say what refuses it.

    Parameters
    ----------
    run : Run
        What was recorded.
    place : int
        Its place among the rows, >= 0.
    forced : Software, optional
        A profile in place of the run's own.
    makers : dict
        Layout makers by model and sequence, shared by the runs of a call; filled here.

    Returns
    -------
    ReadyRun or RowResult
        The row says why there is no price.

    Notes
    -----
    A1. Keys of the plan that nobody wrote down have the fastest values that fit.
    """
    tried = [_judged(each, place, forced, makers) for each in alternatives(run)]
    legal = [each for each in tried if isinstance(each, ReadyRun)]
    if len(legal) < 2:
        return (legal or tried)[0]
    price = price_rows(run_context(legal[0]), PlanTable.from_plans([each.plan for each in legal]))
    needed = np.array([sizes.max() for sizes in price.stage_bytes])
    fits = needed <= legal[0].job.memory_limit_bytes
    # Where nothing fits, what needs least is as near to the run as the model comes.
    best = int(np.where(fits, price.step_s, np.inf).argmin() if fits.any() else needed.argmin())
    return replace(legal[best], assumed=(*legal[best].assumed, *said(run, legal[best].run)))


def _judged(run: Run, place: int, forced: Software | None, makers: Makers) -> ReadyRun | RowResult:
    """Make job and plan of a run whose plan is whole, and judge it; runs that drop tokens pad to capacity besides.

    So do the recipes of Megatron.
    """
    try:
        software = software_for(run, forced)
        job = make_job(
            machine=run.machine,
            model=run.model,
            devices=run.devices,
            global_batch=run.global_batch,
            seq_len=run.seq_len,
            precision=run.precision,
            load=run.load,
            capacity_factor=run.capacity_factor,
            pad_to_capacity=run.capacity_factor is not None or None,
        )
        key = (run.model, run.seq_len, software.fills_stages)
        maker = makers.setdefault(key, LayoutMaker(run.model, run.seq_len, even=not software.fills_stages))
        plan = parse_plan(
            run.plan,
            devices=run.devices,
            global_batch=run.global_batch,
            default_layout=maker,
            model=run.model,
        )
    except SpecError as error:
        return _refused(run, "; ".join(str(fault) for fault in error.faults))
    given = names_layout(run.plan) or software.fills_stages
    rules = RuleContext(model=run.model, machine=run.machine, job=job, given_layout=given)
    broken = violations(rules, plan)
    if broken:
        return _refused(run, "; ".join(f"{each.rule_id}: {each.message}" for each in broken))
    assumed = run.assumed
    if not names_layout(run.plan) and not plan.layout.even:
        how = f"filled in order as {software.name} does" if software.fills_stages else "balanced by FLOPs"
        assumed = (*assumed, f"stage_layers: not stated, {how}: {plan.layout.stage_layers}")
    return ReadyRun(place=place, run=run, plan=plan, software=software, job=job, assumed=assumed)


def _refused(run: Run, reason: str) -> RowResult:
    """Make the row of a run that a rule or a reader refuses."""
    return RowResult(label=run.label, status=Status.REFUSED, reason=reason, run=run, assumed=run.assumed)


def _key(ready: ReadyRun) -> object:
    """What runs must share to be priced in one table."""
    run, job = ready.run, ready.job
    shape = (job.devices, job.global_batch, job.seq_len, job.precision, job.capacity_factor, run.load)
    return run.model, run.machine, ready.software, shape


def _priced(ready: list[ReadyRun]) -> list[RowResult]:
    """Price runs of one job."""
    price = price_rows(run_context(ready[0]), PlanTable.from_plans([one.plan for one in ready]))
    return [_result(one, price, row) for row, one in enumerate(ready)]


def run_context(ready: ReadyRun) -> CostContext:
    """Model, machine, software and job that runs of one job are priced from."""
    return CostContext(
        model=ready.run.model,
        machine=ready.run.machine,
        software=ready.software,
        job=ready.job,
        min_max_load=lplb_min_max,
    )


def step_seconds(runs: Sequence[ReadyRun]) -> NDArray[np.float64]:
    """Seconds of a step of runs that are ready, without parts or memory, in their order.

    Parameters
    ----------
    runs : sequence of ReadyRun
        Each with its own machine and software.

    Returns
    -------
    NDArray
        Seconds, shape (runs,); what `price_runs` predicts.
    """
    seconds, jobs = np.empty(len(runs)), defaultdict(list)
    for place, run in enumerate(runs):
        jobs[_key(run)].append(place)
    for places in jobs.values():
        table = PlanTable.from_plans([runs[place].plan for place in places])
        seconds[places] = price_table(run_context(runs[places[0]]), table).step_s
    return seconds


def _result(one: ReadyRun, price: RowPrice, row: int) -> RowResult:
    """Set what one run measured beside its price."""
    run, job = one.run, one.job
    # A schedule that is priced as another one keeps other micro-batches in flight.
    other = any(line.startswith("schedule:") for line in one.assumed)
    compared = (
        compare_memory(
            reading,
            price.stage_bytes[row],
            reserve_bytes=job.reserve_bytes,
            fragmentation_ratio=one.software.fragmentation_ratio,
        )
        for reading in (() if other else run.measured.memory)
    )
    return RowResult(
        label=run.label,
        status=Status.PRICED,
        run=run,
        plan=one.plan,
        plan_name=plan_name(one.plan),
        software=one.software.name,
        assumed=one.assumed,
        measured_step_time_s=measured_step_s(run, one.plan),
        predicted_step_time_s=float(price.step_s[row]),
        time=price.breakdown(row),
        memory=tuple(found for found in compared if found is not None),
        fullest_bytes=float(price.stage_bytes[row].max()),
        limit_bytes=job.memory_limit_bytes,
    )
