"""What the trainer's software does, as plain frozen values: bytes it keeps, what it fuses, what it hides."""

from dataclasses import dataclass
from enum import StrEnum

from ap_search.spec.band import Band


class AttentionKernel(StrEnum):
    """How attention is computed: the device's fastest fused kernel, FlashAttention-2, or products around a softmax."""

    BEST = "best"
    FLASH2 = "flash2"
    UNFUSED = "unfused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A profile of a trainer: each field is a switch or a share with a meaning of its own, not a fudge factor.

    Bytes are per parameter. `*_overlap_ratio` is the share of that communication's time that can be hidden behind
    compute running beside it, 0..1 (what exceeds the compute is exposed all the same). `compute_efficiency_ratio` is
    what GEMMs reach of the machine's sustained speed with this software: layouts, fusions, tensors that are not in
    cache. Dense fp8 products run `fused_cast_ratio` times as fast as in tables that cast their inputs along.
    `attention_efficiency_ratio` is what its attention kernels reach of those that the machine was fitted on.
    `launch_*_s` are gaps between kernels that every layer adds; `host_*_s` is what the host needs to enqueue a layer's
    forward (its backward: twice), `host_fp8_ratio` times as long where products are cast to fp8: a faster device
    waits. `gradient_bucket_bytes` is the size of one gradient reduction (0: all at once). `left_out_errors` has, per
    kind of model, what was measured over what is predicted on runs that a calibration left out.
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
    attention_kernel: AttentionKernel = AttentionKernel.BEST
    launch_per_layer_s: float = 0.0
    launch_per_moe_layer_s: float = 0.0
    host_per_layer_s: float = 0.0
    host_per_moe_layer_s: float = 0.0
    host_sync_s: float = 0.0
    gradient_bucket_bytes: float = 0.0
    hbm_efficiency_ratio: float = 0.8
    compute_efficiency_ratio: float = 1.0
    fused_cast_ratio: float = 1.2
    attention_efficiency_ratio: float = 1.0
    host_fp8_ratio: float = 1.5
    dp_reduce_overlap_ratio: float = 0.0
    dp_gather_overlap_ratio: float = 0.0
    fsdp_overlap_ratio: float = 0.0
    tp_overlap_ratio: float = 0.0
    cp_overlap_ratio: float = 0.0
    pp_overlap_ratio: float = 0.0
    ep_overlap_ratio: float = 0.0
    shared_expert_overlap: bool = False
    fp8_dispatch: bool = False
    gradient_copy_bytes: int = 0
    logit_bytes: int = 6
    loss_chunks: int = 1
    dropout: bool = False
    fp8_saved_inputs: bool = True
    scores_in_experts: bool = True
    keeps_stage_outputs: bool = False
    selective_per_operator: bool = False
    reshards_under_pp: bool = True
    offloaded_layers: int = 0
    fills_stages: bool = False
    fragmentation_ratio: float = 0.038
    recognised_by: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    left_out_errors: tuple[tuple[str, Band], ...] = ()
