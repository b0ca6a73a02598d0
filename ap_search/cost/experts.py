"""Time of the routed experts of one rank: fc1, activation, fc2 as grouped GEMMs, with casts and padding in fp8."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.ffn import activation_time_s
from ap_search.cost.grouped_gemm import (
    GroupedGemm,
    GroupedRates,
    grouped_gemm_time_s,
    grouped_gemm_weight_gradient_time_s,
)
from ap_search.cost.linear import Rates
from ap_search.cost.message import FP8_BYTES
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Precision
from ap_search.units import BF16_BYTES, Quantity

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Read in bf16, written in fp8 for the product at hand and transposed for the weight gradient.
CAST_BYTES_PER_ELEMENT = BF16_BYTES + 2 * FP8_BYTES
# Tensors of the inner width, in bf16, that clamping both inputs of the activation moves besides: forward two clamps
# (read, write) and their joint (2 read, 2 written); backward the joint cut, two clamps (gradient and input read, one
# written), and two halves put into whole gradients (zeros and a copy each) that are added.
CLAMP_FORWARD_WIDTHS, CLAMP_BACKWARD_WIDTHS = 8, 24
# Bytes per element of the output that adding biases weighted by fp32 probabilities moves: forward the product (4), the
# sum (2 + 4 + 4), the joint (8), the cast (6); backward the cast (6), gradients of sum (6), biases (12), weights (6).
BIAS_FORWARD_BYTES, BIAS_BACKWARD_BYTES = 28, 30
# Rows copied into padded ones and back: each a read and a write in bf16.
PADDING_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductTime:
    """Seconds of one product of the routed experts of one rank: forward, input gradients, weight gradients."""

    forward_s: Quantity
    input_grad_s: Quantity
    weight_grad_s: Quantity

    def take(self, rows: IntArray) -> "ProductTime":
        """Spread distinct shapes over plans."""
        return ProductTime(**{field.name: np.asarray(getattr(self, field.name))[rows] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTime:
    """Seconds of the routed experts of one rank: both products, the activation both ways, copies of rows either way."""

    fc1: ProductTime
    fc2: ProductTime
    activation_s: Quantity
    activation_backward_s: Quantity
    padding_s: Quantity

    @property
    def forward_s(self) -> Quantity:
        """Forward."""
        return self.activation_s + self.fc1.forward_s + self.fc2.forward_s + self.padding_s

    @property
    def input_grad_s(self) -> Quantity:
        """Backward but for weight gradients."""
        return self.activation_backward_s + self.fc1.input_grad_s + self.fc2.input_grad_s + self.padding_s

    @property
    def weight_grad_s(self) -> Quantity:
        """Weight gradients."""
        return self.fc1.weight_grad_s + self.fc2.weight_grad_s

    @property
    def steps_s(self) -> FloatArray:
        """Forward and backward of fc1, activation and fc2, shape (2, steps, plans)."""
        forward = (self.fc1.forward_s, self.activation_s, self.fc2.forward_s)
        backward = (
            self.fc1.input_grad_s + self.fc1.weight_grad_s,
            self.activation_backward_s,
            self.fc2.input_grad_s + self.fc2.weight_grad_s,
        )
        return np.array([forward, backward], dtype=np.float64)

    def take(self, rows: IntArray) -> "ExpertTime":
        """Spread distinct shapes over plans."""
        return ExpertTime(
            fc1=self.fc1.take(rows),
            fc2=self.fc2.take(rows),
            activation_s=np.asarray(self.activation_s)[rows],
            activation_backward_s=np.asarray(self.activation_backward_s)[rows],
            padding_s=np.asarray(self.padding_s)[rows],
        )


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
    rates = Rates.of(context.machine, context.job.precision).slowed(context.compute_ratio)
    return GroupedRates(
        fit=context.machine.grouped_gemm if wide else context.machine.grouped_gemm_fp8,
        peak_flops_per_s=rates.peak_flops_per_s,
        hbm_bytes_per_s=rates.hbm_bytes_per_s,
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
    A3. Clamps and biases of experts run in kernels of their own.

    Source: docs/cost-model/grouped-gemm.md; Megatron-LM d98e8a64 `experts.py` (TEGroupedMLP), `moe_utils.py`
    (get_align_size_for_quantization, skip_routed_expert_padding).
    """
    rows, rates = shape.aligned_rows, grouped_rates(context)
    first, second = expert_gemms(moe, shape, rows)
    copied_bytes = PADDING_COPIES * 2 * BF16_BYTES * rows * shape.hidden
    extra_forward, extra_backward = _unfused_s(context, moe, inner=rows * second.k, output=rows * shape.hidden)
    return ExpertTime(
        fc1=_product_time(context, rates, first),
        fc2=_product_time(context, rates, second),
        activation_s=extra_forward
        + activation_time_s(context, elements=rows * second.k, gated=moe.gated, backward=False),
        activation_backward_s=extra_backward
        + activation_time_s(context, elements=rows * second.k, gated=moe.gated, backward=True),
        padding_s=context.memory_bound_s(shape.pads_by_copying * copied_bytes),
    )


def _unfused_s(context: CostContext, moe: MoeFfn, *, inner: Quantity, output: Quantity) -> tuple[Quantity, Quantity]:
    """Seconds of clamps and biases that no kernel fuses, forward and backward; `inner` and `output` are elements.

    Source: Megatron-LM `fusions/fused_bias_geglu.py` (weighted_bias_quick_geglu_impl: chunk, clamp, cat), `experts.py`
    (TEGroupedMLP._apply_bias); traffic counted by hand.
    """
    forward_bytes = moe.expert_clamp * CLAMP_FORWARD_WIDTHS * BF16_BYTES * inner
    backward_bytes = moe.expert_clamp * CLAMP_BACKWARD_WIDTHS * BF16_BYTES * inner
    forward_bytes = forward_bytes + moe.expert_bias * BIAS_FORWARD_BYTES * output
    backward_bytes = backward_bytes + moe.expert_bias * BIAS_BACKWARD_BYTES * output
    return context.memory_bound_s(forward_bytes), context.memory_bound_s(backward_bytes)


def _product_time(context: CostContext, rates: GroupedRates, gemm: GroupedGemm) -> ProductTime:
    """Seconds of one product with the casts of its inputs, both passes."""
    turned = GroupedGemm(experts=gemm.experts, rows=gemm.rows, n=gemm.k, k=gemm.n)
    return ProductTime(
        forward_s=grouped_gemm_time_s(rates, gemm) + _cast_s(context, gemm.rows * gemm.k),
        input_grad_s=grouped_gemm_time_s(rates, turned) + _cast_s(context, gemm.rows * gemm.n),
        weight_grad_s=grouped_gemm_weight_gradient_time_s(rates, gemm),
    )


def _cast_s(context: CostContext, elements: Quantity) -> Quantity:
    """Seconds of casting a bf16 tensor to fp8, both ways up; nothing in bf16."""
    if context.job.precision is Precision.BF16:
        return 0.0
    return context.memory_bound_s(CAST_BYTES_PER_ELEMENT * elements)
