"""The public functions: validate files of recorded runs, or one run's log."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ap_search.errors import SpecError
from ap_search.fidelity import standing
from ap_search.fidelity.price import Progress, price_runs
from ap_search.fidelity.records import ValidationResult
from ap_search.fidelity.select import ONLY, Selection, select
from ap_search.fidelity.statistics import summarise
from ap_search.plan.text import parse_plan
from ap_search.search.layouts import LayoutMaker
from ap_search.spec.cluster import load_cluster
from ap_search.spec.job import Job
from ap_search.spec.make_job import make_job
from ap_search.spec.megatron_log import MegatronLog, log_memory, read_megatron_log
from ap_search.spec.model import load_model
from ap_search.spec.run import Measured, MemoryReading, Run, RunLabel, UnusableRun
from ap_search.spec.runs import load_runs, run_presets

DEFAULT_CLUSTER = "h100-sxm"


def validate(
    files: Sequence[str | Path] = (),
    *,
    quality: str | Iterable[str] | None = None,
    hardware: str | None = None,
    group: str | None = None,
    only: str | None = None,
    source: str | None = None,
    software: str | Path | None = None,
    best_plans: bool = False,
    progress: Progress | None = None,
) -> ValidationResult:
    """Price recorded runs, and compare seconds of a step and bytes of memory with what was measured.

    Parameters
    ----------
    files : sequence of str or Path
        Files of recorded runs (docs/guides/your-own-runs.md); the sets that ship with the package when empty.
    quality : str or iterable of str, optional
        Grades to keep: `"A,B"`.
    hardware, group, source : str, optional
        Keep runs in whose cluster or device, group, source this text stands, in any case.
    only : str, optional
        `moe` or `dense`.
    software : str or Path, optional
        A profile for every run; otherwise each run's own, or the one that recognises its source.
    best_plans : bool
        Also search each ranked group's job, and say where the best measured plan stands: seconds per group.
    progress : callable, optional
        Called with what is being done and which share of it is done, 0..1.

    Returns
    -------
    ValidationResult
        One record per run, statistics, ranked groups.

    Raises
    ------
    SpecError
        When a file cannot be read, or no run is left.
    """
    tell = progress or _quiet
    kept = selected_runs(
        files, quality=quality, hardware=hardware, group=group, only=only, source=source, progress=tell
    )
    profile = None if software is None else str(software)
    result = summarise(price_runs(kept, software=profile, progress=tell))
    if not best_plans:
        return result
    found = standing.best_plans(result.groups, result.rows, software=profile, progress=tell)
    return replace(result, best_plans=found)


def selected_runs(
    files: Sequence[str | Path],
    *,
    quality: str | Iterable[str] | None,
    hardware: str | None,
    group: str | None,
    only: str | None,
    source: str | None,
    progress: Progress,
) -> tuple[Run | UnusableRun, ...]:
    """Read files of recorded runs, and keep those that a call asks for; arguments as `validate`.

    Raises
    ------
    SpecError
        When a file cannot be read, or no run is left.
    """
    chosen = Selection(
        quality=_words(quality),
        hardware=hardware or "",
        group=group or "",
        only=_only(only),
        source=source or "",
    )
    runs: list[Run | UnusableRun] = []
    paths = list(files) or list(run_presets())
    for place, path in enumerate(paths):
        progress("reading runs", place / len(paths))
        runs += load_runs(path)
    kept = select(runs, chosen)
    if not kept:
        raise SpecError("recorded runs", f"no run of {len(runs)} is left by the filters")
    return kept


def _words(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Words of a text joined by commas, or of a list."""
    words = given.split(",") if isinstance(given, str) else given or ()
    return tuple(word.strip() for word in words if word.strip())


def _only(given: str | None) -> str:
    """Check the kind of models to keep."""
    if given is not None and given not in ONLY:
        raise SpecError("--only", f"is {given!r}", ", ".join(ONLY))
    return given or ""


def _quiet(what: str, share: float) -> None:
    """Report nothing."""


def validate_log(
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
) -> ValidationResult:
    """Price the run that a Megatron-LM log is of, and compare it with the log: seconds of a step, bytes per stage.

    Parameters
    ----------
    log : str or Path
        The log; its interval lines give the time, its memory lines the peaks.
    model, cluster : str or Path
        Preset, YAML, or Hugging Face config.json (the model).
    devices : int
        Devices of the run, >= 1.
    plan : str
        The plan as `--plan` takes it.
    global_batch, seq_len : int, optional
        Sequences per step (the log's when not given) and tokens per sequence (4096).
    precision : str, optional
        `bf16`, `fp8` or `mxfp8`.
    software : str or Path, optional
        A profile; the one for Megatron when not given.

    Returns
    -------
    ValidationResult
        One row.

    Raises
    ------
    SpecError
        When the log or another input has faults.
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
    return summarise(price_runs([run], software=None if software is None else str(software), progress=_quiet))


def log_run(
    log: str | Path,
    *,
    model: str | Path,
    devices: int,
    plan: str,
    cluster: str | Path,
    global_batch: int | None,
    seq_len: int | None,
    precision: str | None,
) -> Run:
    """Make a recorded run of a Megatron-LM log and of what the log does not say; arguments as `validate_log`.

    Raises
    ------
    SpecError
        When the log or another input has faults.
    """
    path = Path(log)
    read = read_megatron_log(path)
    loaded, machine = load_model(model), load_cluster(cluster)
    batch = global_batch if global_batch is not None else read.global_batch
    job = make_job(
        machine=machine,
        model=loaded,
        devices=devices,
        global_batch=batch,
        seq_len=seq_len,
        precision=precision,
    )
    run = Run(
        label=RunLabel(id=path.name, source="log of Megatron-LM", hardware=machine.name, moe=loaded.moe is not None),
        model=loaded,
        machine=machine,
        devices=job.devices,
        plan=plan,
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        precision=job.precision.value,
        measured=Measured(step_time_s=read.step_time_s),
        assumed=_assumed(job, batch_is_logged=global_batch is None and read.global_batch is not None),
    )
    return replace(run, measured=replace(run.measured, memory=_memory(read, run)))


def _assumed(job: Job, *, batch_is_logged: bool) -> tuple[str, ...]:
    """Name what neither the call nor the log states."""
    values = {"global_batch": job.global_batch, "seq_len": job.seq_len, "precision": job.precision.value}
    lines = [f"{name}: not stated, {value}" for name, value in values.items() if name in job.assumed]
    return (*(["global_batch: the log's"] if batch_is_logged else []), *lines)


def _memory(log: MegatronLog, run: Run) -> tuple[MemoryReading, ...]:
    """Peaks of the log by the stages of the plan."""
    maker = LayoutMaker(run.model, run.seq_len)
    plan = parse_plan(
        run.plan, devices=run.devices, global_batch=run.global_batch, default_layout=maker, model=run.model
    )
    return log_memory(log, devices=run.devices, pp=plan.pp)
