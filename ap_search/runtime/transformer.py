"""A decoder-only transformer from a model's own sizes, or the consecutive part of it that a pipeline stage holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ap_search.cost.state import padded_vocab
from ap_search.plan.plan import Plan, Recompute
from ap_search.runtime.attention import SelfAttention
from ap_search.runtime.capacity import Capacity
from ap_search.runtime.cuts import CutModule
from ap_search.runtime.dispatch import DispatcherSetup
from ap_search.runtime.feed_forward import FeedForward
from ap_search.runtime.functions import rms_norm
from ap_search.runtime.moe import MoE
from ap_search.runtime.settings import RunSettings
from ap_search.runtime.tensor import ALONE, TensorGroup, column_products, split_embedding
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, Model, MoeFfn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all modules of one model share: sizes, types, rows of the vocabulary with padding, capacity."""

    model: Model
    vocab_rows: int
    dtype: torch.dtype
    router_dtype: torch.dtype
    capacity: Capacity
    recompute: bool = False

    @classmethod
    def of(cls, model: Model, plan: Plan, settings: RunSettings) -> "Shape":
        """Read them out of model, plan and settings."""
        return cls(
            model=model,
            vocab_rows=int(padded_vocab(model.vocab_size, divisor=settings.vocab_divisor, tp=plan.tp)),
            dtype=getattr(torch, settings.dtype),
            router_dtype=getattr(torch, settings.router_dtype),
            capacity=Capacity(factor=settings.capacity_factor, padded=settings.pad_to_capacity),
            recompute=plan.recompute == Recompute.FULL,
        )


class Norm(CutModule):
    """RMSNorm or LayerNorm of the hidden size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.add("weight", (shape.model.hidden_size,), shape.dtype)
        if shape.model.norm_params_per_element > 1:
            self.add("bias", (shape.model.hidden_size,), shape.dtype)

    def split(self, tensor: TensorGroup) -> None:
        """Stay whole; under sequence parallelism each rank normalises its own tokens."""
        if tensor.sequence_parallel:
            self.mark_partial(*self.cuts)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise tokens of shape (..., hidden)."""
        weight = self.get_parameter("weight")
        if "bias" in self.cuts:
            return F.layer_norm(x, weight.shape, weight, self.get_parameter("bias"))
        return rms_norm(x, weight)


class Block(nn.Module):
    """One decoder layer: attention and a feed-forward, each behind a norm and beside a residual."""

    def __init__(self, kind: LayerKind, shape: Shape) -> None:
        super().__init__()
        hidden = shape.model.hidden_size
        assert isinstance(kind.mixer, Attention)
        self.recompute = shape.recompute
        self.attention_norm = Norm(shape)
        self.attention = SelfAttention(kind.mixer, hidden, dtype=shape.dtype)
        self.ffn_norm = Norm(shape)
        self.ffn: FeedForward | MoE
        if isinstance(kind.ffn, MoeFfn):
            setup = DispatcherSetup(
                num_experts=kind.ffn.num_experts, capacity=shape.capacity, sum_dtype=shape.router_dtype
            )
            self.ffn = MoE(kind.ffn, hidden, dtype=shape.dtype, router_dtype=shape.router_dtype, setup=setup)
        else:
            assert isinstance(kind.ffn, DenseFfn)
            self.ffn = FeedForward(hidden, kind.ffn.width, gated=kind.ffn.gated, dtype=shape.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens of shape (seq, batch, hidden) to the same shape."""
        if self.recompute:
            # All of the forward is run again, its combine too, as Megatron-LM's checkpoint does and as is priced.
            again: Tensor = checkpoint(self._run, x, use_reentrant=False, preserve_rng_state=False, early_stop=False)
            return again
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        """Run attention, then the feed-forward."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Embedding(CutModule):
    """Token embedding, rows split over tp."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tensor = ALONE
        self.add("weight", (shape.vocab_rows, shape.model.hidden_size), shape.dtype)

    def split(self, tensor: TensorGroup) -> None:
        """Keep this rank's rows."""
        self.tensor = tensor
        self.narrow("weight", dim=0, index=tensor.rank, count=tensor.size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens of shape (batch, seq): shape (seq, batch, hidden), this rank's part of the sequence."""
        weight = self.get_parameter("weight")
        if self.tensor.process is None:
            return F.embedding(tokens.t(), weight)
        return split_embedding(tokens.t(), weight, self.tensor)


class Head(CutModule):
    """Final norm and output matrix, its rows split over tp; without a matrix of its own where embeddings are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tensor = ALONE
        self.norm = Norm(shape)
        if not shape.model.tied_embeddings:
            self.add("weight", (shape.vocab_rows, shape.model.hidden_size), shape.dtype)

    def split(self, tensor: TensorGroup) -> None:
        """Keep this rank's rows."""
        self.tensor = tensor
        if self.cuts:
            self.narrow("weight", dim=0, index=tensor.rank, count=tensor.size)

    def forward(self, x: Tensor, tied: Tensor | None) -> Tensor:
        """Logits of tokens of shape (seq, batch, hidden): shape (whole seq, batch, vocabulary / tp)."""
        weight = self.get_parameter("weight") if tied is None else tied
        return column_products(self.norm(x), (weight,), self.tensor)[0]


class Chunk(nn.Module):
    """Consecutive layers, with the embedding where it is the first and the head where it is the last.

    Layers are named by their number in the whole model, so that a parameter has one name under every plan.
    """

    def __init__(self, shape: Shape, layers: Sequence[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = Embedding(shape) if first else None
        kinds = shape.model.kinds
        self.layers = nn.ModuleDict({str(i): Block(kinds[shape.model.layers[i]], shape) for i in layers})
        self.head = Head(shape) if last else None
        self.tied = shape.model.tied_embeddings

    def forward(self, x: Tensor) -> Tensor:
        """Map token numbers (batch, seq), or what the chunk before gave, to hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None:
            return x
        tied = self.embedding.get_parameter("weight") if self.tied and self.embedding is not None else None
        logits: Tensor = self.head(x, tied)
        return logits
