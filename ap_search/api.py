"""The public names: search, estimate and what they load; the command line calls these too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from ap_search.calibration.calibrate import calibrate, calibrate_log
from ap_search.cost.alternatives import with_imbalance
from ap_search.errors import Fault, SpecError
from ap_search.fidelity.validate import validate, validate_log
from ap_search.limits import MAX_TOP
from ap_search.listed import list_clusters, list_models, list_software
from ap_search.plan.plan import Plan
from ap_search.plan.text import knob_text, names_layout, parse_plan
from ap_search.result import (
    Optimality,
    PricedPlan,
    SearchResult,
    SearchSummary,
)
from ap_search.result.verification import Verification
from ap_search.runtime.settings import DtypeName, RunSettings
from ap_search.runtime.support import check_supported
from ap_search.search.domains import search_domains
from ap_search.search.engine import Progress, run_search
from ap_search.search.explain import explain_empty
from ap_search.search.explanation import explain_plan
from ap_search.search.layouts import layout_maker
from ap_search.search.levers import price_judged
from ap_search.search.rules import violations
from ap_search.setting import Chosen, Setting, load_execution, load_setting
from ap_search.spec.blocks import Model
from ap_search.spec.cluster import load_cluster
from ap_search.spec.machine import Machine
from ap_search.spec.model import load_model
from ap_search.spec.profiles import load_software
from ap_search.spec.software import Software

__all__ = [
    "calibrate",
    "calibrate_log",
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
    "verify",
]

# PyTorch, and what needs it, is imported where a plan is executed and nowhere else.
# ruff: noqa: PLC0415

DEFAULT_CLUSTER = "h100-sxm"
DEFAULT_SOFTWARE = "default"


def _keep_to(plan: Plan, chosen: Chosen) -> None:
    """Refuse a plan outside the user's own candidates."""
    faults = [
        Fault(path=f"--plan {axis}", reason="is outside --set", legal=" ".join(knob_text(axis, v) for v in values))
        for axis, values in chosen
        if int(getattr(plan, axis)) not in values
    ]
    if faults:
        raise SpecError.of(faults)


def _check_top(top: object) -> None:
    """Refuse what is no number of plans."""
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MAX_TOP:
        raise SpecError("--top", f"{top!r} is not a number of plans", f"1 to {MAX_TOP}")


def _asked(setting: Setting) -> dict[str, Any]:
    """What was asked, and what to expect of the answer: the same fields of every result."""
    return {"model": setting.model, "cluster": setting.cluster, "job": setting.job, "fidelity": setting.fidelity}


def _quiet(what: str, share: float) -> None:
    """Report nothing."""


def search(
    *,
    model: str | Path | Model,
    devices: int,
    cluster: str | Path | Machine = DEFAULT_CLUSTER,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    memory_limit_gib: float | None = None,
    reserve_gib: float | None = None,
    software: str | Path | Software = DEFAULT_SOFTWARE,
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
    model : str, Path or Model
        Preset name, YAML of ours, a Hugging Face config.json, or what `load_model` returned.
    devices : int
        Devices of the job, >= 1.
    cluster : str, Path or Machine
        Preset name, YAML, or what `load_cluster` returned.
    global_batch, seq_len : int, optional
        Sequences per step (1024) and tokens per sequence (4096).
    precision : str, optional
        `bf16`, `fp8` or `mxfp8`.
    set : mapping or sequence of str, optional
        Candidates per axis or knob: `{"ep": [8, 16]}` or `["ep=8,16"]`; nothing outside them is returned.
    memory_limit_gib, reserve_gib : float, optional
        What one device may hold, and what of it is kept free; GiB.
    software : str, Path or Software
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
    _check_top(top)
    setting = load_setting(
        model=model,
        devices=devices,
        cluster=cluster,
        software=software,
        chosen=set,
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
    domains = search_domains(setting.rules, setting.chosen)
    rules, cost, tell = setting.rules, setting.cost, progress or _quiet
    ranking = run_search(rules, cost, domains, top=top, progress=tell)
    empty = None if ranking.plans else explain_empty(rules, cost, domains, ranking=ranking, progress=tell)
    return SearchResult(
        **_asked(setting),
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
    model: str | Path | Model,
    devices: int,
    plan: str,
    cluster: str | Path | Machine = DEFAULT_CLUSTER,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    set: Mapping[str, Any] | Sequence[str] | None = None,
    memory_limit_gib: float | None = None,
    reserve_gib: float | None = None,
    software: str | Path | Software = DEFAULT_SOFTWARE,
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
    setting = load_setting(
        model=model,
        devices=devices,
        cluster=cluster,
        software=software,
        chosen=set,
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
    priced = _price_named(setting, plan)
    return SearchResult(
        **_asked(setting),
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


def _price_named(setting: Setting, name: str) -> PricedPlan:
    """Price the plan that a text names, with every rule that it breaks."""
    job, model = setting.cost.job, setting.cost.model
    plan = parse_plan(
        name,
        devices=job.devices,
        global_batch=job.global_batch,
        default_layout=layout_maker(setting.cost),
        model=model,
    )
    _keep_to(plan, setting.chosen)
    given = names_layout(name) or setting.cost.software.fills_stages
    broken = violations(replace(setting.rules, explicit_layout=False, given_layout=given), plan)
    priced = price_judged(setting.rules, setting.cost, plan, broken=broken)
    return with_imbalance(setting.cost, priced)


def verify(
    *,
    devices: int,
    plan: str,
    model: str | Path | Model = "toy-moe",
    steps: int = 3,
    dtype: str = "float32",
    global_batch: int | None = None,
    seq_len: int = 32,
    capacity_factor: float | None = None,
    pad_to_capacity: bool = False,
    seed: int = 0,
    timeout_s: float = 300.0,
    progress: Progress | None = None,
) -> Verification:
    """Execute a plan small, one process per device, and compare with one process and with the prediction.

    Parameters
    ----------
    devices : int
        Processes; under torchrun as many as it started.
    plan : str
        `tp=2,ep=4`, or a plan's short name as printed.
    model : str, Path or Model
        As for `search`; one that a few processes can hold.
    steps : int
        Training steps, each with an update.
    dtype : str
        Type of weights and activations in which results are compared: `float32`, `float64`, `bfloat16`.
    global_batch : int, optional
        Sequences per step; two micro-batches per pipeline stage by default.
    seq_len : int
        Tokens per sequence.
    capacity_factor, pad_to_capacity : float, optional, and bool
        As for `search`.
    seed : int
        Of weights and tokens.
    timeout_s : float
        Seconds that the run may take.
    progress : callable, optional
        Called with what is being done and which share of it is done, 0..1.

    Returns
    -------
    Verification
        Every check; `ok` where all hold.

    Raises
    ------
    SpecError
        Bad input, a plan that the runtime does not support, no PyTorch.
    RunFailed
        A process failed; all others are ended.

    Source: docs/guides/verify.md.
    """
    if find_spec("torch") is None:
        raise SpecError("verify", "needs PyTorch, which is not installed", 'pip install "ap-search[runtime]"')
    capacity: dict[str, Any] = {"capacity_factor": capacity_factor, "pad_to_capacity": pad_to_capacity}
    settings = RunSettings(seq_len=seq_len, seed=seed, dtype=cast(DtypeName, dtype), **capacity)
    setting, executed = load_execution(
        model=model,
        devices=devices,
        plan=plan,
        global_batch=global_batch,
        replicas=settings.hsdp_replicas,
        seq_len=seq_len,
        **capacity,
    )
    check_supported(setting.cost.model, executed, settings)
    try:
        from ap_search.runtime.verify import VerifyJob, run_verify
    except ImportError as error:  # A broken PyTorch, or one too old.
        raise SpecError(
            "verify", f"needs PyTorch, which cannot be used: {error}", 'pip install "ap-search[runtime]"'
        ) from error
    job = VerifyJob(context=setting.cost, plan=executed, settings=settings, steps=steps)
    return run_verify(job, timeout_s=timeout_s, progress=progress or _quiet)
