"""Dispatch and combine: micro-batches kept apart, dispatchers that agree bit for bit, drops, experts without rows."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ap_search.plan.plan import Dispatcher
from ap_search.runtime.capacity import Capacity
from ap_search.runtime.cuts import initialise
from ap_search.runtime.dispatch import DispatcherSetup
from ap_search.runtime.experts import GroupedExperts
from ap_search.runtime.styles import ExpertParallel, ExpertTensorParallel
from ap_search.spec.blocks import MoeFfn
from tests.runtime.small import RANKS

MOE = MoeFfn(num_experts=8, top_k=3, expert_width=16)
HIDDEN, TOKENS = 24, 20
KINDS = (Dispatcher.ALLTOALL, Dispatcher.ALLGATHER, Dispatcher.DEEPEP)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NOBODY, FULL = 5, 0


def _experts(dtype: torch.dtype, capacity: Capacity) -> GroupedExperts:
    """Whole experts, the same on every rank."""
    setup = DispatcherSetup(
        num_experts=MOE.num_experts, capacity=capacity, sum_dtype=torch.promote_types(dtype, torch.float32)
    )
    experts = GroupedExperts(MOE, HIDDEN, dtype=dtype, setup=setup)
    initialise(experts, 0)
    return experts


def _parallel(kind: Dispatcher, dtype: torch.dtype, capacity: Capacity, mesh: DeviceMesh) -> GroupedExperts:
    """This rank's part of them."""
    experts = _experts(dtype, capacity)
    style = ExpertParallel(dispatcher=kind) if mesh.ndim == 1 else ExpertTensorParallel(dispatcher=kind)
    style.apply(experts, mesh)
    return experts


def _tokens(rank: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of one rank, their experts and weights: expert 0 is everybody's choice, expert 5 nobody's."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS, MOE.num_experts, generator=generator, dtype=torch.float64)
    scores[:, NOBODY], scores[:, FULL] = -1.0, 2.0
    top = scores.topk(MOE.top_k, dim=-1)
    # Rank 3 sends all its copies to three experts only: the group's splits are as uneven as they can be.
    chosen = torch.tensor([0, 1, 2]).expand(TOKENS, -1) if rank == 3 else top.indices
    weights = top.values.to(torch.promote_types(dtype, torch.float32))
    return x.to(dtype), chosen.contiguous(), weights


def _run(experts: GroupedExperts, rank: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Forward and backward: the output and every gradient."""
    x, chosen, weights = _tokens(rank, dtype, seed)
    x.requires_grad_()
    weights.requires_grad_()
    out = experts(x, chosen, weights)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert all(one is not None for one in found.values())
    experts.zero_grad()
    return found


def _capacities() -> Iterator[tuple[str, Capacity]]:
    yield "dropless", Capacity()
    yield "dropping", Capacity(factor=0.5)


def rank_equivalence() -> dict[str, Any]:
    """Which values differ in any bit between the dispatchers, over ep = 4."""
    mesh, rank = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",)), dist.get_rank()
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        for name, capacity in _capacities():
            first, *others = [_run(_parallel(kind, dtype, capacity, mesh), rank, dtype) for kind in KINDS]
            differ = [key for other in others for key in first if not torch.equal(first[key], other[key])]
            results[f"{dtype} {name}"] = {"differ": differ, "zero": bool((first["out"] == 0).all())}
    return results


def _alone(capacity: Capacity) -> dict[str, Tensor]:
    """One process with the tokens of all ranks: outputs per rank, gradients of the whole experts summed over ranks."""
    experts = _experts(torch.float64, capacity)
    runs = [_run(experts, rank, torch.float64) for rank in range(RANKS)]
    found = {f"{key}{rank}": run[key] for rank, run in enumerate(runs) for key in ("out", "x", "weights")}
    return found | {name: sum((run[name] for run in runs), torch.tensor(0.0)) for name in experts.cuts}


def rank_against_one_process() -> dict[str, float]:
    """Largest difference from one process, over ep = 4 and over ep = 2 with etp = 2."""
    flat = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    folded = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    rank, results = dist.get_rank(), {}
    for name, capacity in _capacities():
        wanted = _alone(capacity)
        for kind in KINDS:
            for mesh in (flat, folded):
                experts = _parallel(kind, torch.float64, capacity, mesh)
                run = _run(experts, rank, torch.float64)
                gaps = [(run[key] - wanted[f"{key}{rank}"]).abs().max() for key in ("out", "x", "weights")]
                gaps += [(run[key] - wanted[key][cut.slices]).abs().max() for key, cut in experts.cuts.items()]
                results[f"{name} {kind.name} {mesh.ndim}"] = float(torch.stack(gaps).max())
    return results


def rank_unused_expert() -> dict[str, Any]:
    """Gradients of the expert that nobody chose, on the rank that holds it."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    experts = _parallel(Dispatcher.ALLTOALL, torch.float64, Capacity(), mesh)
    run = _run(experts, dist.get_rank(), torch.float64)
    local = NOBODY - dist.get_rank() * 2
    if local not in (0, 1):
        return {}
    other = 1 - local
    return {name: [float(run[name][e].abs().max()) for e in (local, other)] for name in experts.cuts}


def rank_interleaved() -> dict[str, bool]:
    """SS-01: the second dispatch before the first combine; outputs and gradients as when run alone."""
    mesh, rank = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",)), dist.get_rank()
    results = {}
    for kind in KINDS:
        experts = _parallel(kind, torch.float64, Capacity(), mesh)
        alone = [_run(experts, rank, torch.float64, seed) for seed in (0, 1)]
        batches = [_tokens(rank, torch.float64, seed) for seed in (0, 1)]
        for x, _, _ in batches:
            x.requires_grad_()
        flights = [experts.dispatcher.dispatch(*batch) for batch in batches]
        outputs = [experts.compute(inputs) for inputs, _ in flights]
        pairs = zip(outputs, flights, strict=True)
        together = [experts.dispatcher.combine(out, context) for out, (_, context) in pairs]
        for out in together:
            out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out))
        same = [torch.equal(out, run["out"]) for out, run in zip(together, alone, strict=True)]
        same += [torch.equal(batch[0].grad, run["x"]) for batch, run in zip(batches, alone, strict=True)]
        results[kind.name] = all(same)
    return results


def rank_collectable() -> dict[str, bool]:
    """SS-02: after combine and before backward, nothing holds the context."""
    mesh, rank = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",)), dist.get_rank()
    results = {}
    for kind in KINDS:
        experts = _parallel(kind, torch.float64, Capacity(), mesh)
        x, chosen, weights = _tokens(rank, torch.float64)
        inputs, context = experts.dispatcher.dispatch(x.requires_grad_(), chosen, weights)
        out = experts.dispatcher.combine(experts.compute(inputs), context)
        watched = weakref.ref(context)
        gc.disable()
        del context
        results[kind.name] = watched() is None
        gc.enable()
        out.sum().backward()
    return results


def rank_sent() -> dict[str, Any]:
    """What each dispatch says it sent, under capacity and with padding."""
    mesh, rank = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",)), dist.get_rank()
    x, chosen, weights = _tokens(rank, torch.float64)
    results: dict[str, Any] = {"distinct": []}
    for name, capacity in (("dropping", Capacity(factor=0.5)), ("padded", Capacity(factor=0.5, padded=True))):
        experts = _parallel(Dispatcher.ALLTOALL, torch.float64, capacity, mesh)
        out = experts(x, chosen, weights)
        results[name] = {"copies": experts.routing[-1].copies, "out": out.flatten().tolist()}
    dedup = _parallel(Dispatcher.DEEPEP, torch.float64, Capacity(), mesh)
    dedup(x, chosen, weights)
    reached = [(chosen // 2 == other).any(dim=1).sum().item() for other in range(RANKS)]
    results["distinct"] = [list(dedup.routing[-1].tokens_per_rank), reached]
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dropless", "dropping"])
def test_dispatchers_agree_bit_for_bit(found: dict[str, list[Any]], dtype: torch.dtype, name: str) -> None:
    """alltoall = allgather = dedup: outputs, gradients of tokens, of router weights and of experts."""
    for rank in found["equivalence"]:
        assert rank[f"{dtype} {name}"] == {"differ": [], "zero": False}


def test_every_dispatcher_equals_one_process(found: dict[str, list[Any]]) -> None:
    """Over ep and over ep x etp, with and without drops, uneven counts."""
    for rank in found["against_one_process"]:
        assert len(rank) == 12
        assert max(rank.values()) < 1e-12


def test_an_expert_without_tokens_has_zero_gradients(found: dict[str, list[Any]]) -> None:
    """Zero and not absent, while its neighbour on the same rank learns."""
    (held,) = [rank for rank in found["unused_expert"] if rank]
    assert sorted(held) == ["w1", "w2", "w3"]
    for unused, neighbour in held.values():
        assert unused == 0.0 < neighbour


def test_ss_01_interleaved_micro_batches(found: dict[str, list[Any]]) -> None:
    """Both micro-batches as when run alone, with every dispatcher."""
    for rank in found["interleaved"]:
        assert rank == {kind.name: True for kind in KINDS}


def test_ss_02_contexts_are_collectable(found: dict[str, list[Any]]) -> None:
    """The last reference is the caller's: no style, dispatcher, module or graph holds one."""
    for rank in found["collectable"]:
        assert rank == {kind.name: True for kind in KINDS}


def test_styles_and_dispatchers_cannot_hold_state() -> None:
    """They are frozen values, and so is the context."""
    experts = _experts(torch.float64, Capacity())
    _, context = experts.dispatcher.dispatch(*_tokens(0, torch.float64))
    for value in (ExpertParallel(), ExpertTensorParallel(), experts.dispatcher, context):
        with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
            value.input_splits = (1,)  # type: ignore[union-attr]


def test_capacity_drops_and_pads(found: dict[str, list[Any]]) -> None:
    """ceil(20*3/8*0.5) = 4 slots: no expert gets more, padding makes it exactly 4 and changes no output."""
    for rank in found["sent"]:
        dropping, padded = rank["dropping"], rank["padded"]
        assert max(dropping["copies"]) == 4
        assert dropping["copies"][NOBODY] == 0
        assert padded["copies"] == [4] * 8
        # Products of other heights round otherwise, so not to the bit.
        assert padded["out"] == pytest.approx(dropping["out"], abs=1e-12)


def test_the_heaviest_copies_are_kept() -> None:
    """Of the copies for an expert, those with the largest weights stay: what is dropped weighs no more."""
    experts = _experts(torch.float64, Capacity(factor=0.5))
    _, chosen, weights = _tokens(0, torch.float64)
    inputs, _ = experts.dispatcher.dispatch(torch.zeros(TOKENS, HIDDEN, dtype=torch.float64), chosen, weights)
    for expert, kept in enumerate(inputs.weights.split(list(inputs.counts))):
        every = weights[chosen == expert].sort(descending=True).values
        assert torch.equal(kept.sort(descending=True).values, every[: len(kept)])


def test_dedup_sends_a_token_once_per_rank(found: dict[str, list[Any]]) -> None:
    """The numbers that the cost model calls distinct destinations."""
    for rank in found["sent"]:
        sent, reached = rank["distinct"]
        assert sent == reached
