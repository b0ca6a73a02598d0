"""What data parallelism does with gradients, weights and optimizer state, whichever way they are sharded."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from ap_search.runtime.cuts import Kind
from ap_search.runtime.settings import RunSettings

CHECK, DP, TP_REPLICATED = "check", "dp", "tp_replicated"
Role = Literal["weights", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor that a rank keeps from step to step."""

    kind: Kind
    role: Role
    tensor: Tensor


class ModelState(Protocol):
    """Gradients, weights and optimizer of all chunks of a rank."""

    def before_backward(self, chunk: int, *, last: bool) -> None:
        """Prepare the backward of one micro-batch through a chunk; `last` of the step for this chunk."""

    def after_backward(self, chunk: int) -> None:
        """Take up the gradients of one micro-batch of a chunk."""

    def finish_gradients(self) -> None:
        """Complete the sums over data-parallel ranks, and over tp where a rank has only a part."""

    def gradients(self) -> dict[str, Tensor]:
        """Gather the finished gradients over data-parallel ranks, for comparing."""

    def weights(self) -> dict[str, Tensor]:
        """Gather the weights over data-parallel ranks, for comparing."""

    def update(self) -> None:
        """Run the optimizer, bring the weights up to date everywhere and clear the gradients."""

    def state(self) -> list[StateTensor]:
        """List what is kept from step to step."""


def make_adam(parameters: Iterable[nn.Parameter], settings: RunSettings) -> torch.optim.Adam:
    """Make the optimizer: Adam, one tensor at a time, so that its arithmetic does not depend on grouping."""
    return torch.optim.Adam(
        list(parameters), lr=settings.learning_rate, eps=settings.adam_epsilon, foreach=False, fused=False
    )
