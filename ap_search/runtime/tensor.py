"""Tensor parallelism: products cut by columns or rows, with sequence parallelism or not; split cross-entropy."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ap_search.runtime.collectives import all_reduce, apply, gather_even, scatter_even, wide_dtype

TP, LOSS = "tp", "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """A tensor-parallel group as this rank sees it; `process` is None for a rank alone."""

    process: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False


ALONE = TensorGroup()


def _gathered(x: Tensor, tensor: TensorGroup) -> Tensor:
    """All tokens, where each rank holds a part of them."""
    return gather_even(x, tensor.process, TP) if tensor.process and tensor.sequence_parallel else x


def _reduced(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Sum over the group: this rank's tokens of it under sequence parallelism, else all."""
    if tensor.process is None:
        return x
    if tensor.sequence_parallel:
        return scatter_even(x, tensor.process, TP)
    total = x.clone()
    all_reduce(total, tensor.process, TP)
    return total


class _Columns(torch.autograd.Function):
    """Products of one input with matrices cut by columns: saves the local input, and gathers it again in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, x: Tensor, *weights: Tensor) -> Any:
        ctx.tensor = tensor
        ctx.save_for_backward(x, *weights)
        whole = _gathered(x, tensor)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        rows = _gathered(x, ctx.tensor).flatten(0, -2)
        of_weights = [grad.flatten(0, -2).t() @ rows for grad in grads]
        of_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            of_x = of_x + grad @ weight
        return None, _reduced(of_x, ctx.tensor), *of_weights


class _Reduce(torch.autograd.Function):
    """Sum of partial products over the group; the backward gathers, or hands on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: Any) -> Tensor:
        ctx.tensor = tensor
        return _reduced(x, tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gathered(grads[0], ctx.tensor), None


def column_products(x: Tensor, weights: tuple[Tensor, ...], tensor: TensorGroup) -> tuple[Tensor, ...]:
    """Multiply the tokens with matrices that are cut by columns.

    Parameters
    ----------
    x : Tensor
        Shape (seq, batch, hidden): under sequence parallelism this rank's part of the sequence.
    weights : tuple of Tensor
        Shape (columns / tp, hidden) each.
    tensor : TensorGroup
        The group, and whether the sequence is split over it.

    Returns
    -------
    tuple of Tensor
        Shape (whole seq, batch, columns / tp) each.
    """
    return cast(tuple[Tensor, ...], apply(_Columns, tensor, x, *weights))


def row_product(x: Tensor, weight: Tensor, tensor: TensorGroup) -> Tensor:
    """Multiply with a matrix that is cut by rows, and sum over the group.

    Parameters
    ----------
    x : Tensor
        Shape (whole seq, batch, columns / tp).
    weight : Tensor
        Shape (hidden, columns / tp).
    tensor : TensorGroup
        The group, and whether the sequence is split over it.

    Returns
    -------
    Tensor
        Shape (seq, batch, hidden), this rank's part under sequence parallelism.
    """
    product: Tensor = F.linear(x, weight)
    return reduce_partial(product, tensor)


def reduce_partial(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Sum partial results over the group, differentiably; under sequence parallelism each rank keeps its part."""
    if tensor.process is None:
        return x
    reduced: Tensor = apply(_Reduce, x, tensor)
    return reduced


NOT_HERE = -1


def local_rows(tokens: Tensor, rows: int, tensor: TensorGroup) -> Tensor:
    """Number tokens by this rank's rows of the vocabulary; `NOT_HERE` for those of other ranks."""
    local = tokens - tensor.rank * rows
    return local.masked_fill((local < 0) | (local >= rows), NOT_HERE)


class _SplitEmbedding(torch.autograd.Function):
    """Rows of this rank's part of an embedding, zeros for tokens of other ranks; saves the local numbers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = weight.shape[0]
        return F.embedding(place.clamp(min=0), weight) * (place >= 0).unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (place,) = ctx.saved_tensors
        here = place >= 0
        found = torch.zeros(ctx.rows, grads[0].shape[-1], dtype=wide_dtype(grads[0].dtype), device=grads[0].device)
        found.index_add_(0, place[here], grads[0][here].to(found.dtype))
        return found.to(grads[0].dtype), None


def split_embedding(tokens: Tensor, weight: Tensor, tensor: TensorGroup) -> Tensor:
    """Embed tokens by a vocabulary whose rows are split over the group.

    Parameters
    ----------
    tokens : Tensor
        Shape (seq, batch), int64.
    weight : Tensor
        This rank's rows.
    tensor : TensorGroup
        The group; with sequence parallelism each rank keeps its part of the sequence.

    Returns
    -------
    Tensor
        Shape (seq, batch, hidden).
    """
    found: Tensor = apply(_SplitEmbedding, weight, local_rows(tokens, weight.shape[0], tensor))
    return reduce_partial(found, tensor)


class _CrossEntropy(torch.autograd.Function):
    """Loss per token from logits whose vocabulary is split over the group; saves the softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tensor: Any) -> Tensor:
        wide = logits.to(wide_dtype(logits.dtype))
        top = wide.amax(-1)
        all_reduce(top, tensor.process, LOSS, op=dist.ReduceOp.MAX)
        exponents = (wide - top.unsqueeze(-1)).exp()
        total = exponents.sum(-1)
        all_reduce(total, tensor.process, LOSS)
        place = local_rows(labels, logits.shape[-1], tensor)
        target = (wide.gather(-1, place.clamp(min=0).unsqueeze(-1)).squeeze(-1) - top) * (place >= 0)
        all_reduce(target, tensor.process, LOSS)
        ctx.save_for_backward(exponents / total.unsqueeze(-1), place)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, place = ctx.saved_tensors
        here = (place >= 0).to(softmax.dtype).unsqueeze(-1)
        of_logits = softmax.scatter_add(-1, place.clamp(min=0).unsqueeze(-1), -here)
        return (of_logits * grads[0].unsqueeze(-1)).to(ctx.dtype), None, None


def cross_entropy(logits: Tensor, labels: Tensor, tensor: TensorGroup) -> Tensor:
    """Negative log-likelihood of each token.

    Parameters
    ----------
    logits : Tensor
        Shape (..., vocabulary / tp).
    labels : Tensor
        Shape (...), int64.
    tensor : TensorGroup
        The group that splits the vocabulary.

    Returns
    -------
    Tensor
        Shape (...), at least float32, the same on each rank of the group.
    """
    return cast(Tensor, apply(_CrossEntropy, logits, labels, tensor))
