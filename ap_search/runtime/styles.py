"""Parallel styles: `apply(module, device_mesh)` cuts a module's parameters and tells it its groups.

A style is applied before FSDP takes the same module: FSDP flattens parameters that a style would cut afterwards. On
parents and children the order is free, as far as the parent leaves the child's parameters alone (`ignored_params`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ap_search.plan.plan import Dispatcher as DispatcherKind
from ap_search.runtime.dispatch import Dispatcher, DispatcherSetup, ExpertGroups
from ap_search.runtime.dispatch_allgather import AllgatherDispatcher
from ap_search.runtime.dispatch_alltoall import AlltoallDispatcher
from ap_search.runtime.dispatch_dedup import DedupDispatcher
from ap_search.runtime.experts import GroupedExperts
from ap_search.runtime.tensor import TensorGroup


class StyleOrderError(RuntimeError):
    """A style was applied to a module whose parameters FSDP already holds."""


@runtime_checkable
class Splittable(Protocol):
    """A module that tensor parallelism knows how to cut."""

    def split(self, tensor: TensorGroup) -> None:
        """Keep this rank's part."""


def _group(mesh: DeviceMesh, dim: int) -> ProcessGroup | None:
    """Give the process group of one mesh dim, None where it is this rank alone."""
    return mesh.get_group(dim) if mesh.size(dim) > 1 else None


def _refuse_sharded(module: nn.Module, style: str) -> None:
    """Refuse a module that FSDP already holds."""
    held = [name or "itself" for name, part in module.named_modules() if isinstance(part, FSDPModule)]
    taken = [name for name, parameter in module.named_parameters() if hasattr(parameter, "placements")]
    if held or taken:
        what = f"module {held[0]}" if held else f"parameter {taken[0]}"
        raise StyleOrderError(
            f"{style} must be applied before fully_shard: FSDP already holds {what}, and would keep sharding and"
            " gathering the whole parameter that the style cuts; apply the style first, or leave these parameters out"
            " of the parent's fully_shard (ignored_params)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Cuts heads, widths and the vocabulary over a one-dim mesh; experts are left to the expert styles."""

    sequence_parallel: bool = True

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut every part of a module that can be, in place, and return it."""
        _refuse_sharded(module, "TensorParallel")
        process = _group(device_mesh, 0)
        if process is None:
            return module
        tensor = TensorGroup(
            process=process,
            rank=device_mesh.get_local_rank(0),
            size=device_mesh.size(0),
            sequence_parallel=self.sequence_parallel,
        )
        for part in module.modules():
            if isinstance(part, Splittable):
                part.split(tensor)
        return module


def _dispatcher(kind: DispatcherKind, setup: DispatcherSetup) -> Dispatcher:
    """Make the dispatcher of a plan; `deepep` is the deduplicating one."""
    makers: dict[DispatcherKind, Callable[..., Dispatcher]] = {
        DispatcherKind.ALLGATHER: AllgatherDispatcher,
        DispatcherKind.ALLTOALL: AlltoallDispatcher,
        DispatcherKind.DEEPEP: DedupDispatcher,
    }
    return makers[kind](setup=setup)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """Splits the experts over a one-dim mesh and dispatches tokens over it.

    The style is a frozen value: what one dispatch leaves for its combine travels in a `DispatchContext` through the
    module's forward, so any number of micro-batches may be under way.
    """

    dispatcher: DispatcherKind = DispatcherKind.ALLTOALL

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Keep this rank's experts, in place, and return the module."""
        group = _group(device_mesh, 0)
        _cut_experts(module, device_mesh, None, "ExpertParallel")
        return _connect(module, self.dispatcher, ExpertGroups(ep=group, both=group))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensorParallel:
    """Splits the experts over the first dim of a mesh (ep) and each expert's inner width over the second (etp).

    `both` is the group of all ranks of the mesh, etp varying fastest, where the mesh cannot flatten itself.
    """

    dispatcher: DispatcherKind = DispatcherKind.ALLTOALL
    both: ProcessGroup | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Keep this rank's part of its experts, in place, and return the module."""
        _cut_experts(module, device_mesh, 1, "ExpertTensorParallel")
        both = self.both or (device_mesh._flatten().get_group() if device_mesh.size() > 1 else None)
        groups = ExpertGroups(ep=_group(device_mesh, 0), etp=_group(device_mesh, 1), both=both)
        return _connect(module, self.dispatcher, groups)


def _cut_experts(module: nn.Module, mesh: DeviceMesh, etp_dim: int | None, style: str) -> None:
    """Cut the stacked parameters by experts, and by inner width where the mesh has a dim for it."""
    _refuse_sharded(module, style)
    assert isinstance(module, GroupedExperts), f"{style} applies to GroupedExperts, not {type(module).__name__}"
    for name in module.cuts:
        module.narrow(name, dim=0, index=mesh.get_local_rank(0), count=mesh.size(0))
        if etp_dim is not None:
            width = 2 if name == "w2" else 1
            module.narrow(name, dim=width, index=mesh.get_local_rank(etp_dim), count=mesh.size(etp_dim))


def _connect(module: nn.Module, kind: DispatcherKind, groups: ExpertGroups) -> nn.Module:
    """Give the experts their dispatcher."""
    assert isinstance(module, GroupedExperts)
    module.setup = replace(module.setup, groups=groups)
    module.dispatcher = _dispatcher(kind, module.setup)
    return module
