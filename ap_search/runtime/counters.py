"""Count what a run really does: bytes sent per purpose, bytes saved for backward per block."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ap_search.cost.collective import sent_bytes
from ap_search.runtime.collectives import current_label
from ap_search.runtime.routing import Router
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


# What each operator sends; arguments as in the operators' schemas.
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

# Operators of the same namespaces that send nothing of the model. Any other one is unknown: its traffic gets a name
# that no check knows, so that it fails.
SILENT = frozenset(
    {
        c10d.barrier,
        c10d.check_for_nan,
        c10d.monitored_barrier_,
        c10d.recv_,
        c10d.recv_any_source_,
        functional.wait_tensor,
    }
)
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def _unknown(packet: Any) -> bool:
    """Whether an operator communicates in a way that is not read here."""
    return packet not in READERS and packet not in SILENT and str(packet).split(".")[0] in NAMESPACES


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
        packet = func._overloadpacket
        reader = READERS.get(packet)
        if reader is not None:
            kind, size_bytes = reader(args)
            purpose = current_label() or PURPOSE_BY_KIND.get(kind, "other")
            self.sent_bytes[purpose] += size_bytes
            self.by_kind[purpose, kind] += size_bytes
        elif _unknown(packet):
            self.sent_bytes[str(packet)] += sum(
                _size(one) for one in tree_leaves(args) if isinstance(one, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


class SavedBytes:
    """Bytes that autograd keeps from forward to backward, per block and micro-batch, each storage once.

    A storage belongs to the block that saves it first; parameters and buffers do not count. `by_block` maps a block's
    name to the bytes of each of its forwards, in order. What says where tokens go is apart, under `NAME routing`:
    integers of blocks with a router, and the router's own scores. What no block saves is the loss's: one figure for the
    step under `loss`.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], *, dtype: torch.dtype) -> None:
        self.by_block: dict[str, list[int]] = defaultdict(list)
        self._blocks = blocks
        self._dtype = dtype
        self._open: list[tuple[str, nn.Module]] = []
        self._in_router = False
        self._seen: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in here; storages are held until the end, so that none is taken for another at the same place."""
        with ExitStack() as stack:
            for name, block in self._blocks:
                routers = [module for module in block.modules() if isinstance(module, Router)]
                self._hook(stack, block, self._opener(name, routed=bool(routers)), self._close)
                for router in routers:
                    self._hook(stack, router, self._enter_router, self._leave_router)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept))
            yield
        self._seen.clear()

    @staticmethod
    def _hook(stack: ExitStack, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call one function before and one after each forward of a module."""
        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after, always_call=True).remove)

    def _opener(self, name: str, *, routed: bool) -> Callable[..., None]:
        """Hook that opens a block."""

        def opened(module: nn.Module, inputs: Any) -> None:
            self._open.append((name, module))
            self.by_block[name].append(0)
            if routed:
                self.by_block[f"{name} routing"].append(0)

        return opened

    def _close(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hook that closes a block."""
        self._open.pop()

    def _enter_router(self, module: nn.Module, inputs: Any) -> None:
        """Hook that opens a router."""
        self._in_router = True

    def _leave_router(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hook that closes a router."""
        self._in_router = False

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what is saved; of token numbers, which lie in the batch of the step, only those that are used."""
        storage, whole = tensor.untyped_storage(), tensor.is_floating_point()
        address = storage.data_ptr() if whole else tensor.data_ptr()
        if address not in self._seen and (owner := self._owner(tensor, address)):
            self._seen[address] = storage
            self.by_block[owner][-1] += storage.nbytes() if whole else _size(tensor)
        return tensor

    def _owner(self, tensor: torch.Tensor, address: int) -> str:
        """Name what the tensor is counted for, nothing where it does not count."""
        if self._open:
            name, module = self._open[-1]
            # Looked up now: FSDP gives a parameter a new storage at each gather.
            if address in _constant_addresses(module):
                return ""
            routing = not tensor.is_floating_point() or (self._in_router and tensor.dtype != self._dtype)
            return f"{name} routing" if routing and f"{name} routing" in self.by_block else name
        if torch._C._current_graph_task_id() >= 0:  # A backward that computes a graph of its own keeps nothing.
            return ""
        if not self.by_block["loss"]:
            self.by_block["loss"].append(0)
        return "loss"


def _constant_addresses(module: nn.Module) -> set[int]:
    """Addresses of parameters and buffers, those of sharded ones on this rank."""
    held = itertools.chain(module.parameters(), module.buffers())
    return {getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr() for tensor in held}
