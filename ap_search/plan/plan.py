"""One plan, and the enumerations of its knobs."""

from dataclasses import dataclass
from enum import IntEnum, IntFlag


class Sharding(IntEnum):
    """What the data-parallel group shards: nothing, optimizer, + gradients, + weights, or weights in a node only."""

    NONE = 0
    ZERO1 = 1
    ZERO2 = 2
    ZERO3 = 3
    HSDP = 4


class Dispatcher(IntEnum):
    """How tokens reach their experts (Megatron-Core's token dispatchers)."""

    ALLGATHER = 0
    ALLTOALL = 1
    DEEPEP = 2
    HYBRIDEP = 3


class Schedule(IntEnum):
    """Order of forward and backward passes over the pipeline."""

    ONE_F_ONE_B = 0
    INTERLEAVED = 1
    GPIPE = 2
    ZB_H1 = 3
    DUALPIPE = 4


class Recompute(IntFlag):
    """Modules whose forward is repeated in the backward pass (Megatron's names); FULL is every layer, uniform 1."""

    NONE = 0
    CORE_ATTN = 1
    MOE_ACT = 2
    LAYERNORM = 4
    MLA_UP_PROJ = 8
    MLP = 16
    MOE = 32
    SHARED_EXPERTS = 64
    FULL = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How decoder layers lie on virtual stages.

    `chunk_layers[c*pp + s]` is the number of consecutive layers of chunk c on stage s, bottom to top. The embedding
    lies on the first virtual stage, MTP modules, final norm and head on the last. `even` says that it follows from
    dividing.
    """

    pp: int
    vpp: int
    chunk_layers: tuple[int, ...]
    even: bool

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Decoder layers per pipeline stage, all its chunks together."""
        return tuple(sum(self.chunk_layers[stage :: self.pp]) for stage in range(self.pp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One parallel strategy: every axis and knob with its effective value.

    `dp` counts replicas of the dense mesh, `edp` of the expert mesh: `dp*cp*tp*pp = edp*ep*etp*pp = devices`.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = 1
    mbs: int = 1
    num_microbatches: int = 1
    sequence_parallel: bool = False
    sharding: Sharding = Sharding.ZERO1
    recompute: Recompute = Recompute.NONE
    dispatcher: Dispatcher = Dispatcher.ALLTOALL
    schedule: Schedule = Schedule.ONE_F_ONE_B
    layout: Layout
