"""Weights sharded over data-parallel ranks: ZeRO-3 and HSDP, by FSDP2.

Order: styles cut the experts first, then FSDP takes the experts over edp, then each block over dp, then the chunk. FSDP
would average over the mesh of each module, dp ranks here and edp ranks there, which makes expert gradients too large by
dp/edp; so every module sums, and the loss alone is divided, by the tokens of the global batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ap_search.runtime.collectives import all_reduce, labelled, wide_dtype
from ap_search.runtime.cuts import Cut, named_cuts
from ap_search.runtime.experts import GroupedExperts
from ap_search.runtime.settings import RunSettings
from ap_search.runtime.state import CHECK, TP_REPLICATED, StateTensor, make_adam
from ap_search.runtime.styles import StyleOrderError
from ap_search.runtime.transformer import Block, Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeshes:
    """Meshes that dense parameters and experts are sharded over; two dims (replicas, shards) under HSDP."""

    dense: DeviceMesh
    expert: DeviceMesh


def shard_module(module: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype) -> None:
    """Apply FSDP to one module so that its gradients are sums over the mesh, in at least float32.

    Parameters
    ----------
    module : Module
        Its parameters that no inner module has taken are sharded.
    mesh : DeviceMesh
        One dim, or (replicas, shards).
    dtype : torch.dtype
        Type in which weights are gathered and used; shards are kept in at least float32.
    """
    ranks = mesh.size(-1)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide_dtype(dtype), cast_forward_inputs=False)
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=True,
        mp_policy=policy,
        shard_placement_fn=lambda parameter: _even_dim(parameter, ranks),
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # gloo cannot multiply before it sums; and there is nothing to multiply.
    module.set_force_sum_reduction_for_comms(True)


def _even_dim(parameter: nn.Parameter, ranks: int) -> Shard:
    """Shard the first dim that divides, so that no shard is padded."""
    return Shard(next((dim for dim, size in enumerate(parameter.shape) if size % ranks == 0), 0))


def shard_chunk(chunk: Chunk, meshes: ShardMeshes, *, dtype: torch.dtype) -> None:
    """Apply FSDP bottom up: experts over edp, then their block and the chunk over dp.

    Parameters
    ----------
    chunk : Chunk
        Already cut by the parallel styles.
    meshes : ShardMeshes
        Of dense parameters, and of experts.
    dtype : torch.dtype
        Of weights in use.

    Raises
    ------
    StyleOrderError
        FSDP already holds a part of the chunk.
    """
    held = [name for name, part in chunk.named_modules() if isinstance(part, FSDPModule)]
    if held:
        raise StyleOrderError(f"fully_shard already holds {held[0] or 'the chunk'}: apply it once, after the styles")
    chunk.to(wide_dtype(dtype))
    for block in chunk.layers.values():
        assert isinstance(block, Block)
        for part in block.modules():
            if isinstance(part, GroupedExperts):
                shard_module(part, meshes.expert, dtype=dtype)
        shard_module(block, meshes.dense, dtype=dtype)
    shard_module(chunk, meshes.dense, dtype=dtype)


class ShardedState:
    """FSDP's sharded parameters of all chunks, with an Adam over this rank's shards."""

    def __init__(
        self, chunks: list[Chunk], *, meshes: ShardMeshes, tp: ProcessGroup | None, settings: RunSettings
    ) -> None:
        self.cuts: dict[str, Cut] = {}
        for chunk in chunks:
            self.cuts.update(named_cuts(chunk))
            shard_chunk(chunk, meshes, dtype=getattr(torch, settings.dtype))
        self.chunks, self.tp = chunks, tp
        self.parameters: dict[str, DTensor] = {}
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                assert isinstance(parameter, DTensor)
                self.parameters[name] = parameter
        # Shares storage with FSDP's shards, so that a step of Adam is seen by the next gather.
        self.shards = {name: nn.Parameter(one.to_local().detach()) for name, one in self.parameters.items()}
        self.adam = make_adam(self.shards.values(), settings)

    def before_backward(self, chunk: int, *, last: bool) -> None:
        """Sum between HSDP's replicas once per step, after the last micro-batch."""
        root = self.chunks[chunk]
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)

    def after_backward(self, chunk: int) -> None:
        """FSDP has already reduced this micro-batch's gradients."""

    def finish_gradients(self) -> None:
        """Sum over tp what each of its ranks has only a part of."""
        parts = [self._local(name) for name, cut in self.cuts.items() if cut.tp_partial]
        if self.tp is None or not parts:
            return
        flat = torch.cat([part.flatten() for part in parts])
        all_reduce(flat, self.tp, TP_REPLICATED)
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))

    def _gradient(self, name: str) -> DTensor:
        """Give a finished gradient; each parameter has one, zero where no token came by."""
        grad = self.parameters[name].grad
        assert isinstance(grad, DTensor), f"{name} has no gradient"
        return grad

    def _local(self, name: str) -> Tensor:
        """View this rank's shard of a finished gradient."""
        return self._gradient(name).to_local()

    def gradients(self) -> dict[str, Tensor]:
        """Gather the finished gradients."""
        with labelled(CHECK):
            return {name: self._gradient(name).full_tensor() for name in self.parameters}

    def weights(self) -> dict[str, Tensor]:
        """Gather the weights."""
        with labelled(CHECK):
            return {name: one.full_tensor().detach().clone() for name, one in self.parameters.items()}

    def update(self) -> None:
        """Step this rank's shards; FSDP gathers them in the next forward."""
        for name, shard in self.shards.items():
            shard.grad = self._local(name)
        self.adam.step()
        for name, shard in self.shards.items():
            shard.grad = self.parameters[name].grad = None

    def state(self) -> list[StateTensor]:
        """List shards, their gradients and moments; the shards are the optimizer's master weights too."""
        found = []
        for name, shard in self.shards.items():
            kind, grad = self.cuts[name].kind, self.parameters[name].grad
            found.append(StateTensor(kind=kind, role="weights", tensor=shard.detach()))
            if isinstance(grad, DTensor):
                found.append(StateTensor(kind=kind, role="gradients", tensor=grad.to_local()))
            moments = self.adam.state.get(shard, {}).values()
            found += [StateTensor(kind=kind, role="optimizer", tensor=one) for one in moments if one.dim()]
        return found
