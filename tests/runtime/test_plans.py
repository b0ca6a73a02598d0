"""Whole plans on four processes against one process: outputs, every gradient, updated weights."""

from dataclasses import replace
from typing import Any

import pytest

from ap_search.cost.in_flight import in_flight_chunk_vectors
from ap_search.runtime.batch import make_batch
from ap_search.runtime.execute import build_execution
from ap_search.runtime.settings import RunSettings
from tests.runtime import ranks
from tests.runtime.small import SETTINGS, model, plan

SIGMOID = {"score_function": "sigmoid", "score_bias": True, "num_groups": 4, "topk_groups": 2, "top_k": 3}
SHARED = {"shared_width": 32, "shared_gate": True, "router_bias": True, "latent_width": 16}
CAPACITY = replace(SETTINGS, capacity_factor=0.75)
PADDED = replace(SETTINGS, capacity_factor=1.25, pad_to_capacity=True)

CASES: dict[str, tuple[str, dict[str, Any], RunSettings]] = {
    "dp": ("sharding=none", {}, SETTINGS),
    "ep4": ("ep=4,sharding=zero1", {}, SETTINGS),
    "ep2_zero2": ("ep=2,sharding=zero2", {}, SETTINGS),
    "ep2_zero3": ("ep=2,sharding=zero3", {}, SETTINGS),
    "ep2_hsdp": ("ep=2,sharding=hsdp", {}, SETTINGS),
    "hsdp": ("sharding=hsdp", {}, SETTINGS),
    "dense_hsdp_tp": ("tp=2,sharding=hsdp", {"moe": None}, SETTINGS),
    "dense_tp_without_sp": ("tp=2,sp=0,sharding=zero1", {"moe": None, "norm": "layernorm"}, SETTINGS),
    "tp2_ep2": ("tp=2,ep=2,sharding=zero1", {"attention": {"qk_norm": "head"}}, SETTINGS),
    "tp2_ep4_zero3": ("tp=2,ep=4,sharding=zero3", {"moe": SHARED}, SETTINGS),
    "tp2_ep2_etp2_zero2": ("tp=2,ep=2,etp=2,sharding=zero2", {"moe": {**SHARED, **SIGMOID}}, SETTINGS),
    "tp2_etp2_zero3": ("tp=2,ep=1,etp=2,sharding=zero3", {"moe": {"gated": False}}, SETTINGS),
    "allgather_etp": ("ep=2,etp=2,dispatcher=allgather", {"moe": SIGMOID}, SETTINGS),
    "dedup_etp_tp": ("tp=2,ep=2,etp=2,dispatcher=deepep", {"moe": SIGMOID}, SETTINGS),
    "pp2_ep2_gpipe": ("pp=2,ep=2,schedule=gpipe", {}, SETTINGS),
    "pp2_ep2_1f1b": ("pp=2,ep=2", {}, SETTINGS),
    "pp2_hsdp": ("pp=2,sharding=hsdp", {}, SETTINGS),
    "pp2_ep2_interleaved": ("pp=2,vpp=2,ep=2,sharding=zero2", {"num_layers": 4}, SETTINGS),
    "pp2_ep2_interleaved_zero3": ("pp=2,vpp=2,ep=2,sharding=zero3", {"num_layers": 4}, SETTINGS),
    "pp2_tp2_uneven": ("pp=2,tp=2,ep=2,stage_layers=2+1", {"moe": SHARED, "num_layers": 3}, SETTINGS),
    "pp2_tp2_zero3": ("pp=2,tp=2,sharding=zero3", {"moe": None}, SETTINGS),
    "recompute": ("ep=2,recompute=full,sharding=zero3", {}, SETTINGS),
    "tied": ("tp=2,ep=2,sharding=zero3", {"tied_embeddings": True}, SETTINGS),
    "capacity": ("tp=2,ep=4", {}, CAPACITY),
    "capacity_dedup": ("ep=4,dispatcher=deepep", {"moe": SIGMOID}, CAPACITY),
    "capacity_allgather": ("ep=2,dispatcher=allgather", {}, CAPACITY),
    "padded": ("tp=2,ep=2,etp=2", {}, PADDED),
}
# What is kept from step to step differs with the sharding, not with the other axes.
TWO_STEPS = ("dp", "ep4", "ep2_zero2", "ep2_zero3", "ep2_hsdp", "pp2_ep2_interleaved_zero3")


def rank_cases() -> dict[str, Any]:
    """Every case: the largest distance, and what is farthest."""
    results = {}
    for name, (text, changes, settings) in CASES.items():
        small = model(**changes)
        steps = 2 if name in TWO_STEPS else 1
        # Two micro-batches per replica show what four would, but for a pipeline.
        batch = 4 if "tp=2" in text and "pp=2" not in text else 8
        seen, execution = ranks.compare(small, plan(text, small, batch=batch), settings, steps=steps)
        results[name] = {
            "worst": seen.worst,
            "losses": seen.losses,
            "gradients": len(seen.gradients),
            "in_flight": execution.in_flight_peak,
        }
    return results


def rank_float32() -> dict[str, Any]:
    """Two plans in single precision."""
    settings = replace(SETTINGS, dtype="float32")
    texts = ("tp=2,ep=2,sharding=zero1", "pp=2,ep=2,sharding=zero3")
    return {text: ranks.compare(model(), plan(text, model()), settings)[0].worst for text in texts}


def rank_bfloat16() -> dict[str, Any]:
    """Mixed precision trains: what is kept, in which type, and the loss of a batch that is seen again and again."""
    results = {}
    for text in ("ep=2,sharding=zero1", "tp=2,ep=2,sharding=zero3"):
        small, settings = model(), replace(SETTINGS, dtype="bfloat16", learning_rate=0.01)
        chosen = plan(text, small)
        execution = build_execution(small, chosen, settings)
        batch = make_batch(small.vocab_size, chosen, settings, step=0)
        losses = []
        for _ in range(3):
            losses.append(execution.forward_backward(batch).loss)
            execution.finish_gradients()
            types = sorted({f"{one.role} {one.tensor.dtype}" for one in execution.state()})
            execution.optimizer_step()
        results[text] = {"losses": losses, "types": types}
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_plan_equals_one_process(found: dict[str, list[Any]], name: str) -> None:
    """Logits, gradients of every parameter and weights after one or two steps, in float64, on every rank."""
    for rank in found["cases"]:
        assert rank[name]["worst"] < 1e-10
        assert all(abs(loss) < 1e-12 for loss in rank[name]["losses"])
    held = [rank[name]["gradients"] for rank in found["cases"]]
    assert min(held) > 0


def test_single_precision_stays_close(found: dict[str, list[Any]]) -> None:
    """The tolerance of requirement 000."""
    assert max(value for rank in found["float32"] for value in rank.values()) < 1e-3


def test_mixed_precision_keeps_what_the_settings_say(found: dict[str, list[Any]]) -> None:
    """bf16 weights with fp32 gradients and master, or FSDP's fp32 shards; the loss falls."""
    for rank in found["bfloat16"]:
        whole, sharded = rank.values()
        assert whole["types"] == ["gradients torch.float32", "optimizer torch.float32", "weights torch.bfloat16"]
        assert sharded["types"] == ["gradients torch.float32", "optimizer torch.float32", "weights torch.float32"]
        for one in (whole, sharded):
            assert one["losses"] == sorted(one["losses"], reverse=True)


@pytest.mark.parametrize("name", ["pp2_ep2_gpipe", "pp2_ep2_1f1b", "pp2_ep2_interleaved"])
def test_micro_batches_in_flight_are_those_priced(found: dict[str, list[Any]], name: str) -> None:
    """Four micro-batches: the worst moments of each stage, chunk by chunk, as the memory model has them."""
    text, changes, _ = CASES[name]
    chosen = plan(text, model(**changes))
    for rank, result in enumerate(found["cases"]):
        vectors = in_flight_chunk_vectors(
            schedule=chosen.schedule,
            pp=chosen.pp,
            vpp=chosen.vpp,
            stage=rank // (4 // chosen.pp),
            num_microbatches=chosen.num_microbatches,
        )
        assert sorted(result[name]["in_flight"]) == sorted(vectors.tolist())
