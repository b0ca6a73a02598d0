"""Time of dense feed-forwards and of shared experts: two or three GEMMs around an activation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.linear import Gemm, LinearTime, linear_time
from ap_search.cost.mixer import add_tensor_comm, tensor_comm
from ap_search.cost.parts import BlockTime, Part, Wire
from ap_search.cost.shapes import Shapes
from ap_search.spec.blocks import DenseFfn
from ap_search.units import BF16_BYTES, Quantity

FUSED_FORWARD_WIDTHS, FUSED_BACKWARD_WIDTHS = 3, 5
UNFUSED_FORWARD_WIDTHS, UNFUSED_BACKWARD_WIDTHS = 5, 8


def activation_time_s(context: CostContext, *, elements: Quantity, gated: bool, backward: bool) -> Quantity:
    """Time of the activation between the two products of a feed-forward, seconds.

    Parameters
    ----------
    context : CostContext
        Memory bandwidth; whether activations are fused.
    elements : Quantity
        Tokens times the inner width of this rank.
    gated : bool
        SwiGLU style (reads two tensors) or not.
    backward : bool
        Whether the backward pass is meant.

    Returns
    -------
    Quantity
        Fused and gated: 3 tensors of that size moved forward, 5 backward; unfused 5 and 8; one fewer each when not
        gated.

    Source: operators of Megatron-LM `fusions/fused_bias_swiglu.py`; traffic counted by hand.
    """
    fused = context.software.fused_activation
    if backward:
        widths = FUSED_BACKWARD_WIDTHS if fused else UNFUSED_BACKWARD_WIDTHS
    else:
        widths = FUSED_FORWARD_WIDTHS if fused else UNFUSED_FORWARD_WIDTHS
    return context.memory_bound_s(BF16_BYTES * elements * (widths if gated else widths - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FfnTime:
    """Seconds of one feed-forward on one rank: its products, and its activation both ways."""

    linear: LinearTime
    act_forward_s: Quantity
    act_backward_s: Quantity

    @property
    def forward_s(self) -> Quantity:
        """Products and activation, forward."""
        return self.linear.forward_s + self.act_forward_s

    @property
    def backward_s(self) -> Quantity:
        """Products and activation, backward."""
        return self.linear.backward_s + self.act_backward_s


def ffn_core_time(context: CostContext, shapes: Shapes, *, width: int, gated: bool) -> FfnTime:
    """Time of a feed-forward of inner width `width` split over tp, seconds per micro-batch, communication left out.

    Parameters
    ----------
    context : CostContext
        Rates and hidden size.
    shapes : Shapes
        Tokens and tensor-parallel degree.
    width : int
        Inner width before the split, elements.
    gated : bool
        Whether the first product is twice as wide.

    Returns
    -------
    FfnTime
        Forward and backward.

    Source: docs/cost-model/compute.md.
    """
    hidden, inner = context.model.hidden_size, width / shapes.tp
    first = Gemm(m=shapes.tokens, n=inner * (2 if gated else 1), k=hidden)
    linear = linear_time(context.linear_rates, (first, Gemm(m=shapes.tokens, n=hidden, k=inner)))
    elements = shapes.tokens * inner
    return FfnTime(
        linear=linear,
        act_forward_s=activation_time_s(context, elements=elements, gated=gated, backward=False),
        act_backward_s=activation_time_s(context, elements=elements, gated=gated, backward=True),
    )


def block_ffn_time(
    context: CostContext, shapes: Shapes, *, ffn: DenseFfn, part: Part, again: NDArray[np.bool_]
) -> BlockTime:
    """Time of a tensor-parallel feed-forward with its communication, seconds per micro-batch.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    shapes : Shapes
        Tokens, splits, recompute bits.
    ffn : DenseFfn
        Width and gating (a dense feed-forward, or all shared experts as one).
    part : Part
        Where its compute is reported.
    again : array of bool
        Whether each plan repeats its forward in the backward.

    Returns
    -------
    BlockTime
        Compute under `part`, communication under TP_COMM, repeated forward under RECOMPUTE.

    Source: docs/cost-model/compute.md.
    """
    core = ffn_core_time(context, shapes, width=ffn.width, gated=ffn.gated)
    hidden = context.model.hidden_size
    comm = tensor_comm(context, shapes, gathered_width=hidden, scattered_width=hidden)
    time = BlockTime.empty(len(shapes.tp))
    time.forward[part] = core.forward_s
    time.backward[part] = core.backward_s
    time.weight_grad[:] = core.linear.weight_grad_s
    add_tensor_comm(context, time, comm, compute_s=core.forward_s)
    repeated = core.forward_s + time.forward[Part.TP_COMM]
    time.backward[Part.RECOMPUTE] = np.where(again, repeated, 0.0)
    time.sent_backward_bytes[Wire.TP] += np.where(again, comm.sent_forward_bytes, 0.0)
    return time
