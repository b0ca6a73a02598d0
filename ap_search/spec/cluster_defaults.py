"""Constants of a cluster that nobody has measured: rules that scale measured devices, and their reasons."""

from typing import Any

from ap_search.spec.cluster_file import (
    AttentionSection,
    ClusterFile,
    CollectiveEntry,
    DispatchSection,
    GemmSection,
    GroupedGemmSection,
)
from ap_search.spec.machine import Collective
from ap_search.units import gib_to_bytes

RESERVE_GIB = 2.2
FRAGMENTATION_RATIO = 0.038

GEMM_EFFICIENCY = 0.70
FP8_OVER_BF16 = 0.77
GROUPED_OVER_DENSE = 1.09
GROUPED_FP8_OVER_BF16 = 0.83
ATTENTION_OVER_GEMM = 0.80
PAIR_EFFICIENCY = 0.75
FP8_LAUNCH_US = 17.0
FP8_ROWS_HALF = 115.0
DISPATCH_OVER_SCALE_UP = 0.745
DISPATCH_OVER_NIC = 0.814

REASONS = {
    "fp8_tflops": "no fp8 peak given: taken as absent",
    "mxfp8": "taken as absent",
    "sm_count": "that of an H100",
    "sustained_ratio": "median over devices with recorded training runs (docs/fidelity.md)",
    "scale_up_size": "the devices that a job fills",
    "scale_up_efficiency_ratio": "large ring collectives on A100, H100, H200 and B200 reach 0.80 of the links",
    "pair_gbyte_per_s": "a switch: two devices reach each other at the full rate",
    "network_name": "a node network",
    "network_latency_us": "all-reduce of 8 bytes over 2 x 2 H100 on InfiniBand (nccl-tests log): two hops in 16 us",
    "network_efficiency_ratio": "an NDR NIC moves 46-48 of 50 GB/s under NCCL (NVIDIA nccl-tests issues 130, 267)",
    "network_alltoall_efficiency_ratio": "an NDR NIC moves 46-48 of 50 GB/s under NCCL (NVIDIA nccl-tests issue 267)",
    "network_domain_gbyte_per_s": "no bound but the members' own NICs",
    "fused_dispatchers": "a CUDA device: DeepEP and HybridEP run on Ampere and later (Megatron-Bridge)",
    "reserve_gib": "what the driver keeps of the reported size 0.5, CUDA context 0.5, NCCL 0.4 for each of three "
    "communicators (aiconfigurator): assumption; fragmentation 3.8 % of the device: what PyTorch's allocator held "
    "beyond the allocated peak, median of 37 training runs on B200 (SimuMax v1.2)",
    "gemm": "0.70 of the peak: 7-11 % median error on A100, H100, B200, GB200 without calibration",
    "gemm_fp8": "0.77 of the bf16 efficiency, median of H100, H200, B200, GB200",
    "grouped_gemm": "1.09 of the dense efficiency, median of H100, H200, B200, GB200",
    "grouped_gemm_fp8": "0.83 of the bf16 efficiency and 115 rows to half, from DeepGEMM's H800 table",
    "attention": "0.80 of the dense efficiency, median of A100, H100, H200, B200",
    "dispatch": "DeepEP on H100 (335 GB/s NVLink, 40.7 GB/s per 400G NIC) scaled by scale-up and NIC bandwidth, "
    "on the network no more than an all-to-all",
    "collectives": "0.80 of the links (two ranks 0.75 of a pair), latencies between A100's and B200's",
}

# Per collective: latency of two ranks (us), latency added per further rank (us), square-root term (ns).
_SHAPES = {
    Collective.ALL_REDUCE: (8.5, 2.0, 8.0),
    Collective.ALL_GATHER: (7.5, 1.2, 5.0),
    Collective.REDUCE_SCATTER: (7.5, 1.2, 5.0),
    Collective.ALL_TO_ALL: (8.5, 0.3, 5.3),
}


def reserve_bytes(file: ClusterFile, device_memory_bytes: int) -> int:
    """Bytes kept free of a device: what the file says, otherwise a fixed part and a share of the device."""
    if file.reserve_gib is not None:
        return gib_to_bytes(file.reserve_gib)
    return gib_to_bytes(RESERVE_GIB) + int(FRAGMENTATION_RATIO * device_memory_bytes)


def gemm(file: ClusterFile) -> GemmSection:
    """Take the dense bf16 GEMM that the file gives, or one at 0.70 of the peak."""
    return file.gemm or GemmSection(efficiency_ratio=GEMM_EFFICIENCY)


def gemm_fp8(file: ClusterFile) -> GemmSection:
    """Take the dense fp8 GEMM that the file gives, or one scaled from bf16."""
    efficiency = gemm(file).efficiency_ratio * FP8_OVER_BF16
    return file.gemm_fp8 or GemmSection(efficiency_ratio=efficiency, launch_us=FP8_LAUNCH_US)


def grouped_gemm(file: ClusterFile) -> GroupedGemmSection:
    """Take the experts' bf16 GEMM that the file gives, or one scaled from the dense one."""
    efficiency = min(1.0, gemm(file).efficiency_ratio * GROUPED_OVER_DENSE)
    return file.grouped_gemm or GroupedGemmSection(efficiency_ratio=efficiency)


def grouped_gemm_fp8(file: ClusterFile) -> GroupedGemmSection:
    """Take the experts' fp8 GEMM that the file gives, or one scaled from bf16."""
    base = grouped_gemm(file)
    form: dict[str, Any] = {"rows_half": FP8_ROWS_HALF} if base.tile is None else {"tile": base.tile}
    return file.grouped_gemm_fp8 or GroupedGemmSection(
        **form,
        efficiency_ratio=base.efficiency_ratio * GROUPED_FP8_OVER_BF16,
        hbm_efficiency_ratio=base.hbm_efficiency_ratio,
        launch_us=base.launch_us,
        wgrad_rows=base.wgrad_rows,
        wgrad_ratios=base.wgrad_ratios,
    )


def attention(file: ClusterFile) -> AttentionSection:
    """Take the fused attention that the file gives, or one scaled from the dense GEMM."""
    return file.attention or AttentionSection(efficiency_ratio=gemm(file).efficiency_ratio * ATTENTION_OVER_GEMM)


def dispatch(file: ClusterFile) -> DispatchSection:
    """Take the dispatch constants that the file gives, or those of an H100 scaled by this cluster's links."""
    share = min(DISPATCH_OVER_NIC, file.network_alltoall_efficiency_ratio)
    return file.dispatch or DispatchSection(
        scale_up_gbyte_per_s=file.scale_up_gbyte_per_s * DISPATCH_OVER_SCALE_UP,
        network_gbyte_per_s=file.nic_gbit_per_s / 8 * share,
    )


def collectives(file: ClusterFile) -> tuple[CollectiveEntry, ...]:
    """Take the entries that the file gives, and entries by rule for each collective that it leaves out."""
    given = {entry.collective for entry in file.collectives}
    missing = (collective for collective in Collective if collective not in given)
    return (*file.collectives, *(entry for collective in missing for entry in _by_rule(file, collective)))


def _by_rule(file: ClusterFile, collective: Collective) -> tuple[CollectiveEntry, ...]:
    """Entries of one collective at two ranks and at a full domain (behind a switch: at eight).

    On a full mesh n ranks have n-1 links each, so the bandwidth between those two points is a straight line in n.
    """
    start, per_rank, sqrt_ns = _SHAPES[collective]
    size = file.scale_up_size or file.devices_per_domain
    full = max(2, size if file.pair_gbyte_per_s else min(size, 8))
    pair = file.pair_gbyte_per_s or file.scale_up_gbyte_per_s
    large = min(pair * (full - 1), file.scale_up_gbyte_per_s) * file.scale_up_efficiency_ratio
    rates = {2: pair * PAIR_EFFICIENCY, full: large if full > 2 else pair * PAIR_EFFICIENCY}
    return tuple(
        CollectiveEntry(
            collective=collective,
            ranks=ranks,
            latency_us=start + per_rank * (ranks - 2),
            gbyte_per_s=rate,
            sqrt_ns=sqrt_ns,
        )
        for ranks, rate in rates.items()
    )
