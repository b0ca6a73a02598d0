"""AP-EP-06: expert parallelism with pipeline stages: memory and time of each stage, limits, constraints at once."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ap_search import estimate, search
from ap_search.result import PricedPlan
from tests.acceptance.toy import SHARDINGS, broken

# AP-EP-06: EP with PP: expert layers by stage (3.1, 3.3).

V3_LAYER = 256 * 3 * 7168 * 2048  # routed experts of one MoE layer


def v3(plan: str, devices: int = 1024, **more: Any) -> PricedPlan:
    """Price a plan of DeepSeek-V3: 3 dense layers, 58 MoE layers, one MTP module that is a MoE layer."""
    given: dict[str, Any] = {"global_batch": 4096, **more}
    return estimate(model="deepseek-v3", devices=devices, plan=plan, **given).plans[0]


@pytest.mark.parametrize(
    ("layout", "moe_layers"),
    [
        ("4x15+1", [1, *[4] * 14, 2]),  # 3 dense layers on the first stage; one layer and the MTP module on the last
        ("5+4x13+3+1", [2, *[4] * 13, 3, 2]),
        ("3+4x14+2", [0, *[4] * 14, 3]),
    ],
)
def test_ap_ep_06_expert_memory_of_each_stage(layout: str, moe_layers: list[int]) -> None:
    """ep=32 of 64 ranks, edp=2: a MoE layer keeps V3_LAYER/32 parameters at 2 + 4 + 12/2 bytes.

    Four of them: 4 * 352,321,536 * 12 = 16,911,433,728 bytes, not 2.95 GB as when divided by dp.
    """
    priced = v3(f"pp=16,ep=32,stage_layers={layout}")
    assert (priced.plan.dp, priced.plan.edp) == (64, 2)
    found = [stage.expert.total_bytes for stage in priced.memory.stages]
    assert found == [count * V3_LAYER // 32 * 12 for count in moe_layers]
    assert 4 * V3_LAYER // 32 * 12 == 16_911_433_728


DENSE_FIRST = {
    "name": "dense-first",
    "hidden_size": 512,
    "vocab_size": 1024,
    "num_layers": 6,
    "attention": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64},
    "ffn": {"width": 65536},
    "moe": {"num_experts": 8, "top_k": 2, "expert_width": 256, "first_dense_layers": 4},
}


def test_ap_ep_06_a_stage_without_moe_layers_dispatches_nothing(tmp_path: Path) -> None:
    """Four wide dense layers on stage 0, which paces the pipeline: no expert memory, no dispatch, no expert time.

    The host, which needs longer for MoE layers than such small ones take, costs nothing here.
    """
    path, instant = tmp_path / "model.json", tmp_path / "instant.yaml"
    path.write_text(json.dumps(DENSE_FIRST))
    instant.write_text("name: instant\nhost_per_layer_us: 0.0\nhost_per_moe_layer_us: 0.0\n")
    answer = estimate(
        model=path,
        devices=16,
        global_batch=256,
        plan="pp=2,ep=8,stage_layers=4+2",
        explain=True,
        seq_len=1024,
        software=instant,
    )
    priced = answer.plans[0]
    dense, moe = priced.memory.stages
    assert priced.critical_stage == 0
    assert (dense.expert.total_bytes, dense.router_bytes, dense.dispatch_bytes) == (0, 0, 0)
    assert min(moe.expert.total_bytes, moe.router_bytes, moe.dispatch_bytes) > 0
    time = priced.time
    assert (time.router_s, time.dispatch_s, time.expert_s, time.combine_s) == (0, 0, 0, 0)
    assert (priced.traffic.dispatch_bytes, priced.traffic.combine_bytes) == (0, 0)
    assert answer.explanation is not None
    assert answer.explanation.moe_stage == 1


def test_ap_ep_06_time_of_a_stage_follows_its_moe_layers() -> None:
    """Stages with four MoE layers take the same, the first with one MoE layer and three dense ones less."""
    times = v3("pp=16,ep=32,stage_layers=4x15+1").stage_times_s
    assert len({round(seconds, 9) for seconds in times[1:15]}) == 1
    assert times[0] < times[1]


def test_ap_ep_06_01_a_plan_that_fits_is_feasible() -> None:
    priced = v3("pp=16,ep=64,stage_layers=4x15+1,recompute=full,dispatcher=deepep", 2048)
    assert priced.feasible
    assert priced.memory.peak_bytes <= priced.memory.limit_bytes


def test_ap_ep_06_02_the_stage_over_the_limit_is_named() -> None:
    """The limit lies between the fullest stage and the next: only that one is over."""
    whole = v3("pp=16,ep=64,stage_layers=4x15+1,recompute=full,dispatcher=deepep", 2048)
    sizes = sorted(stage.total_bytes for stage in whole.memory.stages)
    limit_gib = (sizes[-1] + sizes[-2]) / 2 / 2**30
    priced = v3("pp=16,ep=64,stage_layers=4x15+1,recompute=full,dispatcher=deepep", 2048, memory_limit_gib=limit_gib)
    (violation,) = priced.violations
    assert violation.rule_id == "memory_limit"
    assert violation.message.startswith(f"stage {whole.memory.peak_stage.stage} needs ")
    over = [stage.stage for stage in priced.memory.stages if stage.total_bytes > priced.memory.limit_bytes]
    assert over == [whole.memory.peak_stage.stage]


def test_ap_ep_06_03_more_sharding_never_needs_more() -> None:
    """Weights, gradients and optimizer of experts, shared parameters and router, on every stage; ZeRO-3 <= ZeRO-2."""
    plans = [v3(f"pp=4,ep=8,stage_layers=16x3+13,sharding={sharding}").memory.stages for sharding in SHARDINGS]
    for stages in zip(*plans, strict=True):
        for owner in ("expert", "shared"):
            states = [getattr(stage, owner).total_bytes for stage in stages]
            assert states == sorted(states, reverse=True)
        routers = [stage.router_bytes for stage in stages]
        assert routers == sorted(routers, reverse=True)
        assert stages[3].total_bytes <= stages[2].total_bytes


def test_ap_ep_06_04_more_ep_never_holds_more_experts() -> None:
    """Weights per device halve with each doubling of ep; the optimizer's share stays where edp halves too."""
    stages = [v3(f"pp=16,ep={ep},stage_layers=4x15+1").memory.stages[1].expert for ep in (8, 16, 32, 64)]
    for fewer, more in pairwise(stages):
        assert 2 * more.weights_bytes == fewer.weights_bytes
        assert more.optimizer_bytes == fewer.optimizer_bytes


def test_ap_ep_06_05_all_constraints_of_stages_at_once() -> None:
    """61 layers are no multiple of 16, 1,024 devices none of 16*48, 256 experts none of 48, and it does not fit."""
    assert broken(v3("pp=16,ep=48")) == {"stage_layers", "experts_ep", "world_expert", "memory_limit"}


def test_ap_ep_06_06_device_count() -> None:
    """Where nothing fits, the answer names a number of devices on which something does."""
    answer = search(model="mixtral-8x7b", devices=8, global_batch=64, set={"recompute": ["none"], "mbs": [1]})
    assert not answer.plans
    assert answer.infeasibility is not None
    enough = answer.infeasibility.smallest_devices
    assert enough is not None and enough > 8
    again = search(
        model="mixtral-8x7b", devices=enough, global_batch=1024, set={"recompute": ["none"], "mbs": [1]}, top=1
    )
    assert again.plans


def test_ap_ep_06_07_micro_batches_in_flight_keep_their_dispatch_state() -> None:
    """Earlier stages hold more micro-batches of 1f1b, each with its own routing map, indices and split sizes."""
    stages = v3("pp=16,ep=32,stage_layers=4x15+1,dispatcher=alltoall").memory.stages
    sizes = [stage.dispatch_bytes for stage in stages[1:15]]
    assert all(after < before for before, after in pairwise(sizes))
