"""The router: scores, group limits, top-k, weights."""

import torch
from torch import Tensor

from ap_search.runtime.cuts import CutModule, Kind
from ap_search.runtime.functions import router_logits
from ap_search.runtime.tensor import TensorGroup
from ap_search.spec.blocks import MoeFfn

# DeepSeek-V3 scores a group by the sum of its best two experts where there is a score bias, DeepSeek-V2 by its best.
BEST_WITH_BIAS = 2


class Router(CutModule):
    """Chooses `top_k` experts for each token and weighs them; weights sum to 1 where there are several."""

    def __init__(self, moe: MoeFfn, hidden: int, *, dtype: torch.dtype, router_dtype: torch.dtype) -> None:
        super().__init__()
        self.moe, self.router_dtype = moe, router_dtype
        self.add("weight", (moe.num_experts, hidden), dtype, kind=Kind.ROUTER)
        if moe.router_bias:
            self.add("bias", (moe.num_experts,), dtype, kind=Kind.ROUTER)
        if moe.score_bias:
            self.register_buffer("score_bias", torch.zeros(moe.num_experts, dtype=router_dtype))

    def split(self, tensor: TensorGroup) -> None:
        """Stay whole; under sequence parallelism each rank routes its own tokens."""
        if tensor.sequence_parallel:
            self.mark_partial(*self.cuts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route rows of shape (tokens, hidden): expert numbers and weights, both of shape (tokens, top_k)."""
        logits = router_logits(x, self.get_parameter("weight"), self.router_dtype)
        if self.moe.router_bias:
            logits = logits + self.get_parameter("bias").to(self.router_dtype)
        scores = logits.sigmoid() if self.moe.score_function == "sigmoid" else logits.softmax(-1)
        chosen = self._choose(scores.detach())
        weights = scores.gather(1, chosen)
        if self.moe.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights

    def _choose(self, scores: Tensor) -> Tensor:
        """Pick the best experts of the best groups."""
        if self.moe.score_bias:
            scores = scores + self.get_buffer("score_bias")
        if self.moe.topk_groups < self.moe.num_groups:
            scores = self._within_groups(scores)
        return scores.topk(self.moe.top_k, dim=-1).indices

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Leave only the best groups in the running."""
        groups = scores.unflatten(-1, (self.moe.num_groups, -1))
        best = min(BEST_WITH_BIAS if self.moe.score_bias else 1, groups.shape[-1])
        value = groups.topk(best, dim=-1).values.sum(-1)
        kept = value.topk(self.moe.topk_groups, dim=-1).indices
        out = torch.ones_like(value, dtype=torch.bool).scatter(-1, kept, False)
        left: Tensor = groups.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
        return left
