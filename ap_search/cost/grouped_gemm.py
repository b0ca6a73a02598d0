"""Grouped GEMM: the experts of one rank, each with its own rows; seconds from rows per expert, in tiles and waves."""

from dataclasses import dataclass

import numpy as np

from ap_search.cost.tiles import tiled_s
from ap_search.spec.machine import GroupedGemmFit, TileFit
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRates:
    """What grouped GEMMs of one precision reach on one machine."""

    fit: GroupedGemmFit
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    sm_count: int
    operand_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedGemm:
    """Shape of the forward GEMM of each of `experts` local experts: `rows` of all of them, columns n, inner width k."""

    experts: Quantity
    rows: Quantity
    n: Quantity
    k: Quantity


def grouped_gemm_flops(gemm: GroupedGemm) -> Quantity:
    """Floating-point operations of one grouped GEMM, whichever of forward and both gradients; a count.

    Parameters
    ----------
    gemm : GroupedGemm
        Shape.

    Returns
    -------
    Quantity
        `2 rows n k`: how many experts share the rows, and how many ranks the experts, does not matter.

    Source: 2 operations per multiply-add.
    """
    return 2.0 * gemm.rows * gemm.n * gemm.k


def grouped_gemm_bytes(gemm: GroupedGemm, *, operand_bytes: int) -> Quantity:
    """Bytes that one grouped GEMM reads and writes: each expert's weight once, inputs, bf16 outputs.

    Parameters
    ----------
    gemm : GroupedGemm
        Shape.
    operand_bytes : int
        Bytes per element of inputs and weights (2 in bf16, 1 in fp8).

    Returns
    -------
    Quantity
        `operand (rows k + experts n k) + 2 rows n`.

    Source: deepseek-ai/DeepGEMM README tables (bandwidth column).
    """
    read = gemm.rows * gemm.k + gemm.experts * gemm.n * gemm.k
    return operand_bytes * read + BF16_BYTES * gemm.rows * gemm.n


def aligned_rows(rows: Quantity, alignment: int) -> Quantity:
    """Rows of each expert after padding to whole multiples of an alignment, counts.

    Parameters
    ----------
    rows : Quantity
        Rows of each expert.
    alignment : int
        1 in bf16; 16 in fp8, 32 in mxfp8; 128 in DeepGEMM's contiguous layout on Hopper.

    Returns
    -------
    Quantity
        100, 128, 129, 300 become 112, 128, 144, 304 at 16.

    Source: Megatron-LM d98e8a64 `moe_utils.py` (get_align_size_for_quantization).
    """
    return np.ceil(np.divide(rows, alignment)) * alignment


def grouped_gemm_time_s(rates: GroupedRates, gemm: GroupedGemm) -> Quantity:
    """Time of one m-grouped GEMM (forward or input gradient) over the experts of one rank, seconds.

    Parameters
    ----------
    rates : GroupedRates
        Fitted constants, peaks, multiprocessors, operand size.
    gemm : GroupedGemm
        Shape; for an input gradient with n and k exchanged.

    Returns
    -------
    Quantity
        `(compute^4 + traffic^4)^(1/4) + t0`. Compute in tiles: the fastest tile's waves over all multiprocessors, each
        tile `2 bm bn (k + k0)` operations at efficiency `e (bm bn / 32768)^q`. Where the machine has no tile fit,
        efficiency is `e r/(r + r0)` at r = rows per expert.

    Notes
    -----
    A1. Rows spread evenly over the experts of the rank (a rank's own skew changes its tiles, not its FLOPs).
    A2. A tile that is not full costs as much as a full one; weights are read once per expert.

    Source: our fits on ai-dynamo/aiconfigurator MoE tables, docs/cost-model/grouped-gemm.md.
    """
    per_expert = np.divide(gemm.rows, gemm.experts)
    tile = rates.fit.tile
    if tile is None:
        compute = _saturated_s(rates, gemm, per_expert=per_expert, scale=1.0)
    else:
        compute = _tiled_s(rates, tile, groups=gemm.experts, m=per_expert, n=gemm.n, inner=gemm.k + tile.overhead_width)
    return _joined_s(rates, compute, grouped_gemm_bytes(gemm, operand_bytes=rates.operand_bytes))


def grouped_gemm_weight_gradient_time_s(rates: GroupedRates, gemm: GroupedGemm) -> Quantity:
    """Time of the k-grouped GEMM that makes the experts' weight gradients, seconds.

    Parameters
    ----------
    rates, gemm
        As for `grouped_gemm_time_s`, of the forward GEMM.

    Returns
    -------
    Quantity
        Tiles cover each expert's (n, k) weight, the inner width is its rows; efficiency is the forward's times a ratio
        that grows with rows per expert. fp32 read and write of the result.

    Notes
    -----
    A1. The inner dimension is the expert's rows, so few rows hurt more than in the forward: the ratio says how much.

    Source: MooreThreads/SimuMax B200 tables, 0.56, 0.69, 0.73, 0.76, 0.83 of the forward's efficiency at 128-256 ..
    2048-4096 rows; the dense ratio beyond.
    """
    per_expert, tile = np.divide(gemm.rows, gemm.experts), rates.fit.tile
    ratio = np.interp(per_expert, rates.fit.wgrad_rows, rates.fit.wgrad_ratios)
    if tile is None:
        compute = _saturated_s(rates, gemm, per_expert=per_expert, scale=ratio)
    else:
        inner = per_expert * (1.0 + np.divide(tile.overhead_width, gemm.k))
        compute = _tiled_s(rates, tile, groups=gemm.experts, m=gemm.n, n=gemm.k, inner=inner) / ratio
    read = rates.operand_bytes * gemm.rows * (gemm.k + gemm.n)
    return _joined_s(rates, compute, read + 2 * FP32_BYTES * gemm.experts * gemm.n * gemm.k)


def _saturated_s(rates: GroupedRates, gemm: GroupedGemm, *, per_expert: Quantity, scale: Quantity) -> Quantity:
    """Compute time at an efficiency that saturates with rows per expert; no rows take none."""
    rate = rates.peak_flops_per_s * rates.fit.efficiency_ratio * scale
    saturation = np.where(per_expert > 0, 1.0 + rates.fit.rows_half / np.maximum(per_expert, 1e-9), 0.0)
    return grouped_gemm_flops(gemm) / rate * saturation


def _tiled_s(
    rates: GroupedRates, tile: TileFit, *, groups: Quantity, m: Quantity, n: Quantity, inner: Quantity
) -> Quantity:
    """Compute time of `groups` products (m, inner) x (inner, n), by the fastest tile."""
    rate = rates.peak_flops_per_s * rates.fit.efficiency_ratio
    return tiled_s(tile, flops_per_s=rate, sm_count=rates.sm_count, groups=groups, m=m, n=n, inner=inner)


def _joined_s(rates: GroupedRates, compute_s: Quantity, moved_bytes: Quantity) -> Quantity:
    """Join compute and memory time by a 4-norm, as the fits do, and add the launch."""
    traffic = moved_bytes / (rates.hbm_bytes_per_s * rates.fit.hbm_efficiency_ratio)
    compute, traffic = np.square(np.square(compute_s)), np.square(np.square(traffic))
    return np.sqrt(np.sqrt(compute + traffic)) + rates.fit.launch_s
