"""Facts and advice from public reports that hold for every plan of their kind: the tool must say so too.

Sizes of models are in test_models.py, byte-exact cases in test_exact_reports.py, reported plans in
test_reported_cases.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ap_search import estimate, search
from ap_search.result import PricedPlan, StageMemory


def plan_of(model: str | Path, devices: int, plan: str, **job: Any) -> PricedPlan:
    return estimate(model=model, devices=devices, plan=plan, **job).plans[0]


def state_bytes(stage: StageMemory) -> int:
    return stage.shared.total_bytes + stage.expert.total_bytes + stage.router_bytes


def test_fully_sharded_state_does_not_depend_on_ep() -> None:
    """Under full sharding the state is all parameters over all devices, whether 8 ranks share experts or not; what
    falls is the weights gathered at a time. Source: ByteDance-Seed/VeOmni#69 (DeepSeek 16B on 8 devices, ep 1 or 8).
    """
    without, with_ep = (
        plan_of("deepseek-v2-lite", 8, f"ep={ep},sharding=zero3,recompute=full").memory.peak_stage for ep in (1, 8)
    )
    assert state_bytes(with_ep) == pytest.approx(state_bytes(without), rel=1e-3)
    assert with_ep.buffers_bytes < without.buffers_bytes / 2


def test_full_sharding_is_parameters_over_devices() -> None:
    """235 * (2 + 4 + 12) / 64 = 66.1e9 bytes of state per device, 132.2e9 on 32. Source: THUDM/slime#280."""
    for devices, gigabytes in ((64, 66.1), (32, 132.2)):
        stage = plan_of("qwen3-235b-a22b", devices, "sharding=zero3").memory.peak_stage
        assert state_bytes(stage) == pytest.approx(gigabytes * 1e9, rel=2e-3)


def test_235_billion_need_more_than_32_devices() -> None:
    """Four nodes of 8 worked only with the optimizer on the host; on 64 devices plans run without. THUDM/slime#280."""
    knobs = {"recompute": "full", "mbs": 1, "vpp": 1}
    why = search(model="qwen3-235b-a22b", devices=32, set=knobs).infeasibility
    assert why is not None
    assert why.smallest_devices is not None
    assert 32 < why.smallest_devices <= 64


def test_expert_parallelism_folds_into_the_dense_mesh() -> None:
    """32 devices, cp = 4, ep = 8: without folding dp is 1; folded, dp = 8 and edp = 4. Source: mlc-ai/pith-train#93."""
    plan = plan_of("mixtral-8x7b", 32, "cp=4,ep=8").plan
    assert (plan.dp, plan.edp) == (8, 4)


def test_first_and_last_stages_need_more_than_an_average(tmp_path: Path) -> None:
    """GPT over pipeline stages: 10.8 and 10.98 GB on the ends, 8.04 GB between. Embedding and head, 50,304 x 2048, are
    103e6 parameters beside 3 layers of 50e6: their state alone makes the ends a half heavier.

    Source: deepspeedai/DeepSpeed#1378.
    """
    gpt = tmp_path / "gpt.yaml"
    attention, ffn = "{num_heads: 16, num_kv_heads: 16, head_dim: 128}", "{width: 8192, gated: false}"
    gpt.write_text(
        f"hidden_size: 2048\nvocab_size: 50257\nnum_layers: 24\nnorm: layernorm\nattention: {attention}\nffn: {ffn}\n"
    )
    stages = plan_of(gpt, 8, "pp=8,sharding=none,recompute=full", global_batch=8, seq_len=2048).memory.stages
    first, middle, last = (state_bytes(stages[index]) for index in (0, 4, 7))
    assert first / middle == pytest.approx(1 + 103 / 151, rel=0.02)
    assert last / middle == pytest.approx(1 + 103 / 151, rel=0.02)
    totals = [stage.total_bytes - stage.reserve_bytes for stage in stages]
    assert min(totals[0], totals[7]) > 1.25 * max(totals[2:7])


def test_an_empty_answer_names_the_smallest_number_of_devices() -> None:
    """Whoever asks for too few devices is told how many it takes, and that is true.

    Source: inference-sim/inference-sim#624.
    """
    knobs = {"recompute": "full", "mbs": 1, "vpp": 1, "sharding": "zero1", "dispatcher": "alltoall"}
    why = search(model="mixtral-8x22b", devices=8, set=knobs).infeasibility
    assert why is not None
    assert why.smallest_devices is not None
    assert search(model="mixtral-8x22b", devices=why.smallest_devices, set=knobs, top=1).feasible
    assert not search(model="mixtral-8x22b", devices=why.smallest_devices - 8, set=knobs, top=1).feasible


def test_three_classes_of_parameters() -> None:
    """Mixtral 8x7B on 8 devices, bf16 weights; an old estimator divided experts by tp in place of etp*ep.

    Experts: 32 * 8 * 3*4096*14336 = 45,097,156,608 parameters over etp*ep, whatever tp is.
    Over tp: attention 32 * 41,943,040 and both embeddings 2 * 32000*4096, together 1,604,321,280.
    Replicated: norms 65 * 4096 = 266,240 and, in a class of its own, the router 32 * 8*4096 = 1,048,576.
    Source: NVIDIA-NeMo/Megatron-Bridge#3744, NVIDIA/Megatron-LM#4050 and #4687.
    """
    for axes, tp, expert_parts in (("ep=8", 1, 8), ("tp=2,ep=8", 2, 8), ("tp=2,ep=4", 2, 4), ("tp=2,ep=4,etp=2", 2, 8)):
        stage = plan_of("mixtral-8x7b", 8, f"{axes},sharding=none").memory.peak_stage
        assert stage.expert.weights_bytes == 2 * 45_097_156_608 // expert_parts, axes
        assert stage.shared.weights_bytes == 2 * (1_604_321_280 // tp + 266_240), axes
        assert stage.router_bytes == 18 * 1_048_576, axes


def test_ranks_of_a_balanced_node_can_be_uneven(tmp_path: Path) -> None:
    """256 experts over 32 ranks, every node the same share, but half of each node's ranks have all of it: about twice
    as slow. A balance that is taken per node sees nothing. Source: deepseek-ai/DeepEP#343.
    """
    skewed = tmp_path / "skewed.json"
    skewed.write_text(json.dumps(([2] * 8 + [0] * 8) * 16))
    job: dict[str, Any] = {"global_batch": 256}
    plan = "ep=32,pp=8,dispatcher=deepep,stage_layers=8x7+5"
    even, uneven = (plan_of("deepseek-v3", 256, plan, load=load, **job).time for load in ("balanced", str(skewed)))
    assert even.imbalance_s == 0
    routed = even.dispatch_s + even.expert_s + even.combine_s
    assert uneven.imbalance_s > 0.5 * routed


def test_top_k_multiplies_what_experts_keep() -> None:
    """Two experts per token keep twice the rows of one dense MLP; whoever expected no growth ran out of memory.

    Mixtral's experts keep, for each of the 2 copies of a token, 2*4096 + 6*14336 bytes: 188,416 a token and layer, so
    24.7e9 over 32 layers and 4,096 tokens. Source: deepspeedai/DeepSpeed#3535.
    """
    none, recomputed = (
        plan_of("mixtral-8x7b", 64, f"ep=8,recompute={recompute}").memory.peak_stage.activations_bytes
        for recompute in ("none", "selective:moe")
    )
    assert none - recomputed == pytest.approx(32 * 4096 * 188_416, rel=0.1)


def test_full_sharding_beats_pipelines_inside_a_node() -> None:
    """Qwen3-30B-A3B on one node of 8 B200: fsdp 8 without ep, 19,500 tokens/s per device, beats ep 4 x pp 2, 17,500.

    Source: mlc-ai/pith-train#79 (two trainers; micro-batches of 8 sequences of 8,192 tokens).
    """
    job: dict[str, Any] = {"cluster": "b200-sxm", "global_batch": 64, "seq_len": 8192}
    sharded = plan_of("qwen3-30b-a3b", 8, "mbs=8,sharding=zero3,recompute=selective:moe", **job)
    piped = plan_of("qwen3-30b-a3b", 8, "mbs=8,pp=2,ep=4", **job)
    assert sharded.step_time_s < piped.step_time_s


def test_hiding_expert_communication_makes_a_step_faster() -> None:
    """Qwen3-235B on 256 H100, ep = 32: 19.7 s a step, 17.6 s with dispatch and combine beside other micro-batches.

    Source: yanring/Megatron-MoE-ModelZoo best_practice/qwen3.
    """
    plan = "tp=2,ep=32,pp=8,vpp=4,recompute=selective:layernorm+moe_act,dispatcher=deepep,stage_layers=2+3x30+2"
    shown, hidden = (
        plan_of("qwen3-235b-a22b", 256, plan, global_batch=2048, software=software).step_time_s
        for software in ("megatron-core", "megatron-core-ep-overlap")
    )
    assert 0.7 < hidden / shown < 0.97
