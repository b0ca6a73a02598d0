"""The public names: search, estimate and what they load; the command line calls these too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from ap_search.cost.alternatives import with_imbalance
from ap_search.cost.context import CostContext
from ap_search.errors import Fault, SpecError
from ap_search.fidelity.validate import validate, validate_log
from ap_search.limits import MAX_TOP
from ap_search.plan.plan import Plan
from ap_search.plan.text import knob_text, names_layout, parse_knob_values, parse_plan
from ap_search.result import (
    ClusterRow,
    ClusterSummary,
    JobSummary,
    ModelSummary,
    Optimality,
    PricedPlan,
    SearchResult,
    SearchSummary,
    SoftwareRow,
)
from ap_search.search.domains import search_domains
from ap_search.search.engine import Progress, run_search
from ap_search.search.explain import explain_empty
from ap_search.search.explanation import explain_plan
from ap_search.search.layouts import LayoutMaker
from ap_search.search.levers import price_judged
from ap_search.search.lplb import lplb_min_max
from ap_search.search.rules import RuleContext, violations
from ap_search.spec.blocks import Model
from ap_search.spec.cluster import load_cluster
from ap_search.spec.make_job import make_job
from ap_search.spec.model import load_model
from ap_search.spec.parameters import params_active, params_mtp, params_total
from ap_search.spec.presets import preset_names
from ap_search.spec.profiles import load_software

__all__ = [
    "estimate",
    "list_clusters",
    "list_models",
    "list_software",
    "load_cluster",
    "load_model",
    "load_software",
    "search",
    "validate",
    "validate_log",
]

DEFAULT_CLUSTER = "h100-sxm"
DEFAULT_SOFTWARE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What one call works with: rules and prices of one job."""

    rules: RuleContext
    cost: CostContext
    cluster: ClusterSummary
    job: JobSummary
    model: ModelSummary


def _setting(
    *, model: str | Path, devices: int, cluster: str | Path, software: str | Path, **job_flags: Any
) -> _Setting:
    """Load everything that a call names, all faults of the job at once."""
    loaded, machine, profile = load_model(model), load_cluster(cluster), load_software(software)
    job = make_job(machine=machine, model=loaded, devices=devices, **job_flags)
    return _Setting(
        rules=RuleContext(model=loaded, machine=machine, job=job),
        cost=CostContext(model=loaded, machine=machine, software=profile, job=job, min_max_load=lplb_min_max),
        cluster=ClusterSummary(
            name=machine.name,
            devices=job.devices,
            device_memory_bytes=machine.device_memory_bytes,
            assumed=machine.assumed,
            provenance=machine.provenance,
        ),
        job=JobSummary(
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
        ),
        model=_model_summary(loaded),
    )


def _model_summary(model: Model) -> ModelSummary:
    """Size and layers of a model, as reports show them."""
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


def _chosen(given: Mapping[str, Any] | Sequence[str] | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
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


def _keep_to(plan: Plan, chosen: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    """Refuse a plan outside the user's own candidates."""
    faults = [
        Fault(path=f"--plan {axis}", reason="is outside --set", legal=" ".join(knob_text(axis, v) for v in values))
        for axis, values in chosen
        if int(getattr(plan, axis)) not in values
    ]
    if faults:
        raise SpecError.of(faults)


def _quiet(what: str, share: float) -> None:
    """Report nothing."""


def search(
    *,
    model: str | Path,
    devices: int,
    cluster: str | Path = DEFAULT_CLUSTER,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    memory_limit_gib: float | None = None,
    reserve_gib: float | None = None,
    software: str | Path = DEFAULT_SOFTWARE,
    load: str | Path = "balanced",
    placement: str = "contiguous",
    redundant_experts: int = 0,
    capacity_factor: float | None = None,
    pad_to_capacity: bool = False,
    target: str = "any",
    explain: bool = False,
    top: int = 10,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the parallel strategies that train a model fastest on a cluster (seconds per step, bytes per device).

    Parameters
    ----------
    model : str or Path
        Preset name, YAML of ours, or a Hugging Face config.json.
    devices : int
        Devices of the job, >= 1.
    cluster : str or Path
        Preset name or YAML.
    global_batch, seq_len : int, optional
        Sequences per step (1024) and tokens per sequence (4096).
    precision : str, optional
        `bf16`, `fp8` or `mxfp8`.
    set : mapping or sequence of str, optional
        Candidates per axis or knob: `{"ep": [8, 16]}` or `["ep=8,16"]`; nothing outside them is returned.
    memory_limit_gib, reserve_gib : float, optional
        What one device may hold, and what of it is kept free; GiB.
    software : str or Path
        Profile of the trainer's software.
    load : str or Path
        Tokens per expert: `balanced`, `zipf:A`, or a histogram file.
    placement : str
        Which ranks hold which experts: `contiguous`, `eplb`, `lplb`, `ideal`.
    redundant_experts : int
        Copies of experts per MoE layer, for a placement that balances.
    capacity_factor, pad_to_capacity : float, optional, and bool
        Token copies that an expert takes over its balanced share (dropless), and whether its input is padded to it.
    target : str
        Only plans that this framework can run: `any`, `megatron`, `torchtitan`, `hyperparallel`, `deepspeed`.
    explain : bool
        Whether to list the communication groups of the best plan and the steps of its slowest MoE layer.
    top : int
        Plans returned, 1 to 1000.
    progress : callable, optional
        Called with what is being done and which share of it is done, 0..1.

    Returns
    -------
    SearchResult
        Ranked plans, what was rejected and why; where nothing fits, what stands in the way and what would help.

    Raises
    ------
    SpecError
        Bad input, all faults at once.

    Source: docs/cost-model/, docs/constraints.md.
    """
    started = perf_counter()
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MAX_TOP:
        raise SpecError("--top", f"{top!r} is not a number of plans", f"1 to {MAX_TOP}")
    setting = _setting(
        model=model,
        devices=devices,
        cluster=cluster,
        software=software,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        memory_limit_gib=memory_limit_gib,
        reserve_gib=reserve_gib,
        load=load,
        placement=placement,
        redundant_experts=redundant_experts,
        capacity_factor=capacity_factor,
        pad_to_capacity=pad_to_capacity,
        target=target,
    )
    domains = search_domains(setting.rules, _chosen(set))
    rules, cost, tell = setting.rules, setting.cost, progress or _quiet
    ranking = run_search(rules, cost, domains, top=top, progress=tell)
    empty = None if ranking.plans else explain_empty(rules, cost, domains, ranking=ranking, progress=tell)
    return SearchResult(
        model=setting.model,
        cluster=setting.cluster,
        job=setting.job,
        search=SearchSummary(
            candidates=ranking.candidates,
            priced=len(ranking.table),
            feasible=ranking.feasible,
            elapsed_s=perf_counter() - started,
            optimality=ranking.optimality,
            rejections=ranking.rejections,
        ),
        plans=ranking.plans,
        infeasibility=empty,
        explanation=explain_plan(setting.cost, ranking.plans[0]) if explain and ranking.plans else None,
    )


def estimate(
    *,
    model: str | Path,
    devices: int,
    plan: str,
    cluster: str | Path = DEFAULT_CLUSTER,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    memory_limit_gib: float | None = None,
    reserve_gib: float | None = None,
    software: str | Path = DEFAULT_SOFTWARE,
    load: str | Path = "balanced",
    placement: str = "contiguous",
    redundant_experts: int = 0,
    capacity_factor: float | None = None,
    pad_to_capacity: bool = False,
    target: str = "any",
    explain: bool = False,
) -> SearchResult:
    """Price one plan: seconds per step, bytes per device and stage, and every rule that it breaks.

    Parameters
    ----------
    model, devices, cluster, global_batch, seq_len, precision, memory_limit_gib, reserve_gib, software, load
        As for `search`.
    placement, redundant_experts, capacity_factor, pad_to_capacity, target, explain
        As for `search`.
    plan : str
        `tp=2,pp=4,ep=8`, or a plan's short name as printed.
    set : mapping or sequence of str, optional
        Candidates that the plan must keep to; outside them it is refused as bad input.

    Returns
    -------
    SearchResult
        With one plan; `feasible` is false where it breaks a rule or does not fit, and it is priced all the same.

    Raises
    ------
    SpecError
        Bad input, all faults at once.

    Source: docs/cost-model/, docs/constraints.md.
    """
    started = perf_counter()
    setting = _setting(
        model=model,
        devices=devices,
        cluster=cluster,
        software=software,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        memory_limit_gib=memory_limit_gib,
        reserve_gib=reserve_gib,
        load=load,
        placement=placement,
        redundant_experts=redundant_experts,
        capacity_factor=capacity_factor,
        pad_to_capacity=pad_to_capacity,
        target=target,
    )
    priced = _price_named(setting, plan, _chosen(set))
    return SearchResult(
        model=setting.model,
        cluster=setting.cluster,
        job=setting.job,
        search=SearchSummary(
            candidates=1,
            priced=1,
            feasible=int(priced.feasible),
            elapsed_s=perf_counter() - started,
            optimality=Optimality(statement="one plan was priced, none compared", exhaustive=False),
        ),
        plans=(priced,),
        explanation=explain_plan(setting.cost, priced) if explain else None,
    )


def _price_named(setting: _Setting, name: str, chosen: tuple[tuple[str, tuple[int, ...]], ...]) -> PricedPlan:
    """Price the plan that a text names, with every rule that it breaks."""
    job, model = setting.cost.job, setting.cost.model
    maker = LayoutMaker(model, job.seq_len)
    plan = parse_plan(
        name, devices=job.devices, global_batch=job.global_batch, default_layout=maker.balanced, model=model
    )
    _keep_to(plan, chosen)
    broken = violations(replace(setting.rules, explicit_layout=False, given_layout=names_layout(name)), plan)
    priced = price_judged(setting.rules, setting.cost, plan, broken=broken)
    return with_imbalance(setting.cost, priced)


def list_models() -> tuple[ModelSummary, ...]:
    """Read the model presets: sizes and layers, in order of name."""
    return tuple(_model_summary(load_model(name)) for name in preset_names("models"))


def list_clusters() -> tuple[ClusterRow, ...]:
    """Read the cluster presets: device, memory, peaks and links, in order of name."""
    rows = []
    for name in preset_names("clusters"):
        machine = load_cluster(name)
        rows.append(
            ClusterRow(
                name=name,
                device=machine.device,
                memory_bytes=machine.device_memory_bytes,
                peak_bf16_flops_per_s=machine.peak_bf16_flops_per_s,
                devices_per_domain=machine.devices_per_domain,
                scale_up_bytes_per_s=machine.scale_up.bytes_per_s,
                network_bytes_per_s=machine.network.bytes_per_s,
                sources=len(machine.sources),
            )
        )
    return tuple(rows)


def list_software() -> tuple[SoftwareRow, ...]:
    """Read the software profiles: name and description, in order of name."""
    profiles = (load_software(name) for name in preset_names("software"))
    return tuple(SoftwareRow(name=profile.name, description=profile.description) for profile in profiles)
