"""The all-to-all dispatcher: one copy per token and expert over ep, copies gathered over etp."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ap_search.runtime.capacity import Capacity, Copies, kept_copies, sorted_copies
from ap_search.runtime.collectives import all_to_all, gather_even, gather_rows, rank_in, scatter_rows, size_of
from ap_search.runtime.dispatch import (
    COMBINE,
    DISPATCH,
    DispatchContext,
    DispatcherSetup,
    ExpertInputs,
    blocks_index,
)
from ap_search.runtime.rows import sum_rows, take_rows


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class AlltoallContext(DispatchContext):
    """Splits of the exchanges, the copies' places, and the orders of rows."""

    rank_token: Tensor
    rank_sizes: tuple[int, ...]
    copy_place: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    gathered: tuple[int, ...]
    homeward: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AlltoallDispatcher:
    """Counts are exchanged first, then copies and their weights over ep, then both are gathered over etp."""

    setup: DispatcherSetup

    def dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[ExpertInputs, AlltoallContext]:
        """Send each copy to its expert's rank; rows arrive sorted by expert, then by source rank, then by token."""
        copies = own_copies(self.setup, chosen, weights)
        rank_token, rank_sizes, copy_place = self._per_rank(copies, len(x))
        copy_sizes = tuple(copies.counts.tolist())
        rows = take_rows(take_rows(x, rank_token, rank_sizes), copy_place, copy_sizes)
        row_weights = take_rows(weights.flatten(), copies.slot, (len(copies.slot),))
        incoming = self._incoming(copies.counts)
        send = tuple(copies.counts.unflatten(0, (size_of(self.setup.groups.ep), -1)).sum(1).tolist())
        receive = tuple(incoming[:, rank_in(self.setup.groups.etp)].sum(1).tolist())
        gathered = tuple(incoming.sum((0, 2)).tolist())
        arrival, homeward = (order.to(x.device) for order in _orders(incoming))
        context = AlltoallContext(
            tokens=len(x), rank_token=rank_token, rank_sizes=rank_sizes, copy_place=copy_place, copies=copy_sizes,
            send=send, receive=receive, gathered=gathered, homeward=homeward,
        )  # fmt: skip
        moved = [self._outward(values, context).index_select(0, arrival) for values in (rows, row_weights)]
        counts = tuple(incoming.sum((0, 1)).tolist())
        return ExpertInputs(rows=moved[0], weights=moved[1], counts=counts), context

    def combine(self, outputs: Tensor, context: DispatchContext) -> Tensor:
        """Sum over etp, send each copy's output home, sum first what came from one rank, then over ranks."""
        assert isinstance(context, AlltoallContext)
        groups = self.setup.groups
        rows = outputs.index_select(0, context.homeward)
        if groups.etp is not None:
            summed = scatter_rows(
                rows.to(self.setup.sum_dtype), sizes=context.gathered, group=groups.etp, label=COMBINE
            )
            rows = summed.to(outputs.dtype)
        rows = all_to_all(rows, send=context.receive, receive=context.send, group=groups.ep, label=COMBINE)
        parts = sum_rows(rows, context.copy_place, context.copies, count=len(context.rank_token))
        return sum_rows(parts, context.rank_token, context.rank_sizes, count=context.tokens)

    def _outward(self, values: Tensor, context: AlltoallContext) -> Tensor:
        """Move rows over ep, then gather them over etp."""
        groups = self.setup.groups
        moved = all_to_all(values, send=context.send, receive=context.receive, group=groups.ep, label=DISPATCH)
        return gather_rows(moved, sizes=context.gathered, group=groups.etp, label=DISPATCH)

    def _per_rank(self, copies: Copies, tokens: int) -> tuple[Tensor, tuple[int, ...], Tensor]:
        """List the tokens that each rank needs, and where among them each copy's token stands.

        Copies are made of these rather than of the tokens, so that gradients are summed per rank first, as a
        deduplicating dispatcher sums them.
        """
        ranks = size_of(self.setup.groups.ep)
        local = self.setup.num_experts // ranks
        rank = torch.repeat_interleave(torch.arange(len(copies.counts), device=copies.token.device), copies.counts)
        key = rank.div(local, rounding_mode="floor") * (tokens + 1) + copies.token
        padding = copies.token == tokens
        needed = key[~padding].unique()
        sizes = torch.bincount(needed.div(tokens + 1, rounding_mode="floor"), minlength=ranks)
        place = torch.searchsorted(needed, key).masked_fill(padding, len(needed))
        return needed % (tokens + 1), tuple(sizes.tolist()), place

    def _incoming(self, counts: Tensor) -> Tensor:
        """Copies that each rank of the group sends to each expert of this rank: shape (ep, etp, local experts).

        Every rank gets every count, as Megatron-LM's does: its etp ranks must know what the others receive.
        """
        groups = self.setup.groups
        every = counts if groups.both is None else gather_even(counts, groups.both, DISPATCH)
        mine = groups.local_experts(self.setup.num_experts)
        table = every.reshape(size_of(groups.ep), size_of(groups.etp), -1)
        return table[..., mine.start : mine.stop].cpu()


def own_copies(setup: DispatcherSetup, chosen: Tensor, weights: Tensor) -> Copies:
    """List the copies that this rank sends, dropped and padded as capacity says."""
    kept = kept_copies(chosen, weights, num_experts=setup.num_experts, capacity=setup.capacity)
    slots = _padding(setup.capacity, chosen, setup.num_experts)
    return sorted_copies(chosen, kept, num_experts=setup.num_experts, slots=slots)


def _padding(capacity: Capacity, chosen: Tensor, num_experts: int) -> int | None:
    """Count the slots that each expert's list is padded to, None where it is not."""
    if not capacity.padded:
        return None
    return capacity.slots(tokens=chosen.shape[0], top_k=chosen.shape[1], num_experts=num_experts)


def _orders(incoming: Tensor) -> tuple[Tensor, Tensor]:
    """Row orders from arrival (etp, ep, expert) to experts (expert, ep, etp), and back."""
    ep, etp, local = incoming.shape
    place = torch.arange(incoming.numel()).reshape(etp, ep, local)
    sizes = incoming.transpose(0, 1).reshape(-1)
    arrival = blocks_index(sizes, place.permute(2, 1, 0).reshape(-1))
    return arrival, arrival.argsort()
