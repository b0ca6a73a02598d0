"""A deduplicating dispatcher in plain torch: a token travels once per destination rank, as with DeepEP.

It is the executable definition of the counts and bytes that the cost model prices for `deepep`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ap_search.runtime.capacity import kept_copies
from ap_search.runtime.collectives import all_to_all, exchange, rank_in, size_of
from ap_search.runtime.dispatch import COMBINE, DISPATCH, LAYOUT, DispatchContext, DispatcherSetup, ExpertInputs
from ap_search.runtime.rows import sum_rows, take_rows

NO_EXPERT = -1


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class DedupContext(DispatchContext):
    """Splits of the exchange, which token each sent row is of, and which received row each expert row is of."""

    sent_token: Tensor
    receive: tuple[int, ...]
    source: Tensor
    row: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupDispatcher:
    """Each (token, rank) sends payload, top-k expert numbers and weights, and the token's number at its source."""

    setup: DispatcherSetup

    def dispatch(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[ExpertInputs, DedupContext]:
        """Send each token once to every rank that holds one of its experts; make the copies there."""
        both = self.setup.groups.both
        kept = kept_copies(chosen, weights, num_experts=self.setup.num_experts, capacity=self.setup.capacity)
        named = chosen.masked_fill(~kept, NO_EXPERT)
        token, send = self._destinations(named)
        receive = self._counts(send, token.device)
        rows, row_weights, names, source = (
            all_to_all(values, send=send, receive=receive, group=both, label=DISPATCH)
            for values in (take_rows(x, token, send), take_rows(weights, token, send), named[token], token.int())
        )
        row, slot, counts = self._local(names)
        flat = row * names.shape[1] + slot
        inputs = ExpertInputs(
            rows=take_rows(rows, row, counts),
            weights=take_rows(row_weights.flatten(), flat, (len(flat),)),
            counts=counts,
        )
        copies = torch.bincount(chosen[kept], minlength=self.setup.num_experts)
        context = DedupContext(
            tokens=len(x), copies=tuple(copies.tolist()), destinations=send,
            sent_token=token, receive=receive, source=source, row=row, sizes=counts,
        )  # fmt: skip
        return inputs, context

    def combine(self, outputs: Tensor, context: DispatchContext) -> Tensor:
        """Sum the outputs of this rank's experts per received token, send one sum home per token, sum over ranks."""
        assert isinstance(context, DedupContext)
        parts = sum_rows(outputs, context.row, context.sizes, count=sum(context.receive))
        home = all_to_all(
            parts, send=context.receive, receive=context.destinations, group=self.setup.groups.both, label=COMBINE
        )
        return sum_rows(home, context.sent_token, context.destinations, count=context.tokens)

    def _destinations(self, named: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """List the tokens that go to each rank, rank by rank, and how many they are."""
        groups = self.setup.groups
        local = self.setup.num_experts // size_of(groups.ep)
        goes = torch.zeros((len(named), size_of(groups.ep) + 1), dtype=torch.bool, device=named.device)
        goes.scatter_(1, torch.where(named < 0, goes.shape[1] - 1, named // local), True)
        to_rank = goes[:, :-1].t().repeat_interleave(size_of(groups.etp), dim=0)
        return to_rank.nonzero()[:, 1], tuple(to_rank.sum(1).tolist())

    def _counts(self, send: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
        """Tell each rank how many tokens it gets."""
        both = self.setup.groups.both
        if both is None:
            return send
        ones = [1] * len(send)
        counts = torch.tensor(send, device=device)
        return tuple(exchange(counts, send=ones, receive=ones, group=both, label=LAYOUT).tolist())

    def _local(self, names: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Find the received rows of each of this rank's experts, and which of the row's weights belongs to it."""
        local = self.setup.num_experts // size_of(self.setup.groups.ep)
        first = rank_in(self.setup.groups.ep) * local
        here = (names >= first) & (names < first + local)
        row, slot = here.nonzero().unbind(1)
        expert = names[row, slot] - first
        order = expert.argsort(stable=True)
        return row[order], slot[order], tuple(torch.bincount(expert, minlength=local).tolist())
