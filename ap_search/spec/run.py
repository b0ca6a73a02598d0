"""Recorded training runs as plain frozen values: what was run, with which plan, and what was measured."""

from dataclasses import dataclass
from enum import StrEnum

from ap_search.spec.blocks import Model
from ap_search.spec.machine import Machine


class FlopsRule(StrEnum):
    """What a printed TFLOP/s or MFU counts."""

    CAUSAL_HALVED = "causal-halved"
    FULL_ATTENTION = "full-attention"
    HARDWARE = "hardware"


class MemoryKind(StrEnum):
    """What a printed peak counts: tensors, the allocator's pool, or all that the device holds."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    NVIDIA_SMI = "nvidia-smi"


class MemoryStage(StrEnum):
    """Which pipeline stage a printed peak belongs to; `ends` is the larger of the first and the last."""

    MAX = "max"
    FIRST = "first"
    LAST = "last"
    ENDS = "ends"
    LIST = "list"


class CudaGraphs(StrEnum):
    """What CUDA graphs capture: nothing, attention, what stands before the experts, both, or the whole iteration."""

    NONE = "none"
    ATTENTION = "attention"
    MOE = "moe"
    LAYER = "layer"
    FULL = "full"


class Unusable(StrEnum):
    """Why a row has no price: something that it says is not modelled, or something that is needed is not said."""

    REFUSED = "refused"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One printed peak, bytes; where `stage` is `list`, `stage_bytes` has one per pipeline stage, 0 where unknown."""

    kind: MemoryKind
    stage: MemoryStage
    peak_bytes: int
    stage_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a source printed of one run; the first of the four speeds that is known counts.

    `flops_per_s_per_device` and `mfu_ratio` count by `flops_rule`, MTP modules included where `flops_mtp` is true.
    `memory` holds the reading that stands for the run first. `oom` says that the run ended for want of memory,
    `failed` that it ended and nobody says why.
    """

    step_time_s: float | None = None
    tokens_per_s_per_device: float | None = None
    flops_per_s_per_device: float | None = None
    mfu_ratio: float | None = None
    flops_rule: FlopsRule = FlopsRule.CAUSAL_HALVED
    flops_mtp: bool = True
    memory: tuple[MemoryReading, ...] = ()
    oom: bool = False
    failed: bool = False

    @property
    def has_time(self) -> bool:
        """Whether a speed was printed that may be compared (that of a run which ended early may not)."""
        speeds = (self.step_time_s, self.tokens_per_s_per_device, self.flops_per_s_per_device, self.mfu_ratio)
        return not (self.oom or self.failed) and any(speed is not None for speed in speeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What a run says of its software beside a profile's name; None is not said, so that the profile's value holds."""

    ep_overlap: bool | None = None
    tp_overlap: bool | None = None
    dp_reduce_overlap: bool | None = None
    dp_gather_overlap: bool | None = None
    pp_overlap: bool | None = None
    cuda_graphs: CudaGraphs | None = None
    fused_attention: bool | None = None
    dropout: bool | None = None
    half_gradients: bool | None = None
    offloaded_layers: int | None = None
    loss_chunks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabel:
    """What a row is called and filed under; `hardware` is the cluster's name, or the source's words without one."""

    id: str
    source: str
    group: str = ""
    quality: str = ""
    hardware: str = ""
    device: str = ""
    moe: bool = False
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One recorded run, complete enough to be priced.

    `plan` is text as `--plan` takes it, `precision` a word as `--precision` takes it, `software` a profile's name or
    path (empty: recognised by its source). `unknown` names keys of the plan that the record does not state: pricing
    takes the fastest values that fit. `assumed` has one line `field: what was taken` per other value that it does not
    state.
    """

    label: RunLabel
    model: Model
    machine: Machine
    devices: int
    plan: str
    unknown: tuple[str, ...] = ()
    global_batch: int
    seq_len: int
    precision: str
    capacity_factor: float | None = None
    load: str = "balanced"
    software: str = ""
    switches: Switches = Switches()
    measured: Measured
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableRun:
    """One recorded run that cannot be priced, and why."""

    label: RunLabel
    why: Unusable
    reason: str


class UnusableError(Exception):
    """Raised inside the readers where a row cannot become a `Run`."""

    def __init__(self, why: Unusable, reason: str) -> None:
        self.why, self.reason = why, reason
        super().__init__(reason)
