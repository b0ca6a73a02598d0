"""What a cluster is, as plain frozen values: device peaks, levels of network, fitted constants."""

import math
from dataclasses import dataclass
from enum import StrEnum

from ap_search.spec.band import Band


class Collective(StrEnum):
    """Collectives that have fitted constants of their own."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "alltoall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network, from the scale-up domain outwards.

    Attributes
    ----------
    name : str
        `scale-up`, `network` or `rack edge`.
    size : int
        Devices that one domain of this level holds; 0 for the outermost, which holds all.
    bytes_per_s : float
        Per device and direction, specification.
    efficiency_ratio : float
        Share of `bytes_per_s` that large ring collectives and messages reach, 0..1.
    latency_s : float
        One hop over a link of this level, from one device to the next.
    pair_bytes_per_s : float
        Between two devices of the domain, per direction: less than `bytes_per_s` on a full mesh of direct links
        (MI300X, Ascend A2), equal to it behind a switch.
    alltoall_efficiency_ratio : float
        Share of `bytes_per_s` that a large all-to-all over this level reaches, 0..1.
    domain_bytes_per_s : float
        What the members of one group in one inner domain drive across this level together in a ring or tree
        collective, at most; infinite when only their own links bound it.
    """

    name: str
    size: int
    bytes_per_s: float
    efficiency_ratio: float
    latency_s: float
    pair_bytes_per_s: float
    alltoall_efficiency_ratio: float = 0.93
    domain_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """Constants of `t = a + w/B + c*sqrt(w)` for one collective over `ranks` devices of one scale-up domain."""

    collective: Collective
    ranks: int
    latency_s: float
    bytes_per_s: float
    sqrt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TileFit:
    """Constants of products in tiles: what starting and ending a tile costs, as inner width; q of small tiles."""

    overhead_width: float
    small_tile_exponent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFit:
    """Constants of the dense GEMM roofline `max(flops/(peak*e), bytes/(hbm*h)) + t0`; `wgrad_ratio` scales e for dW.

    With `tile`, compute is in whole tiles and waves over `sm_count` multiprocessors.
    """

    efficiency_ratio: float
    hbm_efficiency_ratio: float
    launch_s: float
    wgrad_ratio: float
    tile: TileFit | None = None
    sm_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmFit:
    """Constants of the grouped GEMM, either in tiles or with efficiency `e*r/(r+r0)` at r rows per expert.

    The weight gradient reaches `wgrad_ratios` of the forward's efficiency, by rows per expert. `launch_s` is per
    product: half of what an expert layer costs whatever its size.
    """

    efficiency_ratio: float
    rows_half: float
    hbm_efficiency_ratio: float
    launch_s: float
    wgrad_rows: tuple[float, ...]
    wgrad_ratios: tuple[float, ...]
    tile: TileFit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFit:
    """Constants of fused attention: efficiency `e * s/(s+s0) * u/(u+w0)`, u work items per multiprocessor.

    `flash2_ratio` is what FlashAttention-2 reaches of that on this device.
    """

    efficiency_ratio: float
    seq_half: float
    work_half: float
    launch_s: float
    backward_time_ratio: float
    flash2_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchFit:
    """Constants of deduplicating dispatchers (DeepEP): the slower of two resources plus a latency."""

    scale_up_bytes_per_s: float
    network_bytes_per_s: float
    dispatch_latency_s: float
    combine_latency_s: float
    sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of cluster: a device, how devices hang together, and what they reach.

    `peak_flops_per_s` of a precision the device lacks is 0; `mxfp8` says whether it multiplies block-scaled fp8 at the
    fp8 peak. `devices_per_domain` is how many devices of a scale-up domain a job takes (64 of an NVL72 rack, usually):
    ranks fill domains in that number. `assumed` names the keys that were filled by a default, `sources` the origin of
    each key, `provenance` says per fit `calibrated` (fitted on measurements of this device), `derived` (another
    device's constants, or a measured plateau, carried over) or `default`. `fused_dispatchers` names the deduplicating
    dispatchers whose kernels run on the device. `sustained_ratio` is what the device keeps of single-kernel speed in a
    run of hours: clocks under the power limit. `left_out_errors` has, per kind
    of model, what was measured over what is predicted on runs that a calibration left out.
    """

    name: str
    device: str
    device_memory_bytes: int
    peak_bf16_flops_per_s: float
    peak_fp8_flops_per_s: float
    hbm_bytes_per_s: float
    sm_count: int
    devices_per_domain: int
    levels: tuple[Level, ...]
    gemm: GemmFit
    gemm_fp8: GemmFit
    grouped_gemm: GroupedGemmFit
    grouped_gemm_fp8: GroupedGemmFit
    attention: AttentionFit
    dispatch: DispatchFit
    collectives: tuple[CollectiveFit, ...]
    reserve_bytes: int
    sustained_ratio: float = 1.0
    mxfp8: bool = False
    fused_dispatchers: tuple[str, ...] = ("deepep", "hybridep")
    assumed: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    left_out_errors: tuple[tuple[str, Band], ...] = ()

    @property
    def scale_up(self) -> Level:
        """The innermost level (NVLink, xGMI, HCCS or UB domain)."""
        return self.levels[0]

    @property
    def network(self) -> Level:
        """The level that joins scale-up domains (InfiniBand, RoCE, or beyond an NVL72 rack's edge)."""
        return self.levels[-1]

    def domain_size(self, world: int) -> int:
        """How many consecutive ranks of a job of `world` devices share one scale-up domain, devices.

        Parameters
        ----------
        world : int
            Devices of the job, 1 or more.

        Returns
        -------
        int
            `world` when it fits into one domain (72 devices in one NVL72 rack), else `devices_per_domain` (64 of each).
        """
        return world if world <= self.scale_up.size else self.devices_per_domain
