"""What one call works with: model, cluster, software and job loaded together, all their faults at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ap_search.cost.context import CostContext
from ap_search.errors import Fault, SpecError
from ap_search.fidelity.expectation import expectation
from ap_search.plan.plan import Plan, Sharding
from ap_search.plan.text import names_layout, parse_knob_values, parse_plan
from ap_search.result import ClusterSummary, JobSummary, ModelSummary
from ap_search.result.fidelity import Expectation
from ap_search.search.layouts import layout_maker
from ap_search.search.lplb import lplb_min_max
from ap_search.search.rules import RuleContext, violations
from ap_search.spec.blocks import Model
from ap_search.spec.cluster import load_cluster
from ap_search.spec.job import Job
from ap_search.spec.machine import Machine
from ap_search.spec.make_job import make_job
from ap_search.spec.model import load_model
from ap_search.spec.parameters import params_active, params_mtp, params_total
from ap_search.spec.presets import preset_names
from ap_search.spec.profiles import load_software
from ap_search.spec.software import Software

Chosen = tuple[tuple[str, tuple[int, ...]], ...]
LoadedT = TypeVar("LoadedT")

# What executing a plan fixes: nothing of it enters a figure that is compared.
_EXECUTED_ON = "h100-sxm"
_EXECUTED: dict[str, Any] = {
    "software": "default",
    "chosen": None,
    "precision": None,
    "memory_limit_gib": None,
    "reserve_gib": None,
    "load": "balanced",
    "placement": "contiguous",
    "redundant_experts": 0,
    "target": "any",
}

# Flags that are judged against the model or the cluster, so that nothing can be said of them where that is bad.
_JUDGED_BY_MODEL = ("load", "placement", "redundant_experts", "capacity_factor", "pad_to_capacity")
_JUDGED_BY_CLUSTER = ("precision", "memory_limit_gib", "reserve_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one call works with: rules and prices of one job, and the candidates that the user chose."""

    rules: RuleContext
    cost: CostContext
    cluster: ClusterSummary
    job: JobSummary
    model: ModelSummary
    fidelity: Expectation
    chosen: Chosen


def load_setting(
    *,
    model: str | Path | Model,
    devices: int,
    cluster: str | Path | Machine,
    software: str | Path | Software,
    chosen: Mapping[str, Any] | Sequence[str] | None,
    **job_flags: Any,
) -> Setting:
    """Load everything that a call names.

    Parameters
    ----------
    model, cluster, software : str, Path, or what was loaded from one
        Names of presets, paths, or values that `load_model`, `load_cluster`, `load_software` returned.
    devices : int
        Devices of the job.
    chosen : mapping or sequence of str, optional
        `--set`.
    job_flags
        As for `make_job`.

    Returns
    -------
    Setting

    Raises
    ------
    SpecError
        The faults of the model, the cluster, the software, the job and `--set` together. Flags that are judged against
        a model or a cluster that cannot be read are left for the next try.
    """
    faults: list[Fault] = []
    loaded = _tried(faults, lambda: model if isinstance(model, Model) else load_model(model))
    machine = _tried(faults, lambda: cluster if isinstance(cluster, Machine) else load_cluster(cluster))
    profile = _tried(faults, lambda: software if isinstance(software, Software) else load_software(software))
    job = _tried(faults, lambda: _job(loaded, machine, {"devices": devices, **job_flags}))
    candidates = _tried(faults, lambda: _chosen(chosen))
    if loaded is None or machine is None or profile is None or job is None or candidates is None:
        raise SpecError.of(faults)
    return Setting(
        rules=RuleContext(model=loaded, machine=machine, job=job),
        cost=CostContext(model=loaded, machine=machine, software=profile, job=job, min_max_load=lplb_min_max),
        cluster=_cluster_summary(machine, job),
        job=_job_summary(job, profile),
        model=model_summary(loaded),
        fidelity=expectation(machine, profile, moe=loaded.moe is not None),
        chosen=candidates,
    )


def load_execution(
    *, model: str | Path | Model, devices: int, plan: str, global_batch: int | None, replicas: int, **job_flags: Any
) -> tuple[Setting, Plan]:
    """Load a model and a plan that is to be executed, and refuse a plan that breaks a rule.

    Parameters
    ----------
    model : str, Path or Model
        As for `load_setting`.
    devices : int
        Ranks.
    plan : str
        Axes and knobs, or a plan's name.
    global_batch : int or None
        Sequences per step; by default two micro-batches per stage.
    replicas : int
        Replicas of a hybrid sharded plan.
    job_flags
        As for `make_job`.

    Returns
    -------
    tuple of Setting and Plan

    Raises
    ------
    SpecError
        Bad input, all faults of one kind at once; every rule that the plan breaks.

    Notes
    -----
    A1. The cluster decides no figure that is compared, but where HSDP cuts its replicas: one per scale-up domain.
    """
    loaded = model if isinstance(model, Model) else load_model(model)
    flags = {**_EXECUTED, **job_flags, "model": loaded, "devices": devices}

    def read(batch: int, machine: Machine) -> tuple[Setting, Plan]:
        setting = load_setting(**flags, global_batch=batch, cluster=machine)
        maker = layout_maker(setting.cost)
        return setting, parse_plan(plan, devices=devices, global_batch=batch, default_layout=maker, model=loaded)

    machine = load_cluster(_EXECUTED_ON)
    _, asked = read(global_batch or 1, machine)
    if asked.sharding == Sharding.HSDP:
        size = max(1, asked.dp * asked.cp * asked.tp // replicas)
        level = replace(machine.scale_up, size=size)
        machine = replace(machine, devices_per_domain=size, levels=(level, *machine.levels[1:]))
    setting, asked = read(global_batch or 2 * asked.pp * asked.mbs * asked.dp, machine)
    broken = violations(replace(setting.rules, given_layout=names_layout(plan)), asked)
    if broken:
        raise SpecError.of(Fault(path="--plan", reason=f"{each.rule_id}: {each.message}") for each in broken)
    return setting, asked


def _tried(faults: list[Fault], load: Callable[[], LoadedT]) -> LoadedT | None:
    """Load one part, or note its faults."""
    try:
        return load()
    except SpecError as error:
        faults += error.faults
        return None


def _job(model: Model | None, machine: Machine | None, flags: dict[str, Any]) -> Job:
    """Make the job; a preset stands in for a model or a cluster that cannot be read, to judge the other flags."""
    unjudged = (*(_JUDGED_BY_MODEL if model is None else ()), *(_JUDGED_BY_CLUSTER if machine is None else ()))
    return make_job(
        model=model or load_model(preset_names("models")[0]),
        machine=machine or load_cluster(preset_names("clusters")[0]),
        **{name: value for name, value in flags.items() if name not in unjudged},
    )


def _cluster_summary(machine: Machine, job: Job) -> ClusterSummary:
    """Cluster and devices, as reports show them."""
    return ClusterSummary(
        name=machine.name,
        devices=job.devices,
        device_memory_bytes=machine.device_memory_bytes,
        assumed=machine.assumed,
        provenance=machine.provenance,
    )


def _job_summary(job: Job, profile: Software) -> JobSummary:
    """Settings of the job, as reports show them."""
    return JobSummary(
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        precision=job.precision.value,
        memory_limit_bytes=job.memory_limit_bytes,
        reserve_bytes=job.reserve_bytes,
        software=profile.name,
        load=job.load.name,
        placement=job.placement.value,
        redundant_experts=job.redundant_experts,
        capacity_factor=job.capacity_factor,
        pad_to_capacity=job.pad_to_capacity,
        target=job.target.value,
        assumed=job.assumed,
    )


def model_summary(model: Model) -> ModelSummary:
    """Size and layers of a model, as reports show them.

    Parameters
    ----------
    model : Model
        The model.

    Returns
    -------
    ModelSummary
        Parameters are counts.
    """
    return ModelSummary(
        name=model.name,
        params_total=params_total(model),
        params_active=params_active(model),
        params_mtp=params_mtp(model),
        num_layers=model.num_layers,
        dense_layers=model.dense_layers,
        moe_layers=model.moe_layers,
        num_experts=model.moe.num_experts if model.moe else 0,
        top_k=model.moe.top_k if model.moe else 0,
        warnings=model.warnings,
    )


def _chosen(given: Mapping[str, Any] | Sequence[str] | None) -> Chosen:
    """Read `--set`: a mapping of axis to values, or texts `axis=v,v`; all faults at once."""
    if given is not None and not isinstance(given, Mapping | list | tuple):
        raise SpecError("--set", "expects a mapping or a list of texts", "{'ep': [8, 16]} or ['ep=8,16']")
    pairs = given.items() if isinstance(given, Mapping) else (str(text).partition("=")[::2] for text in given or ())
    chosen: list[tuple[str, tuple[int, ...]]] = []
    faults: list[Fault] = []
    for axis, values in pairs:
        try:
            if values == "":
                raise SpecError(f"--set {axis}", "has no value", f"{str(axis).strip()}=V[,V...], such as ep=8,16")
            chosen.append((str(axis).strip(), parse_knob_values(str(axis).strip(), _joined(values))))
        except SpecError as error:
            faults += error.faults
    if faults:
        raise SpecError.of(faults)
    return tuple(chosen)


def _joined(values: Any) -> str:
    """Write one value or several as the command line does."""
    several = isinstance(values, Sequence) and not isinstance(values, str)
    return ",".join(str(value) for value in values) if several else str(values)
