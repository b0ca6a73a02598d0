"""Reading clusters: a preset or a YAML file becomes a `Machine`, with what was assumed and where each value is from."""

import math
from pathlib import Path

from pydantic import BaseModel

from ap_search.spec import cluster_defaults as rules
from ap_search.spec.bands import left_out_bands
from ap_search.spec.cluster_file import (
    AttentionSection,
    ClusterFile,
    CollectiveEntry,
    DispatchSection,
    GemmSection,
    GroupedGemmSection,
    TileSection,
)
from ap_search.spec.machine import (
    AttentionFit,
    Collective,
    CollectiveFit,
    DispatchFit,
    GemmFit,
    GroupedGemmFit,
    Level,
    Machine,
    TileFit,
)
from ap_search.spec.presets import locate
from ap_search.spec.reader import read_mapping, validate
from ap_search.units import (
    gb_to_bytes,
    gbit_to_bytes_per_s,
    gbyte_to_bytes_per_s,
    gib_to_bytes,
    mib_to_bytes,
    ns_to_s,
    tb_to_bytes_per_s,
    tflops_to_flops_per_s,
    us_to_s,
)

_MEMORY = ("usable_mib", "hbm_gib", "hbm_gb")
_FITS = ("gemm", "gemm_fp8", "grouped_gemm", "grouped_gemm_fp8", "attention", "dispatch")
_NOT_VALUES = ("name", "device", "recognised_by", "sources", "assumed", "left_out_errors", *_MEMORY)
# Their defaults say "nothing special here" and change no figure.
_PLAIN = ("mxfp8", "network_name", "scale_up_size", "network_domain_gbyte_per_s")


def load_cluster(source: str | Path) -> Machine:
    """Read a cluster: a preset's name, or the path of a YAML or JSON file.

    Parameters
    ----------
    source : str or Path
        `h100-sxm`, or `my-cluster.yaml`.

    Returns
    -------
    Machine
        In SI units. `assumed` names what the file left to defaults or marks as an assumption.

    Notes
    -----
    A1. Memory given in GB counts 10^9 bytes each: less than the driver reports, on the safe side.

    Raises
    ------
    SpecError
        When the source is neither a preset nor a file, or the file has faults (all are named at once).
    """
    path = locate("clusters", source)
    return machine_of(validate(ClusterFile, read_mapping(path), path.name), path.name)


def machine_of(file: ClusterFile, where: str) -> Machine:
    """Convert a checked cluster file to SI units and fill what it leaves out.

    Parameters
    ----------
    file : ClusterFile
        What was read.
    where : str
        The file's name, which is the origin of values that name no other.

    Returns
    -------
    Machine
        In SI units.
    """
    return Machine(
        name=file.name,
        device=file.device or file.name,
        device_memory_bytes=_memory_bytes(file),
        peak_bf16_flops_per_s=tflops_to_flops_per_s(file.bf16_tflops),
        peak_fp8_flops_per_s=tflops_to_flops_per_s(file.fp8_tflops),
        mxfp8=file.mxfp8,
        fused_dispatchers=file.fused_dispatchers,
        hbm_bytes_per_s=tb_to_bytes_per_s(file.hbm_tb_per_s),
        sm_count=file.sm_count,
        sustained_ratio=file.sustained_ratio,
        devices_per_domain=file.devices_per_domain,
        levels=(_scale_up(file), _network(file)),
        gemm=_gemm_fit(rules.gemm(file), file.sm_count),
        gemm_fp8=_gemm_fit(rules.gemm_fp8(file), file.sm_count),
        grouped_gemm=_grouped_fit(rules.grouped_gemm(file)),
        grouped_gemm_fp8=_grouped_fit(rules.grouped_gemm_fp8(file)),
        attention=_attention_fit(rules.attention(file)),
        dispatch=_dispatch_fit(rules.dispatch(file)),
        collectives=tuple(_collective_fit(entry) for entry in rules.collectives(file)),
        reserve_bytes=rules.reserve_bytes(file, _memory_bytes(file)),
        assumed=_assumed(file),
        sources=_sources(file, where),
        provenance=_provenance(file),
        left_out_errors=left_out_bands(file.left_out_errors),
    )


def _memory_bytes(file: ClusterFile) -> int:
    """Device memory in bytes, from the one key that gives it."""
    if file.usable_mib is not None:
        return mib_to_bytes(file.usable_mib)
    return gib_to_bytes(file.hbm_gib) if file.hbm_gib is not None else gb_to_bytes(file.hbm_gb or 0.0)


def _scale_up(file: ClusterFile) -> Level:
    """Make the level inside a scale-up domain; its latency is that of the smallest all-to-all, one message each way."""
    entries = [entry for entry in rules.collectives(file) if entry.collective is Collective.ALL_TO_ALL]
    rate = gbyte_to_bytes_per_s(file.scale_up_gbyte_per_s)
    return Level(
        name="scale-up",
        size=file.scale_up_size or file.devices_per_domain,
        bytes_per_s=rate,
        efficiency_ratio=file.scale_up_efficiency_ratio,
        latency_s=us_to_s(min(entries, key=lambda entry: entry.ranks).latency_us),
        pair_bytes_per_s=gbyte_to_bytes_per_s(file.pair_gbyte_per_s) if file.pair_gbyte_per_s else rate,
        alltoall_efficiency_ratio=file.scale_up_efficiency_ratio,
    )


def _network(file: ClusterFile) -> Level:
    """Make the level that joins scale-up domains."""
    rate = gbit_to_bytes_per_s(file.nic_gbit_per_s)
    bound = file.network_domain_gbyte_per_s
    return Level(
        name=file.network_name,
        size=0,
        bytes_per_s=rate,
        efficiency_ratio=file.network_efficiency_ratio,
        latency_s=us_to_s(file.network_latency_us),
        pair_bytes_per_s=rate,
        alltoall_efficiency_ratio=file.network_alltoall_efficiency_ratio,
        domain_bytes_per_s=math.inf if bound is None else gbyte_to_bytes_per_s(bound),
    )


def _gemm_fit(section: GemmSection, sm_count: int) -> GemmFit:
    """Convert a dense GEMM to SI units."""
    return GemmFit(
        efficiency_ratio=section.efficiency_ratio,
        hbm_efficiency_ratio=section.hbm_efficiency_ratio,
        launch_s=us_to_s(section.launch_us),
        wgrad_ratio=section.wgrad_ratio,
        tile=None if section.tile is None else _tile_fit(section.tile),
        sm_count=sm_count,
    )


def _grouped_fit(section: GroupedGemmSection) -> GroupedGemmFit:
    """Convert a grouped GEMM to SI units."""
    return GroupedGemmFit(
        efficiency_ratio=section.efficiency_ratio,
        rows_half=section.rows_half,
        hbm_efficiency_ratio=section.hbm_efficiency_ratio,
        launch_s=us_to_s(section.launch_us),
        wgrad_rows=section.wgrad_rows,
        wgrad_ratios=section.wgrad_ratios,
        tile=None if section.tile is None else _tile_fit(section.tile),
    )


def _tile_fit(section: TileSection) -> TileFit:
    """Take the constants of tiles as they are."""
    return TileFit(overhead_width=section.overhead_width, small_tile_exponent=section.small_tile_exponent)


def _attention_fit(section: AttentionSection) -> AttentionFit:
    """Convert fused attention to SI units."""
    return AttentionFit(
        efficiency_ratio=section.efficiency_ratio,
        seq_half=section.seq_half,
        work_half=section.work_half,
        launch_s=us_to_s(section.launch_us),
        backward_time_ratio=section.backward_time_ratio,
        flash2_ratio=section.flash2_ratio,
    )


def _dispatch_fit(section: DispatchSection) -> DispatchFit:
    """Convert deduplicating dispatch to SI units."""
    return DispatchFit(
        scale_up_bytes_per_s=gbyte_to_bytes_per_s(section.scale_up_gbyte_per_s),
        network_bytes_per_s=gbyte_to_bytes_per_s(section.network_gbyte_per_s),
        dispatch_latency_s=us_to_s(section.dispatch_latency_us),
        combine_latency_s=us_to_s(section.combine_latency_us),
        sms=section.sms,
    )


def _collective_fit(entry: CollectiveEntry) -> CollectiveFit:
    """Convert one collective over one number of ranks to SI units."""
    return CollectiveFit(
        collective=entry.collective,
        ranks=entry.ranks,
        latency_s=us_to_s(entry.latency_us),
        bytes_per_s=gbyte_to_bytes_per_s(entry.gbyte_per_s),
        sqrt_s=ns_to_s(entry.sqrt_ns),
    )


def _value_keys() -> tuple[str, ...]:
    """Keys of a cluster file that hold values with an origin, memory apart."""
    return tuple(key for key in ClusterFile.model_fields if key not in _NOT_VALUES)


def _missing_collectives(file: ClusterFile) -> tuple[str, ...]:
    """Name the collectives that the file says nothing about, as `collectives.all_gather`."""
    given = {entry.collective for entry in file.collectives}
    return tuple(f"collectives.{collective}" for collective in Collective if collective not in given)


def _assumed(file: ClusterFile) -> tuple[str, ...]:
    """Keys filled by a default, section keys after their dot, and keys that the file itself calls assumptions.

    Constants of fp8 are left out where the device has none.
    """
    silent = (
        *file.model_fields_set,
        *_PLAIN,
        "collectives",
        *(() if file.fp8_tflops else ("gemm_fp8", "grouped_gemm_fp8")),
    )
    absent = [key for key in _value_keys() if key not in silent]
    inner: list[str] = []
    for name in _FITS:
        section = getattr(file, name)
        if section is not None:
            fields = type(section).model_fields
            silent_keys = (
                section.model_fields_set | {"provenance", "tile"} | ({"rows_half"} if _tiled(section) else set())
            )
            inner += [f"{name}.{key}" for key in fields if key not in silent_keys]
    memory = ("hbm_gb",) if file.hbm_gb is not None and "hbm_gb" not in file.assumed else ()
    return (*file.assumed, *memory, *absent, *inner, *_missing_collectives(file))


def _tiled(section: BaseModel) -> bool:
    """Whether a section has constants of tiles, which stand in for others."""
    return getattr(section, "tile", None) is not None


def _sources(file: ClusterFile, where: str) -> tuple[tuple[str, str], ...]:
    """Origin of every value: what the file cites, the file itself, or the rule that filled it."""
    keys = (*(key for key in _MEMORY if key in file.model_fields_set), *_value_keys())
    origins = []
    for key in keys:
        stated = file.sources.get(key, where)
        origins.append((key, stated if key in file.model_fields_set else f"default: {rules.REASONS[key]}"))
    return tuple(origins)


def _provenance(file: ClusterFile) -> tuple[tuple[str, str], ...]:
    """Per fit and per collective: calibrated, derived or default; one derived entry makes a collective derived."""
    said = [(name, getattr(file, name).provenance if getattr(file, name) else "default") for name in _FITS]
    for collective in Collective:
        kinds = {entry.provenance for entry in file.collectives if entry.collective is collective}
        word = "derived" if "derived" in kinds else "calibrated" if kinds else "default"
        said.append((f"collectives.{collective}", word))
    return tuple(said)
