"""Time of the routed experts of one rank: fc1, activation, fc2 as grouped GEMMs, with casts and padding in fp8."""

from dataclasses import dataclass

from ap_search.cost.context import CostContext
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.ffn import activation_time_s
from ap_search.cost.grouped_gemm import (
    GroupedGemm,
    GroupedRates,
    grouped_gemm_time_s,
    grouped_gemm_weight_gradient_time_s,
)
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Precision
from ap_search.units import BF16_BYTES, Quantity

FP8_BYTES = 1
# Read in bf16, written in fp8 for the product at hand and transposed for the weight gradient.
CAST_BYTES_PER_ELEMENT = BF16_BYTES + 2 * FP8_BYTES
# Rows copied into padded ones and back: each a read and a write in bf16.
PADDING_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTime:
    """Seconds of the routed experts of one rank: forward, input gradients, weight gradients, activation forward."""

    forward_s: Quantity
    input_grad_s: Quantity
    weight_grad_s: Quantity
    activation_s: Quantity


def grouped_rates(context: CostContext) -> GroupedRates:
    """Choose what grouped GEMMs reach in the job's precision.

    Parameters
    ----------
    context : CostContext
        Machine, software, precision.

    Returns
    -------
    GroupedRates
        fp8 and mxfp8 share their constants.
    """
    wide = context.job.precision is Precision.BF16
    linear = context.linear_rates
    return GroupedRates(
        fit=context.machine.grouped_gemm if wide else context.machine.grouped_gemm_fp8,
        peak_flops_per_s=linear.peak_flops_per_s,
        hbm_bytes_per_s=linear.hbm_bytes_per_s,
        sm_count=context.machine.sm_count,
        operand_bytes=BF16_BYTES if wide else FP8_BYTES,
    )


def expert_gemms(moe: MoeFfn, shape: DispatchShape, rows: Quantity) -> tuple[GroupedGemm, GroupedGemm]:
    """Shapes of both products of the routed experts of one rank, forward.

    Parameters
    ----------
    moe : MoeFfn
        Expert width, gating.
    shape : DispatchShape
        Width that travels, expert-parallel degrees.
    rows : Quantity
        Rows of all local experts, padding included.

    Returns
    -------
    tuple of GroupedGemm
        fc1 and fc2; ETP cuts the inner width.

    Source: Megatron-LM d98e8a64 `experts.py` (TEGroupedMLP).
    """
    inner, experts = moe.expert_width / shape.etp, shape.local_experts
    first = GroupedGemm(experts=experts, rows=rows, n=inner * (2 if moe.gated else 1), k=shape.hidden)
    return first, GroupedGemm(experts=experts, rows=rows, n=shape.hidden, k=inner)


def expert_time(context: CostContext, moe: MoeFfn, shape: DispatchShape) -> ExpertTime:
    """Time of the routed experts of the worst rank, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Grouped-GEMM constants, precision.
    moe : MoeFfn
        Expert width, gating, latent width.
    shape : DispatchShape
        Rows of the worst rank, expert-parallel degrees.

    Returns
    -------
    ExpertTime
        fc1, activation, fc2 as grouped GEMMs over the local experts; in fp8 their inputs and output gradients are cast,
        and rows copied to be padded.

    Notes
    -----
    A1. In fp8 each expert's rows are padded to a multiple of 16, in mxfp8 of 32; the kernels do not skip what is
        padded.
    A2. In fp8 the inputs of each product are cast twice, for it and for its weight gradient; weights are cast once per
        step and not counted.

    Source: docs/cost-model/grouped-gemm.md; Megatron-LM d98e8a64 `experts.py` (TEGroupedMLP), `moe_utils.py`
    (get_align_size_for_quantization, skip_routed_expert_padding).
    """
    rows, rates = shape.aligned_rows, grouped_rates(context)
    first, second = expert_gemms(moe, shape, rows)
    forward = activation = activation_time_s(context, elements=rows * second.k, gated=moe.gated, backward=False)
    input_grad = activation_time_s(context, elements=rows * second.k, gated=moe.gated, backward=True)
    weight_grad: Quantity = 0.0
    for gemm in (first, second):
        turned = GroupedGemm(experts=gemm.experts, rows=rows, n=gemm.k, k=gemm.n)
        forward = forward + grouped_gemm_time_s(rates, gemm) + _cast_s(context, rows * gemm.k)
        input_grad = input_grad + grouped_gemm_time_s(rates, turned) + _cast_s(context, rows * gemm.n)
        weight_grad = weight_grad + grouped_gemm_weight_gradient_time_s(rates, gemm)
    copied_bytes = PADDING_COPIES * 2 * BF16_BYTES * rows * shape.hidden
    padding_s = context.memory_bound_s(shape.pads_by_copying * copied_bytes)
    return ExpertTime(
        forward_s=forward + padding_s,
        input_grad_s=input_grad + padding_s,
        weight_grad_s=weight_grad,
        activation_s=activation,
    )


def _cast_s(context: CostContext, elements: Quantity) -> Quantity:
    """Seconds of casting a bf16 tensor to fp8, both ways up; nothing in bf16."""
    if context.job.precision is Precision.BF16:
        return 0.0
    return context.memory_bound_s(CAST_BYTES_PER_ELEMENT * elements)
