"""Count what a run really does: bytes sent per purpose, bytes saved for backward per block."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ap_search.cost.collective import sent_bytes
from ap_search.runtime.collectives import current_label
from ap_search.spec.machine import Collective

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional
Message = tuple[str, int]
Reader = Callable[[Any], Message]

PURPOSE_BY_KIND = {"all_gather": "dp", "reduce_scatter": "dp", "all_reduce": "dp", "send": "pp"}


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _ring(kind: Collective, size_bytes: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring collective over a buffer of `size_bytes`."""
    return round(float(sent_bytes(kind, size_bytes=float(size_bytes), ranks=float(ranks))))


def _gathered(group: dist.ProcessGroup, outputs: Sequence[torch.Tensor]) -> Message:
    """All-gather that fills `outputs`."""
    return "all_gather", _ring(Collective.ALL_GATHER, sum(map(_size, outputs)), group.size())


def _scattered(group: dist.ProcessGroup, inputs: Sequence[torch.Tensor]) -> Message:
    """Reduce-scatter of `inputs`."""
    return "reduce_scatter", _ring(Collective.REDUCE_SCATTER, sum(map(_size, inputs)), group.size())


def _reduced(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> Message:
    """All-reduce of `tensors`."""
    return "all_reduce", _ring(Collective.ALL_REDUCE, sum(map(_size, tensors)), group.size())


def _exchanged(group: dist.ProcessGroup, tensor: torch.Tensor, splits: Sequence[int]) -> Message:
    """All-to-all of the rows of `tensor`; what a rank sends to itself does not count."""
    rows = list(splits) or [len(tensor) // group.size()] * group.size()
    return "all_to_all", (len(tensor) - rows[group.rank()]) * _size(tensor[:1]) if len(tensor) else 0


def _told(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], root: int) -> Message:
    """Broadcast: the root sends its buffer once, around a ring."""
    return "broadcast", sum(map(_size, tensors)) if group.rank() == root and group.size() > 1 else 0


def _flat(nested: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Tensors of a list of lists."""
    return [tensor for inner in nested for tensor in inner]


def _group(boxed: Any) -> dist.ProcessGroup:
    """Process group of a script object, or of a group's name."""
    if isinstance(boxed, str):
        return dist.distributed_c10d._resolve_process_group(cast(Any, boxed))
    return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)


# What each operator sends; arguments as in the operators' schemas. What is not listed moves no data of the model.
READERS: Mapping[Any, Reader] = {
    c10d._allgather_base_: lambda a: _gathered(_group(a[2]), [a[0]]),
    c10d.allgather_: lambda a: _gathered(_group(a[2]), _flat(a[0])),
    c10d.allgather_into_tensor_coalesced_: lambda a: _gathered(_group(a[2]), a[0]),
    c10d._reduce_scatter_base_: lambda a: _scattered(_group(a[2]), [a[1]]),
    c10d.reduce_scatter_: lambda a: _scattered(_group(a[2]), _flat(a[1])),
    c10d.reduce_scatter_tensor_coalesced_: lambda a: _scattered(_group(a[2]), a[1]),
    c10d.allreduce_: lambda a: _reduced(_group(a[1]), a[0]),
    c10d.allreduce_coalesced_: lambda a: _reduced(_group(a[1]), a[0]),
    c10d.alltoall_base_: lambda a: _exchanged(_group(a[2]), a[1], a[4]),
    c10d.broadcast_: lambda a: _told(_group(a[1]), a[0], a[2]),
    c10d.send: lambda a: ("send", sum(map(_size, a[0]))),
    functional.all_gather_into_tensor: lambda a: _gathered(_group(a[2]), [a[0]] * a[1]),
    functional.reduce_scatter_tensor: lambda a: _scattered(_group(a[3]), [a[0]]),
    functional.all_reduce: lambda a: _reduced(_group(a[2]), [a[0]]),
    functional.all_to_all_single: lambda a: _exchanged(_group(a[3]), a[0], a[2]),
}


class TrafficCounter(TorchDispatchMode):
    """Sees every collective of this thread and of its backward passes, FSDP2's and the pipeline's included.

    `sent_bytes` maps a purpose (`dispatch`, `combine`, `tp`, `dp`, `pp`, ...) to the bytes that this rank sent to
    others for it, `by_kind` a purpose and a collective. A purpose is the label of the call; without one, the
    kind says it: a send is the pipeline's, other collectives are of data parallelism.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operator if it sends, and run it."""
        reader = READERS.get(func._overloadpacket)
        if reader is not None:
            kind, size_bytes = reader(args)
            purpose = current_label() or PURPOSE_BY_KIND.get(kind, "other")
            self.sent_bytes[purpose] += size_bytes
            self.by_kind[purpose, kind] += size_bytes
        return func(*args, **(kwargs or {}))


class SavedBytes:
    """Bytes that autograd keeps from forward to backward, per block and micro-batch, each storage once.

    A storage belongs to the block that saves it first; parameters and buffers do not count. `by_block` maps a block's
    name to the bytes of each of its forwards, in order.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self.by_block: dict[str, list[int]] = {name: [] for name, _ in blocks}
        self._blocks = blocks
        self._open: list[tuple[str, nn.Module]] = []
        self._seen: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in here; storages are held until the end, so that none is taken for another at the same place."""
        with ExitStack() as stack:
            for name, module in self._blocks:
                stack.callback(module.register_forward_pre_hook(self._opener(name)).remove)
                stack.callback(module.register_forward_hook(self._close, always_call=True).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept))
            yield
        self._seen.clear()

    def _opener(self, name: str) -> Callable[[nn.Module, Any], None]:
        """Hook that opens a block."""

        def opened(module: nn.Module, inputs: Any) -> None:
            self._open.append((name, module))
            self.by_block[name].append(0)

        return opened

    def _close(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hook that closes a block."""
        self._open.pop()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what is saved."""
        if self._open:
            name, module = self._open[-1]
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            # Looked up now: FSDP gives a parameter a new storage at each gather.
            if address not in self._seen and address not in _constant_addresses(module):
                self._seen[address] = storage
                self.by_block[name][-1] += storage.nbytes()
        return tensor


def _constant_addresses(module: nn.Module) -> set[int]:
    """Addresses of parameters and buffers, those of sharded ones on this rank."""
    held = itertools.chain(module.parameters(), module.buffers())
    return {getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr() for tensor in held}
