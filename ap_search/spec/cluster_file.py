"""The schema of a cluster file: human units, one section per fitted constant, an origin for every key."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ap_search.spec.bands import LeftOut
from ap_search.spec.machine import Collective

Positive = Annotated[float, Field(gt=0, strict=True)]
NotNegative = Annotated[float, Field(ge=0, strict=True)]
Ratio = Annotated[float, Field(gt=0, le=1, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Provenance = Annotated[
    Literal["calibrated", "derived"],
    Field(description="calibrated: fitted on measurements of this device; derived: carried over from elsewhere."),
]


class _Edge(BaseModel):
    """What all sections share: frozen, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TileSection(_Edge):
    """Products in tiles: each costs its products over an inner width k + k0, at efficiency `e*(area/32768)^q`."""

    overhead_width: NotNegative = Field(description="k0: inner width that starting and ending a tile costs, elements.")
    small_tile_exponent: NotNegative = Field(description="q: how much efficiency a tile smaller than 128 x 256 loses.")


class GemmSection(_Edge):
    """Dense GEMM roofline `max(flops/(peak*e), bytes/(hbm*h)) + t0`."""

    efficiency_ratio: Ratio = Field(description="e: share of the peak that large GEMMs reach.")
    hbm_efficiency_ratio: Ratio = Field(default=0.8, description="h: share of the memory bandwidth that GEMMs reach.")
    launch_us: NotNegative = Field(default=5.0, description="t0: fixed cost of one GEMM, microseconds.")
    wgrad_ratio: Ratio = Field(
        default=0.96, description="Efficiency of the weight-gradient GEMM over that of the forward."
    )
    tile: TileSection | None = Field(default=None, description="Constants of tiles; efficiency is that of full waves.")
    provenance: Provenance = "calibrated"


class GroupedGemmSection(_Edge):
    """Grouped GEMM: in tiles where `tile` is given, else efficiency `e*r/(r+r0)` at r rows per expert."""

    efficiency_ratio: Ratio = Field(description="e: share of the peak with very many rows per expert.")
    tile: TileSection | None = Field(default=None, description="Constants of tiles; rows_half is not used then.")
    rows_half: NotNegative = Field(default=60.0, description="r0: rows per expert at which half of e is reached.")
    hbm_efficiency_ratio: Ratio = Field(
        default=0.85, description="Share of the memory bandwidth that grouped GEMMs reach."
    )
    launch_us: NotNegative = Field(
        default=22.0, description="Fixed cost of one grouped GEMM, microseconds: half of an expert layer's."
    )
    wgrad_rows: tuple[Positive, ...] = Field(
        default=(181.0, 362.0, 724.0, 1448.0, 2896.0),
        min_length=1,
        description="Rows per expert of `wgrad_ratios`, ascending.",
    )
    wgrad_ratios: tuple[Ratio, ...] = Field(
        default=(0.56, 0.69, 0.73, 0.76, 0.83),
        description="Efficiency of the weight gradient over the forward, by rows.",
    )
    provenance: Provenance = "calibrated"

    @model_validator(mode="after")
    def _check(self) -> "GroupedGemmSection":
        if self.tile is not None and "rows_half" in self.model_fields_set:
            raise ValueError("give tile or rows_half, not both")
        if len(self.wgrad_rows) != len(self.wgrad_ratios):
            raise ValueError("wgrad_rows and wgrad_ratios must have the same length")
        if list(self.wgrad_rows) != sorted(set(self.wgrad_rows)):
            raise ValueError("wgrad_rows must ascend")
        return self


class AttentionSection(_Edge):
    """Fused attention: efficiency `e * s/(s+s0) * u/(u+w0)`, u work items per multiprocessor."""

    efficiency_ratio: Ratio = Field(description="e: share of the bf16 peak for long sequences and many heads.")
    seq_half: NotNegative = Field(
        default=500.0, description="s0: sequence length at which half of e is reached, tokens."
    )
    work_half: NotNegative = Field(
        default=0.1, description="w0: work items per multiprocessor at which half of e is reached."
    )
    launch_us: NotNegative = Field(default=15.0, description="Fixed cost of one call, microseconds.")
    backward_time_ratio: Positive = Field(default=2.97, description="Time of the backward over that of the forward.")
    flash2_ratio: Ratio = Field(default=1.0, description="What FlashAttention-2 reaches of it on this device.")
    provenance: Provenance = "calibrated"


class DispatchSection(_Edge):
    """Deduplicating dispatchers (DeepEP): the slower of two resources plus a latency."""

    scale_up_gbyte_per_s: Positive = Field(description="Received per device inside the scale-up domain, GB/s.")
    network_gbyte_per_s: Positive = Field(description="Sent per device to other domains, GB/s, physical.")
    dispatch_latency_us: NotNegative = Field(default=33.0, description="Fixed cost of one dispatch, microseconds.")
    combine_latency_us: NotNegative = Field(default=51.0, description="Fixed cost of one combine, microseconds.")
    sms: Annotated[int, Field(ge=0, strict=True)] = Field(
        default=20, description="Multiprocessors that the kernels occupy."
    )
    provenance: Provenance = "calibrated"


class CollectiveEntry(_Edge):
    """Constants of `t = a + w/B + c*sqrt(w)` for one collective over `ranks` devices of one scale-up domain."""

    collective: Collective = Field(description="Which collective.")
    ranks: Annotated[int, Field(ge=2, strict=True)] = Field(description="Devices of the measured group.")
    latency_us: NotNegative = Field(description="a, microseconds.")
    gbyte_per_s: Positive = Field(description="B, GB/s of bus bandwidth.")
    sqrt_ns: NotNegative = Field(default=0.0, description="c, nanoseconds per square root of a byte.")
    provenance: Provenance = "calibrated"


class ClusterFile(_Edge):
    """One kind of cluster, as a user writes it. Bandwidths are per device and per direction, peaks dense."""

    name: str = Field(min_length=1, description="What reports call the cluster.")
    device: str = Field(default="", description="The accelerator in words (default: the name).")
    recognised_by: tuple[str, ...] = Field(
        default=(), description="Words that records of runs call the device by; h20 does not stand for h200."
    )
    usable_mib: Positive | None = Field(
        default=None, description="Device memory as its driver reports it, MiB (2^20 bytes)."
    )
    hbm_gib: Positive | None = Field(
        default=None, description="Device memory, GiB (2^30 bytes), when usable_mib is unknown."
    )
    hbm_gb: Positive | None = Field(default=None, description="Device memory, GB (10^9 bytes), when neither is known.")
    hbm_tb_per_s: Positive = Field(description="Memory bandwidth, TB/s (10^12 bytes per second).")
    bf16_tflops: Positive = Field(description="Dense BF16 peak, TFLOP/s.")
    fp8_tflops: NotNegative = Field(default=0.0, description="Dense FP8 peak, TFLOP/s; 0 where the device has no FP8.")
    mxfp8: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Whether the device multiplies block-scaled fp8 (OCP MX), for the precision mxfp8."
    )
    sustained_ratio: Ratio = Field(
        default=0.8,
        description="Share of single-kernel speed that GEMMs and attention keep in a training run: clocks under load.",
    )
    sm_count: Count = Field(default=132, description="Multiprocessors (compute units, cube cores) of one device.")
    devices_per_domain: Count = Field(
        description="Devices of one scale-up domain that a job fills: those of a node; 64 of an NVL72 rack."
    )
    scale_up_size: Count | None = Field(
        default=None,
        description="Devices that one scale-up domain can hold (72 for NVL72; default: devices_per_domain).",
    )
    scale_up_gbyte_per_s: Positive = Field(description="NVLink, xGMI, HCCS or UB, all links of one device, GB/s.")
    scale_up_efficiency_ratio: Ratio = Field(default=0.80, description="Share of that which ring collectives reach.")
    pair_gbyte_per_s: Positive | None = Field(
        default=None,
        description="Between two devices of a domain, GB/s: one link of a full mesh (default: a switch, all of it).",
    )
    nic_gbit_per_s: Positive = Field(description="Network of one device, Gbit/s.")
    network_name: Literal["network", "rack edge"] = Field(
        default="network", description="What leaving a domain is called."
    )
    network_latency_us: NotNegative = Field(default=8.0, description="One hop over the network, microseconds.")
    network_efficiency_ratio: Ratio = Field(default=0.94, description="Share of the NIC that rings and messages reach.")
    network_alltoall_efficiency_ratio: Ratio = Field(
        default=0.93, description="Share of the NIC that an all-to-all reaches."
    )
    network_domain_gbyte_per_s: Positive | None = Field(
        default=None,
        description="Most that one group drives out of one domain in a ring or tree, GB/s (default: all its NICs).",
    )
    reserve_gib: NotNegative | None = Field(
        default=None,
        description="Memory kept free for driver, context, communicators and fragmentation, GiB (default: 2.2 and "
        "3.8 % of the device).",
    )
    fused_dispatchers: tuple[Literal["deepep", "hybridep"], ...] = Field(
        default=("deepep", "hybridep"),
        description="Deduplicating dispatchers whose kernels run on the device.",
    )
    gemm: GemmSection | None = Field(default=None, description="Dense bf16 GEMM.")
    gemm_fp8: GemmSection | None = Field(default=None, description="Dense fp8 GEMM, casts included.")
    grouped_gemm: GroupedGemmSection | None = Field(default=None, description="Experts' bf16 GEMMs.")
    grouped_gemm_fp8: GroupedGemmSection | None = Field(default=None, description="Experts' fp8 GEMMs.")
    attention: AttentionSection | None = Field(default=None, description="Fused attention, bf16.")
    dispatch: DispatchSection | None = Field(default=None, description="Deduplicating expert-parallel dispatch.")
    collectives: tuple[CollectiveEntry, ...] = Field(default=(), description="Collectives inside one scale-up domain.")
    sources: dict[str, str] = Field(default_factory=dict, description="Key of this file -> where its value is from.")
    assumed: tuple[str, ...] = Field(
        default=(), description="Keys of this file whose values are assumptions, not facts."
    )
    left_out_errors: LeftOut = {}

    @model_validator(mode="after")
    def _check(self) -> "ClusterFile":
        if sum(size is not None for size in (self.usable_mib, self.hbm_gib, self.hbm_gb)) != 1:
            raise ValueError("give the memory once: usable_mib, hbm_gib or hbm_gb")
        if self.devices_per_domain > (self.scale_up_size or self.devices_per_domain):
            raise ValueError("devices_per_domain is more than scale_up_size")
        if (self.pair_gbyte_per_s or 0) > self.scale_up_gbyte_per_s:
            raise ValueError("pair_gbyte_per_s is more than scale_up_gbyte_per_s")
        pairs = [(entry.collective, entry.ranks) for entry in self.collectives]
        if len(set(pairs)) != len(pairs):
            raise ValueError("collectives names one collective twice for the same ranks")
        for key in (*self.sources, *self.assumed):
            if key not in self.model_fields_set:
                raise ValueError(f"sources or assumed names {key}, which this file does not give")
        return self
