"""Collectives with their autograd mirror. Each call is labelled with what it carries, forward and backward alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_LABELS: list[str] = []
# Named so from PyTorch 2.13 on, which warns about the older names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Call a differentiable function; PyTorch gives its `apply` no types."""
    return function.apply(*arguments)


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Label the collectives issued inside: dispatch, combine, layout, tp or dp."""
    _LABELS.append(label)
    try:
        yield
    finally:
        _LABELS.pop()


def current_label() -> str | None:
    """Tell what the collective being issued carries, None for those of FSDP and of the pipeline."""
    return _LABELS[-1] if _LABELS else None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the type in which sums of this type are taken: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def size_of(group: ProcessGroup | None) -> int:
    """Count the ranks of a group; None is a group of this rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """Give this rank's number in a group; None is a group of this rank alone."""
    return 0 if group is None else dist.get_rank(group)


def exchange(rows: Tensor, *, send: Sequence[int], receive: Sequence[int], group: ProcessGroup, label: str) -> Tensor:
    """Send consecutive runs of rows to the ranks of a group and receive theirs, without autograd."""
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    with labelled(label):
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def gather_even(rows: Tensor, group: ProcessGroup, label: str) -> Tensor:
    """Concatenate the equally many rows of each rank, without autograd."""
    gathered = rows.new_empty((rows.shape[0] * size_of(group), *rows.shape[1:]))
    with labelled(label):
        _ALL_GATHER(gathered, rows.contiguous(), group=group)
    return gathered


def scatter_even(rows: Tensor, group: ProcessGroup, label: str) -> Tensor:
    """Sum over ranks and keep this rank's equal share of the rows, without autograd."""
    kept = rows.new_empty((rows.shape[0] // size_of(group), *rows.shape[1:]))
    with labelled(label):
        _REDUCE_SCATTER(kept, rows.contiguous(), group=group)
    return kept


def gather_uneven(rows: Tensor, sizes: Sequence[int], *, group: ProcessGroup, label: str) -> Tensor:
    """Concatenate `sizes[r]` rows of each rank r, without autograd: an exchange that sends all rows to every rank."""
    ranks = len(sizes)
    every = rows.repeat(ranks, *[1] * (rows.dim() - 1))
    return exchange(every, send=[rows.shape[0]] * ranks, receive=sizes, group=group, label=label)


def scatter_uneven(rows: Tensor, sizes: Sequence[int], *, group: ProcessGroup, label: str) -> Tensor:
    """Sum over ranks, in the order of ranks, and keep this rank's `sizes[r]` rows, without autograd."""
    mine = sizes[rank_in(group)]
    equal = [mine] * len(sizes)
    parts = exchange(rows, send=sizes, receive=equal, group=group, label=label).split(equal)
    total = torch.zeros_like(parts[0], dtype=wide_dtype(rows.dtype))
    for part in parts:
        total += part
    return total.to(rows.dtype)


class _AllToAll(torch.autograd.Function):
    """An all-to-all; its backward is the same with the splits swapped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Any, receive: Any, group: Any, label: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.label = send, receive, group, label
        return exchange(rows, send=send, receive=receive, group=group, label=label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = exchange(grads[0], send=ctx.receive, receive=ctx.send, group=ctx.group, label=ctx.label)
        return back, None, None, None, None


class _GatherRows(torch.autograd.Function):
    """An all-gather of rows; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Any, group: Any, label: Any) -> Tensor:
        ctx.sizes, ctx.group, ctx.label = sizes, group, label
        return gather_uneven(rows, sizes, group=group, label=label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scatter_uneven(grads[0], ctx.sizes, group=ctx.group, label=ctx.label), None, None, None


class _ScatterRows(torch.autograd.Function):
    """A reduce-scatter of rows; its backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Any, group: Any, label: Any) -> Tensor:
        ctx.sizes, ctx.group, ctx.label = sizes, group, label
        return scatter_uneven(rows, sizes, group=group, label=label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather_uneven(grads[0], ctx.sizes, group=ctx.group, label=ctx.label), None, None, None


def all_to_all(
    rows: Tensor, *, send: Sequence[int], receive: Sequence[int], group: ProcessGroup | None, label: str
) -> Tensor:
    """Exchange rows with the ranks of a group, differentiably.

    Parameters
    ----------
    rows : Tensor
        Shape (sum(send), ...), runs of rows in the order of destination ranks.
    send, receive : sequence of int
        Rows for and from each rank.
    group : ProcessGroup or None
        None: this rank alone, nothing moves.
    label : str
        What is carried, forward and backward.

    Returns
    -------
    Tensor
        Shape (sum(receive), ...), runs in the order of source ranks.
    """
    if group is None:
        return rows
    return cast(Tensor, apply(_AllToAll, rows, tuple(send), tuple(receive), group, label))


def gather_rows(rows: Tensor, *, sizes: Sequence[int], group: ProcessGroup | None, label: str) -> Tensor:
    """All-gather `sizes[r]` rows of each rank r, differentiably; the backward sums in the order of ranks.

    Parameters
    ----------
    rows : Tensor
        This rank's rows.
    sizes : sequence of int
        Rows of each rank.
    group : ProcessGroup or None
        None: this rank alone.
    label : str
        What is carried.

    Returns
    -------
    Tensor
        Shape (sum(sizes), ...).
    """
    if group is None:
        return rows
    return cast(Tensor, apply(_GatherRows, rows, tuple(sizes), group, label))


def scatter_rows(rows: Tensor, *, sizes: Sequence[int], group: ProcessGroup | None, label: str) -> Tensor:
    """Reduce-scatter rows, `sizes[r]` to each rank r, differentiably; sums are taken in the order of ranks.

    Parameters
    ----------
    rows : Tensor
        Shape (sum(sizes), ...).
    sizes : sequence of int
        Rows that each rank keeps.
    group : ProcessGroup or None
        None: this rank alone.
    label : str
        What is carried.

    Returns
    -------
    Tensor
        This rank's rows of the sum.
    """
    if group is None:
        return rows
    return cast(Tensor, apply(_ScatterRows, rows, tuple(sizes), group, label))


def all_reduce(
    values: Tensor, group: ProcessGroup | None, label: str, *, op: dist.ReduceOp.RedOpType | None = None
) -> None:
    """Sum (or reduce otherwise) over a group in place, without autograd."""
    if group is not None:
        with labelled(label):
            dist.all_reduce(values, op=op or dist.ReduceOp.SUM, group=group)
