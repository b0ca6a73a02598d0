"""Routed experts: one stacked parameter per matrix, and a dispatcher that brings tokens to them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ap_search.runtime.cuts import CutModule, Kind
from ap_search.runtime.dispatch import Dispatcher, DispatcherSetup, ExpertInputs
from ap_search.runtime.dispatch_alltoall import AlltoallDispatcher
from ap_search.runtime.functions import activation
from ap_search.spec.blocks import MoeFfn


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """What one rank sent in one dispatch: copies to each expert, and distinct tokens to each rank (deduplicating)."""

    copies: tuple[int, ...]
    tokens_per_rank: tuple[int, ...]


class GroupedExperts(CutModule):
    """Feed-forwards of all experts of a layer that this rank holds.

    `w1` (gate) and `w3` (up, where gated) have shape (experts, width, in), `w2` (experts, in, width). The router's
    weight multiplies the inner activation, so that what comes out is already weighted.

    Dispatch and combine run inside `forward`, between the module's own hooks: FSDP on this module or on any parent has
    gathered the weights before the first and frees them after the second, whichever was applied first.
    """

    def __init__(self, moe: MoeFfn, width: int, *, dtype: torch.dtype, setup: DispatcherSetup) -> None:
        super().__init__()
        self.setup = setup
        self.dispatcher: Dispatcher = AlltoallDispatcher(setup=setup)
        self.routing: list[RoutingRecord] = []
        experts, inner = moe.num_experts, moe.expert_width
        self.add("w1", (experts, inner, width), dtype, kind=Kind.EXPERT)
        self.add("w2", (experts, width, inner), dtype, kind=Kind.EXPERT)
        if moe.gated:
            self.add("w3", (experts, inner, width), dtype, kind=Kind.EXPERT)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Apply to rows of shape (tokens, in) the experts in `chosen`, shape (tokens, top_k), and sum per token."""
        inputs, context = self.dispatcher.dispatch(x, chosen, weights)
        self.routing.append(RoutingRecord(copies=context.copies, tokens_per_rank=context.destinations))
        return self.dispatcher.combine(self.compute(inputs), context)

    def compute(self, inputs: ExpertInputs) -> Tensor:
        """Run each expert on its rows; one without rows runs on none, so that its gradient is zero and not absent."""
        counts = list(inputs.counts)
        rows = inputs.rows.split(counts)
        first = self._products("w1", rows)
        second = self._products("w3", rows) if "w3" in self.cuts else None
        inner = activation(torch.cat(first), None if second is None else torch.cat(second), inputs.weights)
        return torch.cat(self._products("w2", inner.split(counts)))

    def _products(self, name: str, rows: tuple[Tensor, ...]) -> list[Tensor]:
        """Multiply each expert's rows with its matrix."""
        matrices = self.get_parameter(name).unbind()
        return [F.linear(part, matrix) for part, matrix in zip(rows, matrices, strict=True)]
