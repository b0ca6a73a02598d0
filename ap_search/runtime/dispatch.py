"""What a dispatcher is: tokens to experts with a context that alone remembers how to bring the results home."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ap_search.runtime.capacity import Capacity
from ap_search.runtime.collectives import rank_in, size_of

DISPATCH, COMBINE, LAYOUT = "dispatch", "combine", "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """The groups of one dispatch as this rank sees them; `both` holds all ranks of ep and etp, etp varying fastest.

    Each is None where it is this rank alone.
    """

    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    both: ProcessGroup | None = None

    def local_experts(self, num_experts: int) -> range:
        """List the experts of this rank."""
        count = num_experts // size_of(self.ep)
        return range(rank_in(self.ep) * count, (rank_in(self.ep) + 1) * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInputs:
    """Rows for this rank's experts, one expert after the other: `counts[e]` rows each, with the router's weights."""

    rows: Tensor
    weights: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class DispatchContext:
    """What combine needs of its dispatch: index tensors and sizes, nothing of the dispatcher, the style or the module.

    It lives as long as the call that made it: combine receives it as an argument, and nobody keeps it.

    Attributes
    ----------
    tokens : int
        Tokens that this rank holds.
    copies : tuple of int
        Copies that this rank sends to each expert, itself included, after dropping and padding.
    destinations : tuple of int
        Distinct tokens that it sends to each rank of the group; empty where copies travel one by one.
    """

    tokens: int
    copies: tuple[int, ...]
    destinations: tuple[int, ...] = ()


class Dispatcher(Protocol):
    """Brings tokens to experts and back. It has no state of its own between the two."""

    def dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[ExpertInputs, DispatchContext]:
        """Send rows of shape (tokens, width) to the experts in `chosen`, shape (tokens, top_k), with `weights`."""

    def combine(self, outputs: Tensor, context: DispatchContext) -> Tensor:
        """Bring the experts' outputs, already weighted, home and sum them per token: shape (tokens, width)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSetup:
    """What every dispatcher knows: the layer's experts, the groups, the capacity, the type of sums across ranks."""

    num_experts: int
    groups: ExpertGroups = field(default_factory=ExpertGroups)
    capacity: Capacity = field(default_factory=Capacity)
    sum_dtype: torch.dtype = torch.float32


def blocks_index(sizes: Tensor, order: Tensor) -> Tensor:
    """Row numbers that put blocks of rows into another order.

    Parameters
    ----------
    sizes : Tensor
        Rows of each block as they lie, int64, shape (blocks,).
    order : Tensor
        Blocks in the order wanted, int64, shape (blocks,).

    Returns
    -------
    Tensor
        int64, one number per row.
    """
    starts = sizes.cumsum(0) - sizes
    wanted = sizes[order]
    ends = wanted.cumsum(0)
    shift = starts[order] - (ends - wanted)
    return torch.arange(int(sizes.sum()), device=sizes.device) + torch.repeat_interleave(shift, wanted)
