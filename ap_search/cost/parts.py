"""Parts that time is split into, and arrays of seconds per part."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Part(IntEnum):
    """Parts of one block's time, rows of the arrays in `BlockTime`."""

    ATTENTION = 0
    DENSE_FFN = 1
    ROUTER = 2
    DISPATCH = 3
    EXPERT = 4
    COMBINE = 5
    SHARED_EXPERT = 6
    HEAD = 7
    RECOMPUTE = 8
    TP_COMM = 9
    CP_COMM = 10
    OTHER = 11
    IMBALANCE = 12


class Wire(IntEnum):
    """Kinds of traffic of one block, rows of `BlockTime.sent_forward_bytes`."""

    DISPATCH = 0
    COMBINE = 1
    TP = 2
    CP = 3


class Exchange(IntEnum):
    """Passes of one MoE layer between ranks, rows of `BlockTime.exchange`: two forward, then their mirrors."""

    DISPATCH = 0
    COMBINE = 1
    DISPATCH_BACKWARD = 2
    COMBINE_BACKWARD = 3


class ExpertStep(IntEnum):
    """What routed experts do, rows of `BlockTime.experts`."""

    FC1 = 0
    ACTIVATION = 1
    FC2 = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTime:
    """Exposed seconds of one block and one micro-batch on one device, and what it sends.

    `forward`, `backward` have shape (parts, plans); `weight_grad` (plans,) is the share of `backward` that makes weight
    gradients and may be moved by zero-bubble schedules; `sent_forward_bytes`, `sent_backward_bytes` have shape (wires,
    plans). `hidden` (wires, plans) are communication seconds, forward and backward, that run beside compute of the same
    micro-batch. `exchange` (passes, plans) are dispatch, combine and their backward, each alone; `paired` the seconds
    of dispatch and of combine, over forward and backward, that hide where a forward of one micro-batch runs into a
    backward of another. `experts` (2, steps, plans) are forward and backward seconds of the experts' steps, of which
    the part EXPERT is made, padding and latent projections besides.
    """

    forward: FloatArray
    backward: FloatArray
    weight_grad: FloatArray
    sent_forward_bytes: FloatArray
    sent_backward_bytes: FloatArray
    hidden: FloatArray
    exchange: FloatArray
    paired: FloatArray
    experts: FloatArray

    @classmethod
    def empty(cls, plans: int) -> "BlockTime":
        """Build a block that takes no time."""
        return cls(
            forward=np.zeros((len(Part), plans)),
            backward=np.zeros((len(Part), plans)),
            weight_grad=np.zeros(plans),
            sent_forward_bytes=np.zeros((len(Wire), plans)),
            sent_backward_bytes=np.zeros((len(Wire), plans)),
            hidden=np.zeros((len(Wire), plans)),
            exchange=np.zeros((len(Exchange), plans)),
            paired=np.zeros((2, plans)),
            experts=np.zeros((2, len(ExpertStep), plans)),
        )

    def plus(self, other: "BlockTime") -> "BlockTime":
        """Add two blocks that run one after the other."""
        return BlockTime(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            weight_grad=self.weight_grad + other.weight_grad,
            sent_forward_bytes=self.sent_forward_bytes + other.sent_forward_bytes,
            sent_backward_bytes=self.sent_backward_bytes + other.sent_backward_bytes,
            hidden=self.hidden + other.hidden,
            exchange=self.exchange + other.exchange,
            paired=self.paired + other.paired,
            experts=self.experts + other.experts,
        )
