"""Time of a MoE feed-forward: router, dispatch, grouped experts, combine, shared experts; seconds per micro-batch."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.dispatch import DispatchShape, combine_sent_bytes, dispatch_sent_bytes
from ap_search.cost.dispatch_time import combine_time_s, dispatch_time_s, permute_bytes
from ap_search.cost.ffn import activation_time_s, block_ffn_time
from ap_search.cost.grouped_gemm import grouped_gemm_time_s, grouped_gemm_weight_gradient_time_s
from ap_search.cost.linear import Gemm, linear_time
from ap_search.cost.parts import BlockTime, Part, Wire
from ap_search.cost.shapes import Shapes
from ap_search.plan.plan import Recompute
from ap_search.spec.blocks import DenseFfn, MoeFfn
from ap_search.spec.job import Precision
from ap_search.units import FP32_BYTES, Quantity

FloatArray = NDArray[np.float64]
ROUTER_FORWARD_TENSORS, ROUTER_BACKWARD_TENSORS = 6, 4
FP8_ROW_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertTime:
    """Seconds of the routed experts of one rank: forward, input gradients, weight gradients, activation forward."""

    forward_s: Quantity
    input_grad_s: Quantity
    weight_grad_s: Quantity
    activation_s: Quantity


def dispatch_shape(
    context: CostContext,
    moe: MoeFfn,
    shapes: Shapes,
    *,
    load_ratio: Quantity,
    kept_ratio: Quantity,
    sent_ratio: Quantity = 1.0,
) -> DispatchShape:
    """Describe what one rank dispatches in one pass of one MoE layer, and where its groups lie.

    Parameters
    ----------
    context : CostContext
        Hidden size and the router's type.
    moe : MoeFfn
        Experts and top-k.
    shapes : Shapes
        Local tokens, degrees, placements.
    load_ratio, kept_ratio : Quantity
        Worst rank's rows over the mean; share of copies that capacity lets through.
    sent_ratio : Quantity
        What the busiest source rank sends over the mean.

    Returns
    -------
    DispatchShape
        One entry per plan.
    """
    return DispatchShape(
        moe=moe,
        tokens=shapes.local_tokens,
        hidden=float(moe.latent_width or context.model.hidden_size),
        ep=shapes.ep,
        etp=shapes.etp,
        dispatcher=shapes.dispatcher,
        ep_per_domain=shapes.ep_place.members_per_domain,
        ep_domains=shapes.ep_place.domains,
        etp_per_domain=shapes.etp_place.members_per_domain,
        etp_domains=shapes.etp_place.domains,
        group_per_domain=shapes.group_place.members_per_domain,
        group_domains=shapes.group_place.domains,
        router_bytes=context.software.router_dtype_bytes,
        load_ratio=load_ratio,
        kept_ratio=kept_ratio,
        sent_ratio=sent_ratio,
        redundant_experts=context.job.redundant_experts,
    )


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
        fc1, activation, fc2 as grouped GEMMs over the local experts.

    Notes
    -----
    A1. In fp8 each expert's rows are padded to a multiple of 16.

    Source: docs/cost-model/grouped-gemm.md; Megatron-LM `experts.py` (TEGroupedMLP).
    """
    rates = context.linear_rates
    experts = shape.local_experts
    wide = context.job.precision is Precision.BF16
    padding = 0.0 if wide else experts * (FP8_ROW_ALIGNMENT - 1) / 2
    rows = shape.rows + padding
    inner = moe.expert_width / shape.etp
    sizes = ((inner * (2 if moe.gated else 1), shape.hidden), (shape.hidden, inner))
    common = {"peak_flops_per_s": rates.peak_flops_per_s, "hbm_bytes_per_s": rates.hbm_bytes_per_s}
    fit = context.machine.grouped_gemm if wide else context.machine.grouped_gemm_fp8
    forward = activation_time_s(context, elements=rows * inner, gated=moe.gated, backward=False)
    input_grad = activation_time_s(context, elements=rows * inner, gated=moe.gated, backward=True)
    activation, weight_grad = forward, np.zeros_like(forward)
    for n, k in sizes:
        forward = forward + grouped_gemm_time_s(fit, experts=experts, rows=rows, n=n, k=k, **common)
        input_grad = input_grad + grouped_gemm_time_s(fit, experts=experts, rows=rows, n=k, k=n, **common)
        weight_grad = weight_grad + grouped_gemm_weight_gradient_time_s(
            fit, experts=experts, rows=rows, n=n, k=k, **common
        )
    return ExpertTime(forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight_grad, activation_s=activation)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedTime:
    """Seconds of the routed path of one layer at one load: communication alone, permutation, experts."""

    dispatch_s: Quantity
    combine_s: Quantity
    permute_s: Quantity
    experts: ExpertTime

    @property
    def forward_s(self) -> Quantity:
        """Whole forward with nothing hidden."""
        return self.dispatch_s + self.combine_s + 2.0 * self.permute_s + self.experts.forward_s

    @property
    def backward_s(self) -> Quantity:
        """Whole backward with nothing hidden: dispatch's is combine and the other way round."""
        compute = self.experts.input_grad_s + self.experts.weight_grad_s
        return self.dispatch_s + self.combine_s + 2.0 * self.permute_s + compute


def routed_time(context: CostContext, moe: MoeFfn, shape: DispatchShape) -> RoutedTime:
    """Time of the routed path of one MoE layer, seconds per micro-batch and pass.

    Parameters
    ----------
    context : CostContext
        Machine, software, precision.
    moe : MoeFfn
        The layer's experts.
    shape : DispatchShape
        What is dispatched, at which load.

    Returns
    -------
    RoutedTime
        Parts that forward and backward are put together from.

    Source: docs/cost-model/dispatch.md.
    """
    return RoutedTime(
        dispatch_s=dispatch_time_s(context.machine, shape),
        combine_s=combine_time_s(context.machine, shape),
        permute_s=context.memory_bound_s(permute_bytes(shape, shape.local_experts)),
        experts=expert_time(context, moe, shape),
    )


def _router_time_s(context: CostContext, moe: MoeFfn, shapes: Shapes) -> tuple[Quantity, Quantity, Quantity]:
    """Router GEMM with scores and top-k: forward, backward, and the weight-gradient share."""
    linear = linear_time(
        context.exact_rates,
        (Gemm(m=shapes.local_tokens, n=float(moe.num_experts), k=float(context.model.hidden_size)),),
    )
    scores = shapes.local_tokens * moe.num_experts * FP32_BYTES
    forward = linear.forward_s + context.memory_bound_s(ROUTER_FORWARD_TENSORS * scores)
    return forward, linear.backward_s + context.memory_bound_s(ROUTER_BACKWARD_TENSORS * scores), linear.weight_grad_s


def _latent_time(context: CostContext, moe: MoeFfn, shapes: Shapes) -> tuple[Quantity, Quantity, Quantity]:
    """Projections to and from the latent width: forward, backward, weight-gradient share; 0 where there are none."""
    if not moe.latent_width:
        return 0.0, 0.0, 0.0
    hidden, latent = context.model.hidden_size, moe.latent_width
    down = Gemm(m=shapes.local_tokens, n=float(latent), k=float(hidden))
    up = Gemm(m=shapes.local_tokens, n=float(hidden), k=float(latent))
    linear = linear_time(context.linear_rates, (down, up))
    return linear.forward_s, linear.backward_s, linear.weight_grad_s


def moe_time(context: CostContext, moe: MoeFfn, shapes: Shapes, *, shape: DispatchShape) -> BlockTime:
    """Time of one MoE feed-forward, seconds per micro-batch on the worst rank.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    moe : MoeFfn
        Experts, shared experts, router.
    shapes : Shapes
        Tokens, splits, recompute bits.
    shape : DispatchShape
        Dispatch at the job's load.

    Returns
    -------
    BlockTime
        Parts at balanced load, and IMBALANCE: what the worst rank takes longer.

    Notes
    -----
    A1. The slowest rank holds up the group in each layer, so layer times add as maxima.
    A2. Dispatch and combine are exposed here; what hides behind another micro-batch is worked out in `overlap`.

    Source: docs/cost-model/dispatch.md; requirement 002 (data path and its mirror in backward).
    """
    even = np.ones_like(shape.ep, dtype=np.float64)
    balanced = routed_time(context, moe, replace(shape, load_ratio=even, sent_ratio=even))
    actual = routed_time(context, moe, shape)
    latent_forward, latent_backward, latent_grad = _latent_time(context, moe, shapes)
    router_forward, router_backward, router_grad = _router_time_s(context, moe, shapes)
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.ROUTER], time.backward[Part.ROUTER] = router_forward, router_backward
    time.forward[Part.EXPERT] = balanced.experts.forward_s + latent_forward
    time.backward[Part.EXPERT] = balanced.experts.input_grad_s + balanced.experts.weight_grad_s + latent_backward
    time.weight_grad[:] = balanced.experts.weight_grad_s + router_grad + latent_grad
    _add_exchange(time, balanced)
    time.forward[Part.IMBALANCE] = actual.forward_s - balanced.forward_s
    time.backward[Part.IMBALANCE] = actual.backward_s - balanced.backward_s
    for sent in (time.sent_forward_bytes, time.sent_backward_bytes):
        sent[Wire.DISPATCH], sent[Wire.COMBINE] = dispatch_sent_bytes(shape), combine_sent_bytes(shape)
    if moe.shared_width:
        time = time.plus(_shared_time(context, moe, shapes, time))
    return _with_recompute(shapes, time, balanced)


def _add_exchange(time: BlockTime, routed: RoutedTime) -> None:
    """Put dispatch and combine with their permutations into a block's time; backward mirrors forward."""
    time.exchange[0], time.exchange[1] = routed.dispatch_s, routed.combine_s
    time.forward[Part.DISPATCH] = time.backward[Part.COMBINE] = routed.dispatch_s + routed.permute_s
    time.forward[Part.COMBINE] = time.backward[Part.DISPATCH] = routed.combine_s + routed.permute_s


def _shared_time(context: CostContext, moe: MoeFfn, shapes: Shapes, routed: BlockTime) -> BlockTime:
    """Shared experts as one feed-forward; beside dispatch and combine where the software overlaps them."""
    shared = DenseFfn(width=moe.shared_width, gated=moe.shared_gated)
    # `moe` repeats the shared experts with everything else.
    again = shapes.recomputes(Recompute.SHARED_EXPERTS) & ~shapes.recomputes(Recompute.MOE)
    time = block_ffn_time(context, shapes, ffn=shared, part=Part.SHARED_EXPERT, again=again)
    if context.software.shared_expert_overlap:
        for mine, theirs in ((time.forward, routed.forward), (time.backward, routed.backward)):
            beside = np.minimum(mine[Part.SHARED_EXPERT], theirs[Part.DISPATCH] + theirs[Part.COMBINE])
            mine[Part.SHARED_EXPERT] -= beside
            time.hidden[Wire.DISPATCH] += beside
    return time


def _with_recompute(shapes: Shapes, time: BlockTime, routed: RoutedTime) -> BlockTime:
    """Add the repeated forward of `moe` (the exchanges included) or of the experts' activation."""
    whole = time.forward.sum(axis=0)
    moe = shapes.recomputes(Recompute.MOE)
    act = np.where(shapes.recomputes(Recompute.MOE_ACT), routed.experts.activation_s, 0.0)
    repeated = time.backward[Part.RECOMPUTE] + act
    time.backward[Part.RECOMPUTE] = np.where(moe, whole, repeated)
    time.sent_backward_bytes[:] += np.where(moe, time.sent_forward_bytes, 0.0)
    return time
