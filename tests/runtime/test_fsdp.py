"""FSDP around expert parallelism: four ranks, FSDP 2 x EP 2, after requirement 000."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ap_search.plan.plan import Sharding
from ap_search.runtime.batch import make_batch
from ap_search.runtime.capacity import Capacity
from ap_search.runtime.cuts import Kind, initialise
from ap_search.runtime.dispatch import DispatcherSetup
from ap_search.runtime.execute import Execution, build_execution
from ap_search.runtime.hook_order import record_hook_order
from ap_search.runtime.moe import MoE
from ap_search.runtime.sharded import shard_module
from ap_search.runtime.styles import ExpertParallel, StyleOrderError, TensorParallel
from ap_search.spec.blocks import MoeFfn
from tests.runtime import ranks
from tests.runtime.small import SETTINGS, model, plan

FSDP_EP = "ep=2,sharding=zero3"
FLOAT32 = replace(SETTINGS, dtype="float32")
ORDER = ["unshard", "dispatch", "combine", "reshard"]


def rank_forward_and_backward() -> dict[str, float]:
    """FE-01 in single precision, as the requirement has it."""
    seen, _ = ranks.compare(model(), plan(FSDP_EP, model()), FLOAT32, steps=1)
    return {"outputs": max(seen.logits.values()), "gradients": max(seen.gradients.values())}


def _gradients(text: str) -> tuple[dict[str, Tensor], Execution]:
    """Finished gradients of one step."""
    small = model()
    chosen = plan(text, small)
    execution = build_execution(small, chosen, SETTINGS)
    execution.forward_backward(make_batch(small.vocab_size, chosen, SETTINGS, step=0))
    execution.finish_gradients()
    return execution.gradients(), execution


def rank_expert_gradients() -> dict[str, Any]:
    """FE-02: distance of each expert gradient from expert parallelism without FSDP."""
    baseline, execution = _gradients("ep=2,sharding=none")
    sharded, _ = _gradients(FSDP_EP)
    experts = [name for name, cut in execution.cuts.items() if cut.kind is Kind.EXPERT]
    return {
        name: {
            "absolute": float((sharded[name] - baseline[name]).abs().max()),
            "largest": float(baseline[name].abs().max()),
            "finite": bool(torch.isfinite(sharded[name]).all()),
        }
        for name in experts
    }


def rank_default_division() -> dict[str, list[float]]:
    """What FSDP's own averaging does: gradients over the true ones, of every expert and of every other parameter."""
    small = model()
    chosen = plan(FSDP_EP, small)
    true, _ = _gradients("ep=2,sharding=none")
    execution = build_execution(small, chosen, SETTINGS)
    for chunk in execution.chunks:
        for part in chunk.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(chosen.edp if hasattr(part, "setup") else chosen.dp))
    execution.forward_backward(make_batch(small.vocab_size, chosen, SETTINGS, step=0))
    execution.finish_gradients()
    ratios: dict[str, list[float]] = {"expert": [], "other": []}
    for name, actual in execution.gradients().items():
        kind = "expert" if execution.cuts[name].kind is Kind.EXPERT else "other"
        ratios[kind].append(float((actual * true[name]).sum() / true[name].square().sum()))
    return ratios


def rank_training() -> list[float]:
    """FE-03: loss of the global batch before each of three steps on it, and after."""
    small, settings = model(), replace(FLOAT32, learning_rate=0.01)
    chosen = plan(FSDP_EP, small)
    execution = build_execution(small, chosen, settings)
    batch = make_batch(small.vocab_size, chosen, settings, step=0)
    losses = []
    for _ in range(4):
        share = torch.tensor(execution.forward_backward(batch).loss)
        dist.all_reduce(share)
        losses.append(float(share))
        execution.finish_gradients()
        execution.optimizer_step()
    return losses


def rank_hook_order() -> list[str]:
    """HO-01 in a whole model: events of one forward and of its backward, which repeats the forward (recompute)."""
    small = model()
    chosen = plan("ep=2,sharding=zero3,recompute=full", small, batch=4)
    execution = build_execution(small, chosen, SETTINGS)
    with record_hook_order(execution.experts()) as events:
        execution.forward_backward(make_batch(small.vocab_size, chosen, SETTINGS, step=0))
    return events


MOE = MoeFfn(num_experts=4, top_k=2, expert_width=16, shared_width=16)


def _moe() -> tuple[MoE, Tensor]:
    """A whole MoE layer and this rank's tokens."""
    setup = DispatcherSetup(num_experts=4, capacity=Capacity(), sum_dtype=torch.float64)
    moe = MoE(MOE, 32, dtype=torch.float64, router_dtype=torch.float64, setup=setup)
    initialise(moe, 0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return moe, torch.randn(6, 2, 32, generator=generator, dtype=torch.float64)


def _wrap(moe: MoE, *, parent_first: bool) -> None:
    """Apply EP to the experts and FSDP to parent and child, the parent before or after."""
    edp, ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), "ep"
    dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    if parent_first:
        fully_shard(moe, mesh=dp, ignored_params=set(moe.experts.parameters()))
        moe.set_gradient_divide_factor(1.0)
        moe.set_force_sum_reduction_for_comms(True)
    ExpertParallel().apply(moe.experts, edp[ep])
    shard_module(moe.experts, edp["edp"], dtype=torch.float64)
    if not parent_first:
        shard_module(moe, dp, dtype=torch.float64)


def _alone() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs per rank and summed gradients of one process."""
    moe, _ = _moe()
    outputs = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        out = moe(torch.randn(6, 2, 32, generator=generator, dtype=torch.float64))
        out.square().sum().backward()
        outputs.append(out.detach())
    return outputs, {name: one.grad for name, one in moe.named_parameters() if one.grad is not None}


def rank_orders_of_application() -> dict[str, Any]:
    """HO-01: parent and child in both orders: what happens in which order, and how far from one process."""
    outputs, gradients = _alone()
    results = {}
    for parent_first in (False, True):
        moe, x = _moe()
        _wrap(moe, parent_first=parent_first)
        with record_hook_order({"moe": moe.experts}) as events:
            out = moe(x)
        gap = float((out - outputs[dist.get_rank()]).abs().max())
        out.square().sum().backward()
        for name, parameter in moe.named_parameters():
            whole = parameter.grad.full_tensor()
            cut = moe.experts.cuts[name.removeprefix("experts.")].slices if name.startswith("experts.") else ...
            gap = max(gap, float((whole - gradients[name][cut]).abs().max()))
        results["parent first" if parent_first else "child first"] = {"events": events, "gap": gap}
    return results


def _refusal(module: nn.Module, apply: Any) -> str:
    """What a style says of a module that it must not touch."""
    try:
        apply(module)
    except StyleOrderError as error:
        return str(error)
    return ""


def rank_unsafe_orders() -> dict[str, str]:
    """Styles after FSDP on the same module, or on parameters that the parent's FSDP took."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    same, _ = _moe()
    fully_shard(same.experts, mesh=mesh["edp"])
    taken, _ = _moe()
    fully_shard(taken, mesh=mesh["edp"])
    dense, _ = _moe()
    fully_shard(dense, mesh=mesh["edp"])
    return {
        "same": _refusal(same.experts, lambda module: ExpertParallel().apply(module, mesh["ep"])),
        "taken": _refusal(taken.experts, lambda module: ExpertParallel().apply(module, mesh["ep"])),
        "dense": _refusal(dense, lambda module: TensorParallel().apply(module, mesh["ep"])),
    }


def rank_state() -> dict[str, dict[str, int]]:
    """Elements that a rank keeps, by sharding, kind and role, after a step and the gradients of the next."""
    results = {}
    for sharding in ("none", "zero1", "zero2", "zero3", "hsdp"):
        small = model()
        chosen = plan(f"ep=2,sharding={sharding}", small, batch=4)
        execution = build_execution(small, chosen, SETTINGS)
        for step in range(2):
            execution.forward_backward(make_batch(small.vocab_size, chosen, SETTINGS, step=step))
            execution.finish_gradients()
            if not step:
                execution.optimizer_step()
        counts: dict[str, int] = {}
        for one in execution.state():
            key = f"{one.kind} {one.role}"
            counts[key] = counts.get(key, 0) + one.tensor.numel()
        results[sharding] = counts
    return results


def test_fe_01_forward_and_backward(found: dict[str, list[Any]]) -> None:
    """FSDP 2 x EP 2 against one process on the same tokens, rtol 1e-3."""
    for rank in found["forward_and_backward"]:
        assert rank["outputs"] < 1e-3
        assert rank["gradients"] < 1e-3


def test_fe_02_expert_gradients(found: dict[str, list[Any]], record_property: Any) -> None:
    """Present, finite, not zero, and those of expert parallelism alone: reduced once, divided once."""
    for rank in found["expert_gradients"]:
        assert len(rank) == 3
        for name, seen in rank.items():
            record_property(name, seen["absolute"])
            assert seen["finite"]
            assert seen["largest"] > 0
            assert seen["absolute"] < 1e-12 * max(1.0, seen["largest"])


def test_the_trap_of_section_2_3_is_real(found: dict[str, list[Any]]) -> None:
    """Averaged over each module's own mesh, experts (edp 2) come out twice as large as the others (dp 4)."""
    for rank in found["default_division"]:
        assert rank["expert"] == pytest.approx([1 / 2] * len(rank["expert"]))
        assert rank["other"] == pytest.approx([1 / 4] * len(rank["other"]))


def test_fe_03_three_steps(found: dict[str, list[Any]]) -> None:
    """The loss of a batch that is seen again falls in each step."""
    losses = found["training"][0]
    assert all(after < before for before, after in pairwise(losses))


def test_ho_01_whole_model(found: dict[str, list[Any]]) -> None:
    """Forward: gathered before dispatch, freed after combine; the repeat in backward gathers before its dispatch."""
    for events in found["hook_order"]:
        assert events[:4] == [f"layers.1 {event}" for event in ORDER]
        # The repeat runs to its end, combine included; gradients are still to come, so nothing is freed after it.
        assert events[4:] == [f"layers.1 {event}" for event in ORDER[:3]]


@pytest.mark.parametrize("order", ["child first", "parent first"])
def test_ho_01_both_orders_on_parent_and_child(found: dict[str, list[Any]], order: str) -> None:
    """The same events and the same numbers: dispatch and combine lie inside the module's own hooks."""
    for rank in found["orders_of_application"]:
        assert rank[order]["events"] == [f"moe {event}" for event in ORDER]
        assert rank[order]["gap"] < 1e-12


def test_ho_01_unsafe_orders_are_refused(found: dict[str, list[Any]]) -> None:
    """Cutting parameters that FSDP already holds: named, with what to do."""
    for rank in found["unsafe_orders"]:
        assert "ExpertParallel must be applied before fully_shard: FSDP already holds module itself" in rank["same"]
        assert "FSDP already holds parameter w1" in rank["taken"]
        assert "ignored_params" in rank["taken"]
        assert "TensorParallel must be applied before fully_shard" in rank["dense"]


def test_state_is_split_as_the_memory_model_says(found: dict[str, list[Any]]) -> None:
    """Weights, gradients and moments over dp 4 (dense) and edp 2 (experts); HSDP's two replicas split over 2 and 1."""
    whole = found["state"][0]["none"]
    dense, expert = whole["dense weights"], whole["expert weights"]
    splits = {
        Sharding.NONE: ((1, 1, 1), (1, 1, 1)),
        Sharding.ZERO1: ((1, 1, 4), (1, 1, 2)),
        Sharding.ZERO2: ((1, 4, 4), (1, 2, 2)),
        Sharding.ZERO3: ((4, 4, 4), (2, 2, 2)),
        Sharding.HSDP: ((2, 2, 2), (1, 1, 1)),
    }
    for rank in found["state"]:
        for sharding, split in splits.items():
            seen = rank[("none", "zero1", "zero2", "zero3", "hsdp")[sharding]]
            for kind, size, (weights, gradients, optimizer) in zip(
                ("dense", "expert"), (dense, expert), split, strict=True
            ):
                assert seen[f"{kind} weights"] * weights == size
                assert seen[f"{kind} gradients"] * gradients == size
                assert seen[f"{kind} optimizer"] * optimizer == 2 * size
