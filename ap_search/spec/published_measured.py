"""What a published run measured: speeds and peaks in SI units, their kinds read out of a source's words."""

from ap_search.spec.published_file import MeasuredRow, PublishedRun
from ap_search.spec.run import FlopsRule, Measured, MemoryKind, MemoryReading, MemoryStage
from ap_search.units import gib_to_bytes, mib_to_bytes, tflops_to_flops_per_s


def published_measured(row: PublishedRun, *, devices: int, pp: int, assumed: list[str]) -> Measured:
    """Read what a row measured.

    Parameters
    ----------
    row : PublishedRun
        Its words and figures.
    devices, pp : int
        Devices and pipeline stages of the run: ranks of one stage follow each other.
    assumed : list of str
        One line is added per figure that was converted or whose meaning is assumed.

    Returns
    -------
    Measured

    Notes
    -----
    A1. Sources write GB for GiB; a peak of unknown kind counts tensors, of an unknown stage the fullest.
    """
    said = row.measured
    # A figure of zero is one that nobody measured.
    tokens = said.tokens_per_s_per_gpu or None
    if tokens is None and said.samples_per_s_per_gpu and row.seq_len:
        tokens = said.samples_per_s_per_gpu * row.seq_len
    step = said.step_time_s or None
    if step is None and tokens is None and row.derived.step_time_s:
        step = row.derived.step_time_s
        assumed.append("time: derived by the collector, not printed")
    rule = _rule(said)
    if step is None and tokens is None and (said.tflops_per_gpu or said.mfu):
        stated = said.flops_rule and "not stated" not in said.flops_rule
        printed = "TFLOP/s" if said.tflops_per_gpu else "MFU"
        assumed.append(f"time: from {printed}, {rule} rule{'' if stated else ' assumed'}")
    return Measured(
        step_time_s=step,
        tokens_per_s_per_device=tokens,
        flops_per_s_per_device=tflops_to_flops_per_s(said.tflops_per_gpu) if said.tflops_per_gpu else None,
        mfu_ratio=said.mfu or None,
        flops_rule=rule,
        flops_mtp="MTP left out" not in said.flops_rule,
        memory=_memory(said, devices=devices, pp=pp, assumed=assumed),
        oom=said.oom,
        failed=bool(said.failed),
    )


def _rule(said: MeasuredRow) -> FlopsRule:
    """What TFLOP/s and MFU count."""
    if "hardware" in said.flops_rule:
        return FlopsRule.HARDWARE
    return FlopsRule.FULL_ATTENTION if "full attention" in said.flops_rule else FlopsRule.CAUSAL_HALVED


def _memory(said: MeasuredRow, *, devices: int, pp: int, assumed: list[str]) -> tuple[MemoryReading, ...]:
    """Every peak that the row prints, the one that stands for the run first."""
    readings: list[MemoryReading] = []
    by_rank = said.peak_alloc_by_rank_mib or {}
    if len(by_rank) == devices and devices % pp == 0:
        ranks = [mib_to_bytes(by_rank[rank]) for rank in sorted(by_rank, key=int)]
        each = devices // pp
        stages = tuple(max(ranks[stage * each : (stage + 1) * each]) for stage in range(pp))
        readings.append(
            MemoryReading(kind=MemoryKind.ALLOCATED, stage=MemoryStage.LIST, peak_bytes=max(stages), stage_bytes=stages)
        )
    elif said.peak_mem_gb:
        if said.mem_unit != "GiB":
            assumed.append(f"memory unit: {said.mem_unit or 'not stated'}, read as GiB")
        peak = gib_to_bytes(said.peak_mem_gb)
        readings.append(MemoryReading(kind=_kind(said, assumed), stage=_stage(said, pp, assumed), peak_bytes=peak))
    if said.peak_reserved_gb:
        peak = gib_to_bytes(said.peak_reserved_gb)
        readings.append(MemoryReading(kind=MemoryKind.RESERVED, stage=MemoryStage.MAX, peak_bytes=peak))
    return tuple(readings)


def _kind(said: MeasuredRow, assumed: list[str]) -> MemoryKind:
    """What a peak counts."""
    words = f"{said.mem_kind} {said.mem_unit}".lower()
    if "nvidia-smi" in words:
        return MemoryKind.NVIDIA_SMI
    if "reserved" in words:
        return MemoryKind.RESERVED
    if "alloc" not in words:
        assumed.append(f"memory kind: {said.mem_kind or 'not stated'}, read as allocated")
    return MemoryKind.ALLOCATED


def _stage(said: MeasuredRow, pp: int, assumed: list[str]) -> MemoryStage:
    """Which pipeline stage a peak belongs to."""
    words = said.mem_kind.lower()
    if "first/last" in words:
        return MemoryStage.ENDS
    if "last" in words:
        return MemoryStage.LAST
    if "first" in words or "rank-0" in words:
        return MemoryStage.FIRST
    if "max over" not in words and pp > 1:
        assumed.append("memory stage: not stated, the fullest")
    return MemoryStage.MAX
