"""Time of a MoE feed-forward: router, dispatch, grouped experts, combine, shared experts; seconds per micro-batch."""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.capacity import padded_capacity
from ap_search.cost.context import CostContext
from ap_search.cost.dispatch import DispatchShape, combine_sent_bytes, dispatch_sent_bytes
from ap_search.cost.dispatch_time import combine_time_s, dispatch_time_s, free_sm_ratio, permute_bytes
from ap_search.cost.experts import ExpertTime, expert_time
from ap_search.cost.ffn import block_ffn_time
from ap_search.cost.linear import Gemm, linear_time
from ap_search.cost.parts import BlockTime, Exchange, Part, Wire
from ap_search.cost.shapes import BLOCK_COLUMNS, Shapes, distinct_rows
from ap_search.plan.plan import Recompute
from ap_search.plan.table import IntArray
from ap_search.spec.blocks import DenseFfn, MoeFfn
from ap_search.spec.job import Precision
from ap_search.units import FP32_BYTES, Quantity

FloatArray = NDArray[np.float64]
ROUTER_FORWARD_TENSORS, ROUTER_BACKWARD_TENSORS = 6, 4
# Rows of each expert are padded to a multiple of this.
ROW_ALIGNMENT = {Precision.BF16: 1, Precision.FP8: 16, Precision.MXFP8: 32}
# What the routed path sees of a plan: recompute repeats it, and changes nothing in it.
ROUTED_COLUMNS = tuple(column for column in BLOCK_COLUMNS if column != "recompute")


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
        padded_capacity=padded_capacity(context.job, moe, shapes.local_tokens),
        redundant_experts=context.job.redundant_experts,
        row_alignment=ROW_ALIGNMENT[context.job.precision],
        fp8_dispatch=context.software.fp8_dispatch,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedTime:
    """Seconds of the routed path of one layer at one load: communication alone, permutation, experts.

    `dispatch_s` and `combine_s` are forward passes, `dispatch_backward_s` and `combine_backward_s` their mirrors;
    `permute_s` is one permutation, of two forward and two backward.
    """

    dispatch_s: Quantity
    combine_s: Quantity
    dispatch_backward_s: Quantity
    combine_backward_s: Quantity
    permute_s: Quantity
    experts: ExpertTime

    @property
    def forward_s(self) -> Quantity:
        """Whole forward with nothing hidden."""
        return self.dispatch_s + self.combine_s + 2.0 * self.permute_s + self.experts.forward_s

    @property
    def backward_s(self) -> Quantity:
        """Whole backward with nothing hidden: dispatch's is a combine and the other way round."""
        compute = self.experts.input_grad_s + self.experts.weight_grad_s
        return self.dispatch_backward_s + self.combine_backward_s + 2.0 * self.permute_s + compute

    def take(self, rows: IntArray) -> "RoutedTime":
        """Spread distinct shapes over plans."""
        names = [field.name for field in fields(self) if field.name != "experts"]
        taken = {name: np.asarray(getattr(self, name))[rows] for name in names}
        return RoutedTime(experts=self.experts.take(rows), **taken)


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
    machine = context.machine
    return RoutedTime(
        dispatch_s=dispatch_time_s(machine, shape),
        combine_s=combine_time_s(machine, shape),
        dispatch_backward_s=dispatch_time_s(machine, shape, backward=True),
        combine_backward_s=combine_time_s(machine, shape, backward=True),
        permute_s=context.memory_bound_s(permute_bytes(shape)),
        experts=expert_time(context, moe, shape),
    )


def _routed_times(
    context: CostContext, moe: MoeFfn, shapes: Shapes, shape: DispatchShape
) -> tuple[RoutedTime, RoutedTime]:
    """Routed path at balanced load and at the job's, per plan, worked out once per distinct shape."""
    first, inverse = distinct_rows([getattr(shapes, name) for name in ROUTED_COLUMNS])
    once = shape.take(first)
    even = np.ones(len(first))
    balanced = routed_time(context, moe, replace(once, load_ratio=even, sent_ratio=even)).take(inverse)
    if np.all(once.load_ratio == 1.0) and np.all(once.sent_ratio == 1.0):
        return balanced, balanced
    return balanced, routed_time(context, moe, once).take(inverse)


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
    balanced, actual = _routed_times(context, moe, shapes, shape)
    latent_forward, latent_backward, latent_grad = _latent_time(context, moe, shapes)
    router_forward, router_backward, router_grad = _router_time_s(context, moe, shapes)
    time = BlockTime.empty(len(shapes.tp))
    time.forward[Part.ROUTER], time.backward[Part.ROUTER] = router_forward, router_backward
    time.forward[Part.EXPERT] = balanced.experts.forward_s + latent_forward
    time.backward[Part.EXPERT] = balanced.experts.input_grad_s + balanced.experts.weight_grad_s + latent_backward
    time.weight_grad[:] = balanced.experts.weight_grad_s + router_grad + latent_grad
    time.experts[:] = balanced.experts.steps_s
    time.forward[Part.OTHER] = np.where(np.greater(shape.padded_capacity, 0), 0.0, context.software.host_sync_s)
    _add_exchange(time, balanced)
    time.forward[Part.IMBALANCE] = actual.forward_s - balanced.forward_s
    time.backward[Part.IMBALANCE] = actual.backward_s - balanced.backward_s
    for sent, backward in ((time.sent_forward_bytes, False), (time.sent_backward_bytes, True)):
        sent[Wire.DISPATCH] = dispatch_sent_bytes(shape, backward=backward)
        sent[Wire.COMBINE] = combine_sent_bytes(shape, backward=backward)
    if moe.shared_width:
        time = time.plus(_shared_time(context, moe, shapes, time))
    return _with_recompute(shapes, time, balanced)


def _add_exchange(time: BlockTime, routed: RoutedTime) -> None:
    """Put dispatch and combine with their permutations into a block's time, and their backward with them."""
    time.exchange[Exchange.DISPATCH], time.exchange[Exchange.COMBINE] = routed.dispatch_s, routed.combine_s
    time.exchange[Exchange.DISPATCH_BACKWARD] = routed.dispatch_backward_s
    time.exchange[Exchange.COMBINE_BACKWARD] = routed.combine_backward_s
    time.forward[Part.DISPATCH] = routed.dispatch_s + routed.permute_s
    time.forward[Part.COMBINE] = routed.combine_s + routed.permute_s
    time.backward[Part.DISPATCH] = routed.dispatch_backward_s + routed.permute_s
    time.backward[Part.COMBINE] = routed.combine_backward_s + routed.permute_s


def _shared_time(context: CostContext, moe: MoeFfn, shapes: Shapes, routed: BlockTime) -> BlockTime:
    """Shared experts as one feed-forward; beside dispatch and combine where the software overlaps them."""
    shared = DenseFfn(width=moe.shared_width, gated=moe.shared_gated)
    # `moe` repeats the shared experts with everything else.
    again = shapes.recomputes(Recompute.SHARED_EXPERTS) & ~shapes.recomputes(Recompute.MOE)
    time = block_ffn_time(context, shapes, ffn=shared, part=Part.SHARED_EXPERT, again=again)
    if context.software.shared_expert_overlap:
        forward, backward = routed.exchange[:2].sum(axis=0), routed.exchange[2:].sum(axis=0)
        for mine, exchange in ((time.forward, forward), (time.backward, backward)):
            beside = np.minimum(mine[Part.SHARED_EXPERT], exchange * free_sm_ratio(context.machine))
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
