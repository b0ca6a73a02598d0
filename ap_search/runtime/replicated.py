"""Weights whole on every data-parallel rank: no sharding, ZeRO-1, ZeRO-2.

Gradients are summed, never averaged: the loss is already a mean over the global batch. Dense parameters and routers are
summed over dp (and cp), experts over edp, whose ranks are fewer, since their dispatch group has seen the other tokens.
"""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ap_search.plan.plan import Sharding
from ap_search.runtime.collectives import all_reduce, gather_even, rank_in, scatter_even, size_of, wide_dtype
from ap_search.runtime.cuts import Cut, Kind, named_cuts
from ap_search.runtime.settings import RunSettings
from ap_search.runtime.state import CHECK, DP, TP_REPLICATED, StateTensor, make_adam


class Bucket:
    """Parameters of one kind in one chunk, in flat buffers; ranks own equal parts where the optimizer is sharded."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        cuts: dict[str, Cut],
        *,
        kind: Kind,
        sharding: Sharding,
        group: ProcessGroup | None,
        tp: ProcessGroup | None,
        settings: RunSettings,
    ) -> None:
        self.kind, self.sharding, self.group, self.tp = kind, sharding, group, tp
        self.parameters = parameters
        owners = 1 if sharding == Sharding.NONE else size_of(group)
        self.sizes = [parameter.numel() for parameter in parameters.values()]
        length = -(-sum(self.sizes) // owners) * owners
        self.rest = length - sum(self.sizes)
        share = length // owners
        start = rank_in(group) * share if owners > 1 else 0
        self.owned = slice(start, start + share)
        first = next(iter(parameters.values()))
        self.flat = first.new_zeros(length, requires_grad=False)
        self._take_weights()
        self.total = torch.zeros(
            share if sharding == Sharding.ZERO2 else length, dtype=wide_dtype(first.dtype), device=first.device
        )
        self.pending: Tensor | None = None
        partial = [
            torch.full((size,), cuts[name].tp_partial) for name, size in zip(parameters, self.sizes, strict=True)
        ]
        marks = torch.cat([*partial, torch.zeros(self.rest, dtype=torch.bool)])[self.owned]
        self.partial = marks.nonzero().squeeze(1).to(first.device)
        own = self.flat[self.owned]
        self.master = nn.Parameter(own if own.dtype == self.total.dtype else own.to(self.total.dtype))
        self.adam = make_adam([self.master], settings)

    def _take_weights(self) -> None:
        """Move the weights into the flat buffer, where the gather of ZeRO-1 finds them, and hook their gradients."""
        parts = self.flat.split([*self.sizes, self.rest])
        for i, (part, parameter) in enumerate(zip(parts, self.parameters.values(), strict=False)):
            part.copy_(parameter.detach().flatten())
            parameter.data = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._hook(sum(self.sizes[:i])))

    def _hook(self, start: int) -> "_Accumulate":
        """Make what adds a parameter's new gradient to the flat sum."""
        return _Accumulate(self, start)

    def full(self) -> Tensor:
        """Give the buffer that a backward adds to: the sum itself, under ZeRO-2 a passing one of this micro-batch."""
        if self.sharding != Sharding.ZERO2:
            return self.total
        if self.pending is None:
            self.pending = torch.zeros(len(self.flat), dtype=self.total.dtype, device=self.total.device)
        return self.pending

    def reduce_microbatch(self) -> None:
        """Sum one micro-batch's gradients over ranks, ZeRO-2 only: what is kept is sharded."""
        if self.pending is not None:
            whole, self.pending = self.pending, None
            self.total += whole if self.group is None else scatter_even(whole, self.group, DP)

    def finish(self) -> None:
        """Sum over ranks what was not summed per micro-batch, then over tp what is only a part there."""
        if self.sharding == Sharding.NONE:
            all_reduce(self.total, self.group, DP)
        elif self.sharding == Sharding.ZERO1 and self.group is not None:
            self.total[self.owned] = scatter_even(self.total, self.group, DP)
        if self.tp is not None and len(self.partial):
            own = self._own()
            parts = own[self.partial]
            all_reduce(parts, self.tp, TP_REPLICATED)
            own[self.partial] = parts

    def _own(self) -> Tensor:
        """View this rank's part of the finished gradients."""
        return self.total if self.sharding == Sharding.ZERO2 else self.total[self.owned]

    def update(self) -> None:
        """Step this rank's part, then gather everybody's."""
        self.master.grad = self._own()
        self.adam.step()
        self.master.grad = None
        own = self.flat[self.owned]
        own.copy_(self.master.detach())
        if self.sharding != Sharding.NONE and self.group is not None:
            self.flat.copy_(gather_even(own, self.group, DP))
        self.total.zero_()

    def gradients(self) -> dict[str, Tensor]:
        """Gather the finished gradients for comparing."""
        whole = self._own()
        if self.sharding != Sharding.NONE and self.group is not None:
            whole = gather_even(whole, self.group, CHECK)
        parts = whole.clone().split([*self.sizes, self.rest])
        named = zip(self.parameters.items(), parts, strict=False)
        return {name: part.view(parameter.shape) for (name, parameter), part in named}

    def state(self) -> list[StateTensor]:
        """List weights, gradients, and of the optimizer the moments and the master weights where there are any."""
        moments = [one for one in self.adam.state[self.master].values() if one.dim()] if self.adam.state else []
        masters = [] if self.master.dtype == self.flat.dtype else [self.master.detach()]
        kept = [StateTensor(kind=self.kind, role="optimizer", tensor=one) for one in (*masters, *moments)]
        return [
            StateTensor(kind=self.kind, role="weights", tensor=self.flat),
            StateTensor(kind=self.kind, role="gradients", tensor=self.total),
            *kept,
        ]


class _Accumulate:
    """Adds a parameter's gradient to its place in the flat sum, and lets it go."""

    def __init__(self, bucket: Bucket, start: int) -> None:
        self.bucket, self.start = bucket, start

    def __call__(self, parameter: Tensor) -> None:
        """Run after autograd has set the gradient."""
        assert parameter.grad is not None
        self.bucket.full()[self.start : self.start + parameter.numel()] += parameter.grad.flatten()
        parameter.grad = None


class ReplicatedState:
    """Buckets of all chunks: none, ZeRO-1 or ZeRO-2."""

    def __init__(
        self,
        chunks: list[nn.Module],
        *,
        sharding: Sharding,
        dense: ProcessGroup | None,
        expert: ProcessGroup | None,
        tp: ProcessGroup | None,
        settings: RunSettings,
    ) -> None:
        self.buckets: list[list[Bucket]] = []
        for chunk in chunks:
            cuts, named = named_cuts(chunk), dict(chunk.named_parameters())
            by_kind = {kind: {name: named[name] for name in named if cuts[name].kind is kind} for kind in Kind}
            self.buckets.append(
                [
                    Bucket(
                        parameters, cuts, kind=kind, sharding=sharding, group=expert if kind is Kind.EXPERT else dense,
                        tp=tp, settings=settings,
                    )
                    for kind, parameters in by_kind.items()
                    if parameters
                ]
            )  # fmt: skip

    @property
    def _all(self) -> list[Bucket]:
        """Every bucket, in the same order on each rank of a group."""
        return [bucket for buckets in self.buckets for bucket in buckets]

    def before_backward(self, chunk: int, *, last: bool) -> None:
        """Nothing to prepare."""

    def after_backward(self, chunk: int) -> None:
        """Reduce this micro-batch's gradients where they are kept sharded."""
        for bucket in self.buckets[chunk]:
            bucket.reduce_microbatch()

    def finish_gradients(self) -> None:
        """Complete the sums over data-parallel ranks, and over tp."""
        for bucket in self._all:
            bucket.finish()

    def gradients(self) -> dict[str, Tensor]:
        """Gather the finished gradients."""
        return {name: one for bucket in self._all for name, one in bucket.gradients().items()}

    def weights(self) -> dict[str, Tensor]:
        """Copy the weights, which every rank holds whole."""
        return {name: one.detach().clone() for bucket in self._all for name, one in bucket.parameters.items()}

    def update(self) -> None:
        """Run the optimizer of every bucket."""
        for bucket in self._all:
            bucket.update()

    def state(self) -> list[StateTensor]:
        """List what is kept from step to step."""
        return [one for bucket in self._all for one in bucket.state()]
