"""What the trainer's software does, as plain frozen values: bytes it keeps, what it fuses, what it hides."""

from dataclasses import dataclass

from ap_search.spec.band import Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A profile of a trainer: each field is a switch or a share with a meaning of its own, not a fudge factor.

    Bytes are per parameter. `*_overlap_ratio` is the share of that communication's time that can be hidden behind
    compute running beside it, 0..1 (what exceeds the compute is exposed all the same). `compute_efficiency_ratio` is
    what GEMMs and attention of a training run reach of the speed that the machine's constants, fitted on single
    kernels, give: sustained clocks under the power limit, gaps between kernels, tensors that are not in cache.
    `left_out_errors` has, per kind of model, what was measured over what is predicted on runs that a calibration left
    out.
    """

    name: str
    description: str
    weight_bytes: int = 2
    gradient_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 8
    router_dtype_bytes: int = 4
    fused_norm: bool = False
    fused_activation: bool = True
    fused_cross_entropy: bool = True
    vocab_divisor: int = 128
    launch_per_layer_s: float = 0.0
    launch_per_moe_layer_s: float = 0.0
    host_sync_s: float = 0.0
    hbm_efficiency_ratio: float = 0.8
    compute_efficiency_ratio: float = 1.0
    dp_reduce_overlap_ratio: float = 0.0
    dp_gather_overlap_ratio: float = 0.0
    fsdp_overlap_ratio: float = 0.0
    tp_overlap_ratio: float = 0.0
    cp_overlap_ratio: float = 0.0
    pp_overlap_ratio: float = 0.0
    ep_overlap_ratio: float = 0.0
    shared_expert_overlap: bool = False
    fp8_dispatch: bool = False
    recognised_by: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    left_out_errors: tuple[tuple[str, Band], ...] = ()
