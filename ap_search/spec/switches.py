"""A software profile with what one run says of itself: overlap on or off, what CUDA graphs capture."""

from dataclasses import replace

from ap_search.spec.run import CudaGraphs, Switches
from ap_search.spec.software import AttentionKernel, Software

# What overlap hides where a run says that it is on and its profile, being off by default, has no figure of its own.
EP_OVERLAP_RATIO = 0.9
TP_OVERLAP_RATIO = 0.7
OTHER_OVERLAP_RATIO = 0.9
# Share of a layer's launches that stays on the host.
_CAPTURED = 0.1
_HALF = 0.5
_MOST = 0.8
_LAYER_SHARE = {
    CudaGraphs.NONE: 1.0,
    CudaGraphs.ATTENTION: _HALF,
    CudaGraphs.MOE: 1.0,
    CudaGraphs.LAYER: _HALF,
    CudaGraphs.FULL: _CAPTURED,
}
_MOE_SHARE = {
    CudaGraphs.NONE: 1.0,
    CudaGraphs.ATTENTION: 1.0,
    CudaGraphs.MOE: _MOST,
    CudaGraphs.LAYER: _MOST,
    CudaGraphs.FULL: _CAPTURED,
}


def switched(software: Software, switches: Switches) -> Software:
    """Set what a run says of its software; what it does not say stays as in the profile.

    Parameters
    ----------
    software : Software
        The profile, one without CUDA graphs where the run states its own.
    switches : Switches
        What the run says.

    Returns
    -------
    Software

    Notes
    -----
    A1. Off exposes all of that communication; on hides what the profile hides, or 0.9 where it hides nothing (tensor
    parallel 0.7), as in the presets `megatron-core-ep-overlap` and `megatron-core-tp-overlap`.
    A2. Full-iteration CUDA graphs leave a tenth of the launches exposed and never stop for the host, as in the preset
    `megatron-core-graphs`. Graphs of attention leave half of a layer's launches, graphs of router and preprocessing
    0.8 of what MoE adds, since dispatch, experts and combine stay outside: assumption.
    A3. Runs in fp16 keep and reduce gradients in fp16, and an fp32 copy of them in the optimizer (Megatron-LM
    `dist_optimizer.md`: 20 bytes, 4 + 16/d sharded).
    """
    graphs = switches.cuda_graphs or CudaGraphs.NONE
    if switches.half_gradients:
        software = replace(software, gradient_bytes=2, gradient_copy_bytes=0, master_bytes=8)
    return replace(
        software,
        ep_overlap_ratio=_ratio(switches.ep_overlap, software.ep_overlap_ratio, EP_OVERLAP_RATIO),
        tp_overlap_ratio=_ratio(switches.tp_overlap, software.tp_overlap_ratio, TP_OVERLAP_RATIO),
        dp_reduce_overlap_ratio=_ratio(
            switches.dp_reduce_overlap, software.dp_reduce_overlap_ratio, OTHER_OVERLAP_RATIO
        ),
        dp_gather_overlap_ratio=_ratio(
            switches.dp_gather_overlap, software.dp_gather_overlap_ratio, OTHER_OVERLAP_RATIO
        ),
        pp_overlap_ratio=_ratio(switches.pp_overlap, software.pp_overlap_ratio, OTHER_OVERLAP_RATIO),
        launch_per_layer_s=software.launch_per_layer_s * _LAYER_SHARE[graphs],
        launch_per_moe_layer_s=software.launch_per_moe_layer_s * _MOE_SHARE[graphs],
        host_per_layer_s=software.host_per_layer_s * _LAYER_SHARE[graphs],
        host_per_moe_layer_s=software.host_per_moe_layer_s * _MOE_SHARE[graphs],
        host_sync_s=0.0 if graphs is CudaGraphs.FULL else software.host_sync_s,
        attention_kernel=_kernel(switches.fused_attention, software.attention_kernel),
        dropout=software.dropout if switches.dropout is None else switches.dropout,
        offloaded_layers=switches.offloaded_layers or software.offloaded_layers,
        loss_chunks=switches.loss_chunks or software.loss_chunks,
    )


def _kernel(fused: bool | None, profile: AttentionKernel) -> AttentionKernel:
    """Attention kernel: the profile's where that agrees with what is said."""
    if fused is None or fused == (profile is not AttentionKernel.UNFUSED):
        return profile
    return AttentionKernel.BEST if fused else AttentionKernel.UNFUSED


def _ratio(stated: bool | None, profile: float, when_on: float) -> float:
    """Share that is hidden: the profile's where nothing is said."""
    if stated is None:
        return profile
    return (profile or when_on) if stated else 0.0
