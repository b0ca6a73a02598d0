"""What is to be trained in one step, as plain frozen values: batch, sequence, precision, load, limits."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Precision(StrEnum):
    """Number format of the linear layers' GEMMs."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"


class Target(StrEnum):
    """Framework whose own rules plans must obey."""

    ANY = "any"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    HYPERPARALLEL = "hyperparallel"
    DEEPSPEED = "deepspeed"


class PlacementPolicy(StrEnum):
    """Which ranks hold which experts: in order, as a load balancer chooses, or so that all ranks bear the same."""

    CONTIGUOUS = "contiguous"
    EPLB = "eplb"
    LPLB = "lplb"
    IDEAL = "ideal"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """How routed tokens fall on experts.

    Attributes
    ----------
    name : str
        As the user wrote it: `balanced`, `zipf:1.2`, or a file's name.
    shares : array of float, shape (rows, num_experts), or None
        Share of routed token copies per expert, each row summing to 1; one row for all MoE layers or one row per MoE
        layer in order. None is balanced.
    source_shares : array of float, shape (rows, source ranks, num_experts), or None
        The same before source ranks were summed, each row summing to 1: what each rank sends to each expert.
    """

    name: str = "balanced"
    shares: NDArray[np.float64] | None = None
    source_shares: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One training job: how many devices, how large a step, what it may use.

    `capacity_factor` 0 is dropless routing; with `pad_to_capacity` each expert's input is padded to capacity.
    `memory_limit_bytes` is what one device may hold, `reserve_bytes` what is kept free of it for the context,
    communicators and fragmentation. `redundant_experts` are copies of experts that each MoE layer holds beside its own,
    over one expert-parallel group. `assumed` names the fields that were not given.
    """

    devices: int
    global_batch: int = 1024
    seq_len: int = 4096
    precision: Precision = Precision.BF16
    memory_limit_bytes: int
    reserve_bytes: int
    load: Load = Load()
    placement: PlacementPolicy = PlacementPolicy.CONTIGUOUS
    redundant_experts: int = 0
    capacity_factor: float = 0.0
    pad_to_capacity: bool = False
    target: Target = Target.ANY
    assumed: tuple[str, ...] = ()
