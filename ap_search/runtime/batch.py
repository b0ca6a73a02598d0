"""Tokens of one step: the whole global batch, the same on every rank, and each rank's part of it."""

from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from ap_search.plan.plan import Plan
from ap_search.runtime.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens of shape (micro-batches, dp, mbs, seq + 1): inputs are all but the last, labels all but the first."""

    tokens: Tensor

    def of(self, dp_index: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one replica, each of shape (micro-batches * mbs, seq)."""
        own = self.tokens[:, dp_index].flatten(0, 1)
        return own[:, :-1], own[:, 1:]

    def in_one_process(self) -> "Batch":
        """Put the replicas' micro-batches one after another, for a process that works for all of them."""
        return Batch(tokens=self.tokens.flatten(0, 1).unsqueeze(1))

    @property
    def num_labels(self) -> int:
        """Labels of the global batch, which the loss is a mean over."""
        return self.tokens[..., 1:].numel()


def make_batch(vocab_size: int, plan: Plan, settings: RunSettings, *, step: int) -> Batch:
    """Draw the tokens of one step.

    Parameters
    ----------
    vocab_size : int
        Of the model, without padding.
    plan : Plan
        Its dp, mbs and number of micro-batches.
    settings : RunSettings
        Sequence length and seed.
    step : int
        Steps differ.

    Returns
    -------
    Batch
    """
    digest = sha256(f"{settings.seed}:tokens:{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    shape = (plan.num_microbatches, plan.dp, plan.mbs, settings.seq_len + 1)
    return Batch(tokens=torch.randint(vocab_size, shape, generator=generator))
