"""Taking rows and summing them back, one the other's backward, in one fixed order: dispatchers agree bit for bit."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ap_search.runtime.collectives import apply, wide_dtype


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Take rows; an index one past the end gives zeros."""
    padded = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    return padded.index_select(0, index)


def _summed(rows: Tensor, index: Tensor, sizes: Sequence[int], count: int) -> Tensor:
    """Add rows run by run; no run names a row twice, so the order of additions is that of the runs on any device."""
    total = rows.new_zeros((count + 1, *rows.shape[1:]), dtype=wide_dtype(rows.dtype))
    for part, places in zip(rows.split(list(sizes)), index.split(list(sizes)), strict=True):
        total.index_add_(0, places, part.to(total.dtype))
    return total[:count].to(rows.dtype, copy=True)  # a view would let in-place operations slip past FSDP's hooks


class _Take(torch.autograd.Function):
    """Rows of a tensor; the backward sums them back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, sizes: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.sizes, ctx.count = sizes, values.shape[0]
        return _taken(values, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _summed(grads[0], index, ctx.sizes, ctx.count), None, None


class _Sum(torch.autograd.Function):
    """Sums of rows; the backward takes them apart."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, sizes: Any, count: Any) -> Tensor:
        ctx.save_for_backward(index)
        return _summed(rows, index, sizes, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _taken(grads[0], index), None, None, None


def take_rows(values: Tensor, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Take rows, differentiably; an index one past the end gives a row of zeros.

    Parameters
    ----------
    values : Tensor
        Shape (count, ...).
    index : Tensor
        Rows to take, int64; in runs of `sizes`, no real row twice in a run.
    sizes : sequence of int
        Lengths of the runs.

    Returns
    -------
    Tensor
        Shape (len(index), ...).
    """
    return cast(Tensor, apply(_Take, values, index, tuple(sizes)))


def sum_rows(rows: Tensor, index: Tensor, sizes: Sequence[int], *, count: int) -> Tensor:
    """Sum rows into `count` places, differentiably, run by run in at least float32, then rounded once.

    Parameters
    ----------
    rows : Tensor
        Shape (len(index), ...).
    index : Tensor
        Place of each row, int64; `count` drops it. Runs as for `take_rows`.
    sizes : sequence of int
        Lengths of the runs.
    count : int
        Places.

    Returns
    -------
    Tensor
        Shape (count, ...), of the type of `rows`.
    """
    return cast(Tensor, apply(_Sum, rows, index, tuple(sizes), count))
