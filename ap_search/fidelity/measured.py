"""What a run measured, made comparable: seconds of a step from any printed speed, memory of the stage it names."""

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.flops import reported_flops_per_token
from ap_search.fidelity.records import MemoryComparison
from ap_search.plan.plan import Plan, Recompute
from ap_search.spec.cluster_defaults import RESERVE_GIB
from ap_search.spec.run import MemoryKind, MemoryReading, MemoryStage, Run
from ap_search.units import gib_to_bytes

FloatArray = NDArray[np.float64]


def measured_step_s(run: Run, plan: Plan) -> float | None:
    """Seconds of a step that a run measured, or None where it names no speed.

    Parameters
    ----------
    run : Run
        What was printed.
    plan : Plan
        Its plan, for what is recomputed.

    Returns
    -------
    float or None

    Notes
    -----
    A1. TFLOP/s and MFU are turned into seconds by the rule that the run names; MFU is a share of the bf16 peak.
    """
    measured = run.measured
    if not measured.has_time:
        return None
    if measured.step_time_s is not None:
        return measured.step_time_s
    tokens = run.global_batch * run.seq_len / run.devices
    if measured.tokens_per_s_per_device is not None:
        return tokens / measured.tokens_per_s_per_device
    rate = measured.flops_per_s_per_device
    if rate is None:
        rate = (measured.mfu_ratio or 0.0) * run.machine.peak_bf16_flops_per_s
    count = reported_flops_per_token(
        run.model,
        run.seq_len,
        rule=measured.flops_rule,
        mtp=measured.flops_mtp,
        full_recompute=Recompute.FULL in plan.recompute,
    )
    return tokens * count / rate


def compare_memory(
    reading: MemoryReading, stage_bytes: FloatArray, *, reserve_bytes: int, fragmentation_ratio: float
) -> MemoryComparison | None:
    """Compare one reading with the prediction for the same stage, bytes; None where no stage of it is known.

    Parameters
    ----------
    reading : MemoryReading
        What was printed.
    stage_bytes : FloatArray
        Predicted bytes of each stage, the reserve included, shape (pp,).
    reserve_bytes : int
        The reserve.
    fragmentation_ratio : float
        What the allocator keeps beyond what is allocated, a share of it, 0..1.

    Returns
    -------
    MemoryComparison or None

    Notes
    -----
    A1. Allocated memory is compared without the reserve; reserved memory with the allocator's share on top of what is
    allocated; what nvidia-smi shows with context and communicators besides.
    """
    sizes = stage_bytes - reserve_bytes
    if reading.kind is not MemoryKind.ALLOCATED:
        sizes = sizes * (1.0 + fragmentation_ratio)
    if reading.kind is MemoryKind.NVIDIA_SMI:
        sizes = sizes + gib_to_bytes(RESERVE_GIB)
    stages: tuple[tuple[int, int, float], ...] = ()
    if reading.stage is MemoryStage.LIST:
        pairs = zip(reading.stage_bytes, sizes.tolist(), strict=False)
        stages = tuple((stage, known, size) for stage, (known, size) in enumerate(pairs) if known)
        predicted = max((size for _, _, size in stages), default=0.0)
    else:
        predicted = float(_stage(reading.stage, sizes))
    if not predicted or not reading.peak_bytes:
        return None
    return MemoryComparison(
        kind=reading.kind,
        stage=reading.stage,
        measured_bytes=reading.peak_bytes,
        predicted_bytes=predicted,
        stages=stages,
    )


def _stage(stage: MemoryStage, sizes: FloatArray) -> float:
    """Choose what a reading means."""
    if stage is MemoryStage.FIRST:
        return float(sizes[0])
    if stage is MemoryStage.LAST:
        return float(sizes[-1])
    return float(max(sizes[0], sizes[-1]) if stage is MemoryStage.ENDS else sizes.max())
