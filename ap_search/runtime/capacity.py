"""Which copies of tokens are sent: all, or the heaviest up to an expert's capacity, padded to it where asked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ap_search.cost.capacity import expert_capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Bound on the copies that one rank sends to one expert; `factor` None sends all."""

    factor: float | None = None
    padded: bool = False

    def slots(self, *, tokens: int, top_k: int, num_experts: int) -> int | None:
        """Count the copies that one rank may send to one expert, None where all are sent."""
        if self.factor is None:
            return None
        return int(expert_capacity(tokens=tokens, top_k=top_k, num_experts=num_experts, factor=self.factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies of one rank's tokens in the order of experts, each expert's by token.

    Attributes
    ----------
    token, slot : Tensor
        The copied token, and which of its `top_k` weights goes with it (flat index); one past the end for padding.
    counts : Tensor
        Copies for each expert, int64.
    """

    token: Tensor
    slot: Tensor
    counts: Tensor


def kept_copies(chosen: Tensor, weights: Tensor, *, num_experts: int, capacity: Capacity) -> Tensor:
    """Say which of a rank's copies capacity lets through.

    Parameters
    ----------
    chosen, weights : Tensor
        Shape (tokens, top_k): experts, and the router's weights.
    num_experts : int
        Of the layer.
    capacity : Capacity
        The bound.

    Returns
    -------
    Tensor
        Shape (tokens, top_k), bool: an expert keeps its heaviest copies, the earlier token where they weigh the same.

    Source: Megatron-LM `moe_utils.py` (apply_router_token_dropping, policy `probs`).
    """
    slots = capacity.slots(tokens=chosen.shape[0], top_k=chosen.shape[1], num_experts=num_experts)
    if slots is None or slots >= chosen.shape[0]:
        return torch.ones_like(chosen, dtype=torch.bool)
    given = torch.full((chosen.shape[0], num_experts), -torch.inf, dtype=weights.dtype, device=weights.device)
    given.scatter_(1, chosen, weights.detach())
    order = given.argsort(dim=0, descending=True, stable=True)
    place = order.argsort(dim=0)
    return place.gather(1, chosen) < slots


def sorted_copies(chosen: Tensor, kept: Tensor, *, num_experts: int, slots: int | None) -> Copies:
    """List the kept copies by expert; with `slots`, each expert's are padded to that number.

    Parameters
    ----------
    chosen, kept : Tensor
        Shape (tokens, top_k): experts, and which copies are sent.
    num_experts : int
        Of the layer.
    slots : int or None
        Length that each expert's list is padded to, None: no padding.

    Returns
    -------
    Copies
    """
    flat = kept.flatten().nonzero().squeeze(1)
    expert = chosen.flatten()[flat]
    order = expert.argsort(stable=True)
    flat, expert = flat[order], expert[order]
    counts = torch.bincount(expert, minlength=num_experts)
    token = flat.div(chosen.shape[1], rounding_mode="floor")
    if slots is None:
        return Copies(token=token, slot=flat, counts=counts)
    place = expert * slots + torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[expert]
    padded_token = token.new_full((num_experts * slots,), chosen.shape[0]).scatter(0, place, token)
    padded_slot = flat.new_full((num_experts * slots,), chosen.numel()).scatter(0, place, flat)
    return Copies(token=padded_token, slot=padded_slot, counts=torch.full_like(counts, slots))
