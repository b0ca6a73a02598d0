"""Making a job of what a call names: every value checked at once, what was not given filled in and said."""

import numbers
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ap_search.errors import Fault, SpecError
from ap_search.limits import MAX_DEVICES, MAX_GIB, MAX_GLOBAL_BATCH, MAX_REDUNDANT_EXPERTS, MAX_SEQ_LEN
from ap_search.spec.blocks import Model
from ap_search.spec.job import Job, Load, PlacementPolicy, Precision, Target
from ap_search.spec.load import load_load
from ap_search.spec.machine import Machine
from ap_search.spec.reader import describe, short
from ap_search.units import bytes_to_gib, gib_to_bytes

MIN_GIB = 1e-6

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

_DEFAULT = Job(devices=1, memory_limit_bytes=1, reserve_bytes=0)
_ORDERING_TARGETS = tuple(target for target in Target if target is not Target.ANY)


@dataclass(slots=True)
class _Faults:
    """Faults found so far; each check returns a usable value, so that the next ones can still run."""

    found: list[Fault] = field(default_factory=list)

    def add(self, flag: str, reason: str, legal: str) -> None:
        """Note one fault."""
        self.found.append(Fault(path=flag, reason=reason, legal=legal))

    def whole(
        self, flag: str, value: object, *, default: int, most: int, least: int = 1, optional: bool = False
    ) -> int:
        """Check a whole number from `least` to `most`; None is the default where it is optional."""
        if value is None and optional:
            return default
        legal = f"a whole number from {least} to {most}"
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            self.add(flag, f"is {describe(value)}", legal)
        elif not least <= int(value) <= most:
            self.add(flag, f"is {short(int(value))}", legal)
        else:
            return int(value)
        return default

    def number(self, flag: str, value: object, *, least: float, most: float) -> float:
        """Check a number from `least` to `most`; `most` stands for one that is not."""
        legal = f"a number from {least:g} to {most:g}"
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            self.add(flag, f"is {describe(value)}", legal)
            return most
        size: Any = value
        if not least <= size <= most:
            self.add(flag, f"is {short(value)}", legal)
            return most
        return float(size)

    def choice(self, flag: str, value: object, *, default: ChoiceT) -> ChoiceT:
        """Check one word of the default's enumeration; None is the default."""
        kind = type(default)
        if value is None:
            return default
        if isinstance(value, str) and value in tuple(kind):
            return kind(value)
        self.add(flag, f"is {describe(value)}", ", ".join(kind))
        return default


def make_job(
    *,
    machine: Machine,
    model: Model,
    devices: object,
    global_batch: object = None,
    seq_len: object = None,
    precision: object = None,
    memory_limit_gib: object = None,
    reserve_gib: object = None,
    load: Load | str | Path | None = None,
    placement: object = None,
    redundant_experts: object = None,
    capacity_factor: object = None,
    pad_to_capacity: object = None,
    target: object = None,
) -> Job:
    """Make a job of what was given, in the units of the flags; None stands for a default, which is named as assumed.

    Parameters
    ----------
    machine : Machine
        The cluster: its usable memory and reserve are the defaults, its peaks say which precisions it has.
    model : Model
        What is trained: experts for the load, learned positions for the sequence.
    devices : int
        Devices of the whole job, 1 to 2^20.
    global_batch : int, optional
        Sequences per step, 1 to 2^24; 1024 when not given.
    seq_len : int, optional
        Tokens per sequence, 1 to 2^24; 4096 when not given.
    precision : str, optional
        `bf16` (when not given), `fp8` or `mxfp8`.
    memory_limit_gib : float, optional
        What one device may hold, GiB, 1e-6 to 1e6.
    reserve_gib : float, optional
        What is kept free of it, GiB, from 0 to less than the limit.
    load : Load, str or Path, optional
        Tokens per expert, or what `load_load` reads; balanced when not given.
    placement : str, optional
        Which ranks hold which experts: `contiguous` (when not given), `eplb`, `lplb` or `ideal`.
    redundant_experts : int, optional
        Copies of experts per MoE layer and expert-parallel group, 0 (when not given) to 65536; none where contiguous.
    capacity_factor : float, optional
        Token copies that an expert takes over its balanced share; 0, dropless, when not given.
    pad_to_capacity : bool, optional
        Whether each expert's input is padded to its capacity, which a capacity factor up to num_experts/top_k gives.
    target : str, optional
        Framework that must run the plan; `any` when not given.

    Returns
    -------
    Job
        With `assumed` naming the fields that were not given.

    Raises
    ------
    SpecError
        All faults at once; a fault's path is the flag.
    """
    faults = _Faults()
    limit_bytes, reserve_bytes = _memory(faults, machine, memory_limit_gib, reserve_gib)
    given = {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "precision": precision,
        "memory_limit_bytes": memory_limit_gib,
        "reserve_bytes": reserve_gib,
        "load": load,
        "placement": placement,
        "redundant_experts": redundant_experts,
        "capacity_factor": capacity_factor,
        "pad_to_capacity": pad_to_capacity,
        "target": target,
    }
    job = Job(
        devices=faults.whole("--devices", devices, default=1, most=MAX_DEVICES),
        global_batch=faults.whole(
            "--global-batch", global_batch, default=_DEFAULT.global_batch, most=MAX_GLOBAL_BATCH, optional=True
        ),
        seq_len=_seq_len(faults, model, seq_len),
        precision=_precision(faults, machine, precision),
        memory_limit_bytes=limit_bytes,
        reserve_bytes=reserve_bytes,
        load=_load(faults, model, load),
        placement=_placement(faults, model, placement, target),
        redundant_experts=_redundant_experts(faults, model, redundant_experts, placement),
        capacity_factor=_capacity_factor(faults, model, capacity_factor, target),
        pad_to_capacity=_pad_to_capacity(faults, model, pad_to_capacity, capacity_factor),
        target=faults.choice("--target", target, default=_DEFAULT.target),
        assumed=tuple(name for name, value in given.items() if value is None),
    )
    if faults.found:
        raise SpecError.of(faults.found)
    return job


def _seq_len(faults: _Faults, model: Model, value: object) -> int:
    """Tokens per sequence, no more than a learned position table has rows."""
    before = len(faults.found)
    seq_len = faults.whole("--seq-len", value, default=_DEFAULT.seq_len, most=MAX_SEQ_LEN, optional=True)
    if 0 < model.learned_positions < seq_len and len(faults.found) == before:
        reason = f"is {seq_len}, but {model.name} has learned positions for {model.learned_positions} tokens"
        faults.add("--seq-len", reason, f"up to {model.learned_positions}")
    return seq_len


def _precision(faults: _Faults, machine: Machine, value: object) -> Precision:
    """Number format of the GEMMs, one that the device has."""
    precision = faults.choice("--precision", value, default=_DEFAULT.precision)
    if precision != Precision.BF16 and machine.peak_fp8_flops_per_s <= 0:
        faults.add("--precision", f"is {precision}, but {machine.device} has no fp8 arithmetic", Precision.BF16)
    elif precision == Precision.MXFP8 and not machine.mxfp8:
        reason = f"is {precision}, but {machine.device} has no block-scaled fp8 arithmetic"
        faults.add("--precision", reason, f"{Precision.BF16}, {Precision.FP8}")
    return precision


def _memory(faults: _Faults, machine: Machine, limit_gib: object, reserve_gib: object) -> tuple[int, int]:
    """What one device may hold and what is kept free of it, bytes."""
    before = len(faults.found)
    limit, reserve = machine.device_memory_bytes, machine.reserve_bytes
    if limit_gib is not None:
        limit = gib_to_bytes(faults.number("--memory-limit-gib", limit_gib, least=MIN_GIB, most=MAX_GIB))
    if reserve_gib is not None:
        reserve = gib_to_bytes(faults.number("--reserve-gib", reserve_gib, least=0.0, most=MAX_GIB))
    if reserve >= limit and len(faults.found) == before:
        flag = "--memory-limit-gib" if reserve_gib is None else "--reserve-gib"
        reason = f"leaves nothing: {bytes_to_gib(reserve):g} GiB are reserved of {bytes_to_gib(limit):g} GiB"
        faults.add(flag, reason, "a reserve (--reserve-gib) below the limit (--memory-limit-gib)")
    return limit, reserve


def _load(faults: _Faults, model: Model, value: Load | str | Path | None) -> Load:
    """How tokens fall on experts, read where it is not read yet."""
    experts = model.moe.num_experts if model.moe else 0
    if value is None:
        return _DEFAULT.load
    if not isinstance(value, Load):
        try:
            return load_load(value, num_experts=experts, num_moe_layers=len(model.moe_layers))
        except SpecError as error:
            faults.found.extend(error.faults)
        return _DEFAULT.load
    shape = None if value.shares is None else value.shares.shape
    legal = [(1, experts), (len(model.moe_layers), experts)]
    if shape is not None and (experts == 0 or shape not in legal):
        wanted = f"shares of the shape {legal[0]} or {legal[1]}" if experts else "balanced"
        faults.add("--load", f"holds shares of the shape {shape}", wanted)
    return value


def _placement(faults: _Faults, model: Model, value: object, target: object) -> PlacementPolicy:
    """Which ranks hold which experts; trainers that we know keep them in order, `ideal` is no trainer's.

    Source: Megatron-LM `megatron/core/transformer/moe/moe_layer.py` (consecutive local experts), alike in TorchTitan
    and DeepSpeed; HyperParallel `docs/feature_status.md` (copies of hot experts are not ticked).
    """
    placement = faults.choice("--placement", value, default=_DEFAULT.placement)
    if placement is not _DEFAULT.placement and model.moe is None:
        faults.add("--placement", f"is {placement}, but the model has no routed experts", _DEFAULT.placement)
    elif placement in (PlacementPolicy.EPLB, PlacementPolicy.LPLB) and target in _ORDERING_TARGETS:
        reason = f"is {placement}, but {target} keeps experts in order"
        faults.add("--placement", reason, f"{_DEFAULT.placement}, or --target {Target.ANY}")
    return placement


def _redundant_experts(faults: _Faults, model: Model, value: object, placement: object) -> int:
    """Copies of experts per MoE layer, which only a balancer's placement has."""
    flag = "--redundant-experts"
    copies = faults.whole(flag, value, default=0, most=MAX_REDUNDANT_EXPERTS, least=0, optional=True)
    if copies and model.moe is None:
        faults.add(flag, f"is {copies}, but the model has no routed experts", "0")
    elif copies and placement in (None, PlacementPolicy.CONTIGUOUS):
        others = ", ".join(policy for policy in PlacementPolicy if policy is not PlacementPolicy.CONTIGUOUS)
        reason = f"is {copies}, but {_DEFAULT.placement} placement has no copies"
        faults.add(flag, reason, f"0, or --placement {others}")
    return copies


def _capacity_factor(faults: _Faults, model: Model, value: object, target: object) -> float:
    """Token copies that an expert takes over its balanced share, 0 for dropless routing.

    Source: pytorch/torchtitan `torchtitan/models/moe` (token-choice routing without a capacity).
    """
    if value is None:
        return _DEFAULT.capacity_factor
    if model.moe is None:
        faults.add("--capacity-factor", f"is {short(value)}, but the model has no routed experts", "none")
        return _DEFAULT.capacity_factor
    factor = faults.number("--capacity-factor", value, least=0.0, most=model.moe.num_experts)
    if factor and target == Target.TORCHTITAN:
        faults.add("--capacity-factor", f"is {factor:g}, but {target} drops no tokens", f"0, or --target {Target.ANY}")
    return factor


def _pad_to_capacity(faults: _Faults, model: Model, value: object, factor: object) -> bool:
    """Whether experts' inputs are padded to capacity: it takes one, no more than the tokens of a rank.

    Source: Megatron-LM `transformer_config.py` (moe_pad_expert_input_to_capacity), `moe_utils.py` (permute with
    drop_and_pad picks capacity of a rank's tokens).
    """
    flag = "--pad-to-capacity"
    if value is None or value is False:
        return False
    if value is not True:
        faults.add(flag, f"is {describe(value)}", "true or false")
    elif model.moe is None:
        faults.add(flag, "is set, but the model has no routed experts", "off")
    elif isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not factor:
        faults.add(flag, "is set, but there is no capacity to pad to", "off, or a --capacity-factor above 0")
    elif float(factor) > model.moe.num_experts / model.moe.top_k:
        most = model.moe.num_experts / model.moe.top_k
        faults.add(flag, f"is set, but capacity at {factor:g} is more than a rank's tokens", f"a factor up to {most:g}")
    return True
