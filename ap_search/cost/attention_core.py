"""Time of attention between its projections: fused kernels, or products around a softmax; seconds per micro-batch."""

from dataclasses import dataclass

from ap_search.cost.compute import attention_core_time_s, gemm_time_s
from ap_search.cost.context import CostContext
from ap_search.cost.shapes import Shapes
from ap_search.spec.blocks import Attention
from ap_search.spec.software import AttentionKernel
from ap_search.units import Quantity

# Bytes per score that unfused attention moves besides its products, 16-bit scores and a byte of dropout mask: softmax
# (read, write) and dropout (read, write, mask) forward; their gradients (read twice and write; read, mask, write) back.
SOFTMAX_FORWARD_BYTES, SOFTMAX_BACKWARD_BYTES = 9, 11
# Tensor cores take operands whose rows are whole multiples of 16 bytes; other widths go through slower kernels.
ALIGNED_WIDTH = 8
UNALIGNED_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoreTime:
    """Seconds of attention between its projections on one rank: forward, backward."""

    forward_s: Quantity
    backward_s: Quantity


def core_time(context: CostContext, attention: Attention, shapes: Shapes) -> CoreTime:
    """Time of attention between its projections on one rank, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Machine, the software's attention kernel.
    attention : Attention
        Heads, widths, window, indexer.
    shapes : Shapes
        Tokens, tensor and context parallelism.

    Returns
    -------
    CoreTime
        Fused: `attention_core_time_s` and its backward ratio; FlashAttention-2 at the device's share of that. Unfused:
        `unfused_core_time`.

    Notes
    -----
    A1. Sparse attention that picks `index_topk` keys is priced as a window of that many keys plus its indexer's
        products.

    A2. Attention waits for exponentials as much as for products: the power limit that slows products does not bind.

    Source: docs/cost-model/compute.md.
    """
    kernel, fit = context.software.attention_kernel, context.machine.attention
    if kernel is AttentionKernel.UNFUSED:
        return unfused_core_time(context, attention, shapes)
    reached = context.software.attention_efficiency_ratio
    reached *= fit.flash2_ratio if kernel is AttentionKernel.FLASH2 else 1.0
    forward = _fused_core_s(context, attention, shapes) / reached
    return CoreTime(forward_s=forward, backward_s=forward * fit.backward_time_ratio)


def unfused_core_time(context: CostContext, attention: Attention, shapes: Shapes) -> CoreTime:
    """Time of attention as products around a masked softmax with dropout, seconds per micro-batch.

    Parameters
    ----------
    context, attention, shapes
        As for `core_time`.

    Returns
    -------
    CoreTime
        Two products per head forward and four backward over the whole square of scores, each bound by peak or memory;
        softmax and dropout move 9 bytes per score forward, 11 backward.

    Notes
    -----
    A1. The mask is applied to the square: neither causality nor a window saves work.
    A2. Widths of a head that are no multiple of 8 elements reach a quarter of the products' speed (assumption).

    Source: Korthikanti et al. 2022, section 4.1 (what attention keeps: scores, softmax, mask); NVIDIA/Megatron-LM v2
    `megatron/model/transformer.py` CoreAttention, `fused_kernels/scaled_masked_softmax`; NVIDIA, Matrix Multiplication
    Background (alignment to 16 bytes).
    """
    keys = shapes.seq_len / shapes.cp
    calls = shapes.mbs * attention.num_heads / shapes.tp * shapes.cp
    rates = context.exact_rates

    def product_s(width: int) -> Quantity:
        one = gemm_time_s(
            rates.fit,
            peak_flops_per_s=rates.peak_flops_per_s,
            hbm_bytes_per_s=rates.hbm_bytes_per_s,
            m=keys,
            n=keys,
            k=float(width),
        )
        slow = 1.0 if width % ALIGNED_WIDTH == 0 else UNALIGNED_RATIO
        return (one - rates.fit.launch_s) * calls / slow

    products = product_s(attention.qk_head_dim) + product_s(attention.v_head_dim)
    scores = calls * keys * keys
    return CoreTime(
        forward_s=products + context.memory_bound_s(SOFTMAX_FORWARD_BYTES * scores),
        backward_s=2.0 * products + context.memory_bound_s(SOFTMAX_BACKWARD_BYTES * scores),
    )


def _fused_core_s(context: CostContext, attention: Attention, shapes: Shapes) -> Quantity:
    """Forward of a fused kernel alone on the device, with the indexer of sparse attention as products of its own."""
    reach = min((limit for limit in (attention.window, attention.index_topk) if limit), default=0)
    core = attention_core_time_s(
        context.machine,
        sequences=shapes.mbs,
        heads=attention.num_heads / shapes.tp,
        seq_len=shapes.seq_len,
        cp=shapes.cp,
        qk_head_dim=attention.qk_head_dim,
        v_head_dim=attention.v_head_dim,
        window=reach,
    )
    if not attention.index_heads or shapes.seq_len <= attention.index_topk:
        return core
    index = attention_core_time_s(
        context.machine,
        sequences=shapes.mbs,
        heads=float(attention.index_heads),
        seq_len=shapes.seq_len,
        cp=shapes.cp,
        qk_head_dim=attention.index_head_dim,
        v_head_dim=0,
        window=0,
    )
    return core + index
