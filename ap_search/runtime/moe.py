"""A mixture of experts: router, routed experts, shared experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ap_search.runtime.cuts import CutModule
from ap_search.runtime.dispatch import DispatcherSetup
from ap_search.runtime.experts import GroupedExperts
from ap_search.runtime.feed_forward import FeedForward
from ap_search.runtime.routing import Router
from ap_search.runtime.tensor import TensorGroup
from ap_search.spec.blocks import MoeFfn


class MoE(CutModule):
    """Sends each token to its experts and adds what the shared experts make of it.

    Under sequence parallelism each tensor-parallel rank routes and dispatches its own tokens. `token_chunks` lets one
    process route as that many ranks would, each part of the sequence for itself: capacity depends on it.
    """

    def __init__(
        self, moe: MoeFfn, hidden: int, *, dtype: torch.dtype, router_dtype: torch.dtype, setup: DispatcherSetup
    ) -> None:
        super().__init__()
        self.token_chunks = 1
        self.router = Router(moe, hidden, dtype=dtype, router_dtype=router_dtype)
        self.experts = GroupedExperts(moe, moe.latent_width or hidden, dtype=dtype, setup=setup)
        self.shared: FeedForward | None = None
        if moe.shared_width:
            self.shared = FeedForward(hidden, moe.shared_width, gated=moe.shared_gated, dtype=dtype)
        if moe.shared_gate:
            self.add("shared_gate", (1, hidden), dtype)
        if moe.latent_width:
            self.add("latent_down", (moe.latent_width, hidden), dtype)
            self.add("latent_up", (hidden, moe.latent_width), dtype)

    def split(self, tensor: TensorGroup) -> None:
        """Stay whole, but for the parts; under sequence parallelism each rank sees its own tokens."""
        if tensor.sequence_parallel:
            self.mark_partial(*self.cuts)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens of shape (seq, batch, hidden) to the same shape."""
        routed = torch.cat([self._routed(part.flatten(0, 1)) for part in x.chunk(self.token_chunks)]).view_as(x)
        if self.shared is None:
            return routed
        shared = self.shared(x)
        if "shared_gate" in self.cuts:
            shared = shared * F.linear(x, self.get_parameter("shared_gate")).sigmoid()
        out: Tensor = routed + shared
        return out

    def _routed(self, rows: Tensor) -> Tensor:
        """Route, dispatch, compute and combine rows of shape (tokens, hidden)."""
        chosen, weights = self.router(rows)
        if "latent_down" in self.cuts:
            low = self.experts(F.linear(rows, self.get_parameter("latent_down")), chosen, weights)
            return F.linear(low, self.get_parameter("latent_up"))
        out: Tensor = self.experts(rows, chosen, weights)
        return out
