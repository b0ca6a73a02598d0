"""The all-gather dispatcher: every rank gets every token, picks its experts' rows, and a reduce-scatter sums them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ap_search.runtime.capacity import kept_copies
from ap_search.runtime.collectives import gather_even, gather_rows, scatter_rows, size_of
from ap_search.runtime.dispatch import COMBINE, DISPATCH, DispatchContext, DispatcherSetup, ExpertInputs
from ap_search.runtime.rows import sum_rows, take_rows


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class AllgatherContext(DispatchContext):
    """Which gathered token each row is of; rows in runs, one per expert."""

    token: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllgatherDispatcher:
    """Tokens, routing map and weights of all ranks are gathered. Every rank of the group holds as many tokens."""

    setup: DispatcherSetup

    def dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[ExpertInputs, AllgatherContext]:
        """Gather over ep and etp, then take the rows of this rank's experts, by expert, source rank and token."""
        both, experts = self.setup.groups.both, self.setup.num_experts
        kept = kept_copies(chosen, weights, num_experts=experts, capacity=self.setup.capacity)
        routed = torch.zeros((len(x), experts), dtype=torch.uint8, device=x.device).scatter(1, chosen, kept.byte())
        dense = torch.zeros((len(x), experts), dtype=weights.dtype, device=x.device).scatter(1, chosen, weights)
        sizes = (len(x),) * size_of(both)
        every = gather_rows(x, sizes=sizes, group=both, label=DISPATCH)
        every_weight = gather_rows(dense, sizes=sizes, group=both, label=DISPATCH)
        table = routed if both is None else gather_even(routed, both, DISPATCH)
        mine = self.setup.groups.local_experts(experts)
        local = table[:, mine.start : mine.stop].t()
        expert, token = local.nonzero().unbind(1)
        counts = tuple(local.sum(1, dtype=torch.int64).tolist())
        flat = token * experts + expert + mine.start
        inputs = ExpertInputs(
            rows=take_rows(every, token, counts),
            weights=take_rows(every_weight.flatten(), flat, (len(flat),)),
            counts=counts,
        )
        copies = tuple(routed.sum(0, dtype=torch.int64).tolist())
        return inputs, AllgatherContext(tokens=len(x), copies=copies, token=token, sizes=counts)

    def combine(self, outputs: Tensor, context: DispatchContext) -> Tensor:
        """Sum this rank's outputs per gathered token, then over ranks; each rank keeps its own tokens."""
        assert isinstance(context, AllgatherContext)
        both = self.setup.groups.both
        sizes = (context.tokens,) * size_of(both)
        parts = sum_rows(outputs, context.token, context.sizes, count=sum(sizes))
        if both is None:
            return parts
        summed = scatter_rows(parts.to(self.setup.sum_dtype), sizes=sizes, group=both, label=COMBINE)
        return summed.to(outputs.dtype)
