"""Grouped GEMM: the experts of one rank, each with its own rows; seconds from rows per expert."""

import numpy as np

from ap_search.spec.machine import GroupedGemmFit
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity


def _roofline_s(
    fit: GroupedGemmFit,
    *,
    peak_flops_per_s: float,
    hbm_bytes_per_s: float,
    flops: Quantity,
    per_expert: Quantity,
    efficiency_scale: Quantity,
    moved_bytes: Quantity,
) -> Quantity:
    """Join compute and memory time by a 4-norm, as the fit does; no rows take no compute time."""
    per_row = np.where(per_expert > 0, flops / np.maximum(per_expert, 1e-9), 0.0)
    compute = per_row * (per_expert + fit.rows_half) / (peak_flops_per_s * fit.efficiency_ratio * efficiency_scale)
    traffic = moved_bytes / (hbm_bytes_per_s * fit.hbm_efficiency_ratio)
    squares = compute * compute * compute * compute + traffic * traffic * traffic * traffic
    return np.sqrt(np.sqrt(squares)) + fit.launch_s


def grouped_gemm_time_s(
    fit: GroupedGemmFit,
    *,
    peak_flops_per_s: float,
    hbm_bytes_per_s: float,
    experts: Quantity,
    rows: Quantity,
    n: Quantity,
    k: Quantity,
) -> Quantity:
    """Time of one m-grouped GEMM (forward or input gradient) over the experts of one rank, seconds.

    Parameters
    ----------
    fit : GroupedGemmFit
        Plateau efficiency, rows per expert at which half of it is reached, memory efficiency, launch cost.
    peak_flops_per_s, hbm_bytes_per_s : float
        Specification peak of the operands' precision; memory bandwidth.
    experts, rows, n, k : Quantity
        Local experts; rows (token copies) of all of them; columns; inner width.

    Returns
    -------
    Quantity
        `(compute^4 + traffic^4)^(1/4) + t0` with efficiency `e r/(r + r0)` at r = rows per expert; weights are read
        once per expert.

    Notes
    -----
    A1. Rows spread evenly over the experts of the rank (a rank's own skew changes its tiles, not its FLOPs).
    A2. FLOPs do not depend on how many ranks share the experts.

    Source: aiconfigurator MoE tables, bf16, rows per rank >= 1024 (median error 5.8 % on H100, 8.6 % on B200).
    """
    per_expert = rows / experts
    return _roofline_s(
        fit,
        peak_flops_per_s=peak_flops_per_s,
        hbm_bytes_per_s=hbm_bytes_per_s,
        flops=2.0 * rows * n * k,
        per_expert=per_expert,
        efficiency_scale=1.0,
        moved_bytes=BF16_BYTES * (rows * k + rows * n + experts * n * k),
    )


def grouped_gemm_weight_gradient_time_s(
    fit: GroupedGemmFit,
    *,
    peak_flops_per_s: float,
    hbm_bytes_per_s: float,
    experts: Quantity,
    rows: Quantity,
    n: Quantity,
    k: Quantity,
) -> Quantity:
    """Time of the k-grouped GEMM that makes the experts' weight gradients, seconds.

    Parameters
    ----------
    fit, peak_flops_per_s, hbm_bytes_per_s, experts, rows, n, k
        As for `grouped_gemm_time_s`, of the forward GEMM.

    Returns
    -------
    Quantity
        The same with efficiency times a ratio that grows with rows per expert, and fp32 read and write of the result.

    Notes
    -----
    A1. The inner dimension is the expert's rows, so few rows hurt more than in the forward.

    Source: SimuMax B200 tables: 0.56, 0.69, 0.73, 0.76, 0.83 of the forward efficiency at 128-256 .. 2048-4096 rows.
    """
    per_expert = rows / experts
    return _roofline_s(
        fit,
        peak_flops_per_s=peak_flops_per_s,
        hbm_bytes_per_s=hbm_bytes_per_s,
        flops=2.0 * rows * n * k,
        per_expert=per_expert,
        efficiency_scale=np.interp(per_expert, fit.wgrad_rows, fit.wgrad_ratios),
        moved_bytes=BF16_BYTES * (rows * k + rows * n) + 2 * FP32_BYTES * experts * n * k,
    )
