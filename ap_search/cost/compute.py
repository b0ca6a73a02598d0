"""Compute kernels: dense GEMM, fused attention, element-wise traffic; seconds from shapes, broadcasting over plans."""

import numpy as np

from ap_search.cost.tiles import tiled_s
from ap_search.spec.machine import AttentionFit, GemmFit, Machine
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity

ATTENTION_TILE_ROWS = 128
# Heads narrower than 128 leave products waiting for exponentials: d/(d + 54.5), 1 at 128.
FULL_HEAD_DIM, HEAD_DIM_HALF = 128.0, 54.5


def gemm_time_s(
    fit: GemmFit, *, peak_flops_per_s: float, hbm_bytes_per_s: float, m: Quantity, n: Quantity, k: Quantity
) -> Quantity:
    """Time of one forward (or input-gradient) GEMM of shape (m, k) x (k, n), seconds.

    Parameters
    ----------
    fit : GemmFit
        Efficiency of the peak, of the memory, and a fixed cost per launch.
    peak_flops_per_s, hbm_bytes_per_s : float
        Specification peak of the operands' precision; memory bandwidth.
    m, n, k : Quantity
        Rows (tokens), columns, inner width; elements, >= 0, broadcastable.

    Returns
    -------
    Quantity
        `max(2mnk / (P e), 2(mk + kn + mn) / (B h)) + t0`, the first term in tiles where there is a fit of them.

    Notes
    -----
    A1. 16-bit operands and result for the memory term, whatever the precision of the product.
    A2. In whole tiles and waves where the machine has a tile fit, smoothly otherwise.

    Source: constants fitted on the aiconfigurator GEMM tables (m, n, k >= 512; median error 4.6 % on H100, 5.2 % on
    A100, 5.7 % on B200, held-out shapes); input gradients run at forward efficiency (SimuMax tables: 0.739 against
    0.738).
    """
    compute = _compute_s(fit, peak_flops_per_s * fit.efficiency_ratio, m=m, n=n, inner=k)
    traffic = BF16_BYTES * (m * k + k * n + m * n) / (hbm_bytes_per_s * fit.hbm_efficiency_ratio)
    return np.maximum(compute, traffic) + fit.launch_s


def gemm_weight_gradient_time_s(
    fit: GemmFit, *, peak_flops_per_s: float, hbm_bytes_per_s: float, m: Quantity, n: Quantity, k: Quantity
) -> Quantity:
    """Time of the weight-gradient GEMM (k, m) x (m, n) that accumulates in fp32, seconds.

    Parameters
    ----------
    fit, peak_flops_per_s, hbm_bytes_per_s, m, n, k
        As for `gemm_time_s`, of the forward GEMM whose weight this is.

    Returns
    -------
    Quantity
        The same roofline with efficiency `e * wgrad_ratio` and fp32 read and write of the (k, n) result.

    Notes
    -----
    A1. Gradients accumulate into an fp32 buffer (Megatron-LM's gradient accumulation fusion).

    Source: SimuMax tables, median efficiency of NT against TN layout (A100 0.704/0.738, B200 0.476/0.491).
    """
    compute = _compute_s(fit, peak_flops_per_s * fit.efficiency_ratio * fit.wgrad_ratio, m=k, n=n, inner=m)
    traffic = (BF16_BYTES * (m * k + m * n) + 2 * FP32_BYTES * k * n) / (hbm_bytes_per_s * fit.hbm_efficiency_ratio)
    return np.maximum(compute, traffic) + fit.launch_s


def _compute_s(fit: GemmFit, flops_per_s: float, *, m: Quantity, n: Quantity, inner: Quantity) -> Quantity:
    """Seconds that the products of one (m, inner) x (inner, n) GEMM take."""
    if fit.tile is None:
        return 2.0 * m * n * inner / flops_per_s
    width = inner + fit.tile.overhead_width
    return tiled_s(fit.tile, flops_per_s=flops_per_s, sm_count=fit.sm_count, groups=1.0, m=m, n=n, inner=width)


def attended_pairs(seq_len: Quantity, window: Quantity) -> Quantity:
    """Query-key pairs of one causal sequence, counted as Megatron-LM does (half the square); a count.

    Parameters
    ----------
    seq_len : Quantity
        Tokens of the whole sequence.
    window : Quantity
        Keys a query sees at most; 0 for all earlier ones.

    Returns
    -------
    Quantity
        `s^2/2`, or `w s - w^2/2` where 0 < w < s.
    """
    width = np.where((window > 0) & (window < seq_len), window, seq_len)
    return width * seq_len - width * width / 2.0


def attention_core_time_s(
    machine: Machine,
    *,
    sequences: Quantity,
    heads: Quantity,
    seq_len: Quantity,
    cp: Quantity,
    qk_head_dim: Quantity,
    v_head_dim: Quantity,
    window: Quantity,
) -> Quantity:
    """Forward time of fused causal attention on one rank, seconds.

    Parameters
    ----------
    machine : Machine
        Its bf16 peak, multiprocessors and attention fit are used.
    sequences, heads, seq_len, cp : Quantity
        Sequences of the micro-batch, query heads on this rank, tokens of a whole sequence, context-parallel ranks.
    qk_head_dim, v_head_dim, window : Quantity
        Width of a query head and of a value head; keys seen at most (0: all).

    Returns
    -------
    Quantity
        FLOPs over `peak * e * x/(x + s0) * u/(u + w0)`, plus the launch cost; x is the sequence, or twice the mean
        number of keys where a window cuts it; u the 128-row tiles per multiprocessor. Heads of d < 128 reach
        `d/(d + 54.5)` over its value at 128.

    Notes
    -----
    A1. Context parallelism splits the pairs evenly (Megatron's zigzag order) and runs `cp` smaller kernels, each of
        which sees the keys of one rank only and reaches the efficiency of such a short sequence.
    A2. Backward takes `backward_time_ratio` times the forward (five products against two at lower efficiency).

    Source: aiconfigurator context-attention tables (median error 1.6 to 5.7 %); head widths: FlashAttention-3, arXiv
    2407.08608, figure 5 (causal, 16k tokens: 473, 616, 642 TFLOP/s at 64, 128, 256); backward ratio 2.95 (A100), 2.99
    (B200) from SimuMax's tables.
    """
    fit: AttentionFit = machine.attention
    pairs = attended_pairs(seq_len, window)
    flops = 2.0 * sequences * heads * pairs * (qk_head_dim + v_head_dim) / cp
    reach = 2.0 * pairs / seq_len / cp
    work = sequences * heads * np.ceil(seq_len / cp / ATTENTION_TILE_ROWS) / machine.sm_count
    width = np.minimum((qk_head_dim + np.where(np.greater(v_head_dim, 0), v_head_dim, qk_head_dim)) / 2, FULL_HEAD_DIM)
    narrow = width / (width + HEAD_DIM_HALF) * (FULL_HEAD_DIM + HEAD_DIM_HALF) / FULL_HEAD_DIM
    efficiency = fit.efficiency_ratio * reach / (reach + fit.seq_half) * work / (work + fit.work_half) * narrow
    return flops / (machine.peak_bf16_flops_per_s * efficiency) + fit.launch_s * cp


def elementwise_time_s(machine: Machine, efficiency_ratio: float, size_bytes: Quantity) -> Quantity:
    """Time of an operator bound by memory traffic, seconds: bytes read and written over reached bandwidth.

    Parameters
    ----------
    machine : Machine
        Its memory bandwidth is used.
    efficiency_ratio : float
        Share of the specification that streaming kernels reach, 0..1.
    size_bytes : Quantity
        Bytes read plus bytes written.

    Returns
    -------
    Quantity
        Seconds, without launch cost.

    Notes
    -----
    A1. Each tensor moves once; caches hold nothing from one operator to the next.

    Source: device copy of an H200 reaches 4.3 of 4.8 TB/s read plus write (90 %); fitted GEMM memory terms give 0.7 to
    0.8.
    """
    return size_bytes / (machine.hbm_bytes_per_s * efficiency_ratio)
