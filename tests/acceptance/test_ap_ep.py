"""AP-EP-01, 02, 04 and 07: what was asked for of expert parallelism, through the public functions.

The requirement is HyperParallel's "Expert Parallelism estimation" (001); each heading names the sections it answers.
03 and 05 stand in test_ap_ep_costs.py, 06 in test_ap_ep_stages.py; the toy MoE is described in toy.py.
"""

import json
import math
from itertools import pairwise
from typing import Any

import pytest

from ap_search import estimate, search
from ap_search.cli import main
from ap_search.errors import SpecError
from ap_search.spec.model import load_model
from tests import cost_cases as cases
from tests.acceptance.toy import SHARDINGS, broken, shape, toy, toy_search, with_top_k

TOY_EXPERTS = 3 * 8 * 3 * 64 * 64  # 3 MoE layers, 8 experts, 3 matrices of 64 x 64
TOY_ROUTERS = 3 * 64 * 8
# Embedding and head 2*512*64; per layer q 64*64, k and v 2*64*32, out 64*64; dense feed-forward 3*64*256.
TOY_MATRICES = 65_536 + 4 * 12_288 + 49_152
TOY_NORMS = 4 * 2 * 64 + 64


# AP-EP-01: ep_degree enters the search space (2.1, 6).


@pytest.mark.parametrize(("devices", "degrees"), [(8, {1, 2, 4, 8}), (4, {1, 2, 4}), (6, {1, 2}), (1, {1})])
def test_ap_ep_01_every_divisor_of_the_experts_that_the_meshes_allow(devices: int, degrees: set[int]) -> None:
    """8 experts have the divisors 1 2 4 8; on 6 devices 4 and 8 divide no mesh, on 4 devices 8 is too many."""
    plans = toy_search(devices).plans
    assert {priced.plan.ep for priced in plans} == degrees
    for priced in plans:
        plan = priced.plan
        assert 8 % plan.ep == 0
        assert plan.edp * plan.ep * plan.etp * plan.pp == plan.dp * plan.cp * plan.tp * plan.pp == devices


def test_ap_ep_01_the_user_chooses_degrees_and_nothing_outside_them_is_returned() -> None:
    assert {priced.plan.ep for priced in toy_search(set={"ep": [2, 8]}).plans} == {2, 8}


def test_ap_ep_01_a_dense_model_has_ep_1_only() -> None:
    """ep and etp are 1 in every plan; asked for ep = 2, the search says which rule forbids it."""
    plans = search(model="llama-3.1-8b", devices=8, global_batch=8, top=20).plans
    assert {(priced.plan.ep, priced.plan.etp) for priced in plans} == {(1, 1)}
    refused = search(model="llama-3.1-8b", devices=8, global_batch=8, set={"ep": [2]})
    assert not refused.plans
    assert refused.infeasibility is not None
    assert "ep_needs_experts" in {rule.rule_id for rule in refused.infeasibility.clash}


# AP-EP-02: memory of expert weights, gradients and optimizer, apart from shared ones; router apart (3.1).


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    ("plan", "dp", "edp"),
    [
        ("ep=1", 8, 8),  # 8/(1*1)
        ("ep=8", 8, 1),
        ("ep=4", 8, 2),
        ("tp=2,ep=4", 4, 2),  # ep does not multiply dp
        ("tp=2,ep=2,etp=2", 4, 2),
        ("tp=4,ep=2,etp=4", 2, 1),
        ("tp=2,cp=2,ep=8", 2, 1),  # ep is wider than dp
    ],
)
def test_ap_ep_02_states_by_hand(plan: str, dp: int, edp: int, sharding: str) -> None:
    """2 bytes of weights, 4 of gradients, 12 of optimizer per parameter of the rank.

    A rank holds TOY_EXPERTS/(ep etp) expert parameters and TOY_MATRICES/tp + TOY_NORMS shared ones. zero1 splits the
    optimizer, zero2 gradients too, zero3 weights too: experts over edp, shared ones and the router over dp*cp.
    """
    priced = toy(f"{plan},sharding={sharding}")
    stage, axes = priced.memory.stages[0], priced.plan
    assert (axes.dp, axes.edp) == (dp, edp)
    level = SHARDINGS.index(sharding)
    experts = TOY_EXPERTS // (axes.ep * axes.etp)
    shared = TOY_MATRICES // axes.tp + TOY_NORMS

    def split(size_bytes: int, from_level: int, ranks: int) -> int:
        return math.ceil(size_bytes / (ranks if level >= from_level else 1))

    assert stage.expert.weights_bytes == split(2 * experts, 3, edp)
    assert stage.expert.gradients_bytes == split(4 * experts, 2, edp)
    assert stage.expert.optimizer_bytes == split(12 * experts, 1, edp)
    group = dp * axes.cp
    assert stage.shared.weights_bytes == split(2 * shared, 3, group)
    assert stage.shared.gradients_bytes == split(4 * shared, 2, group)
    assert stage.shared.optimizer_bytes == split(12 * shared, 1, group)
    router = 2 * TOY_ROUTERS / (group if level >= 3 else 1)
    router += 4 * TOY_ROUTERS / (group if level >= 2 else 1) + 12 * TOY_ROUTERS / (group if level >= 1 else 1)
    assert stage.router_bytes == math.ceil(router)


def test_ap_ep_02_hsdp_splits_within_a_domain() -> None:
    """16 devices, two nodes of 8, ep=4, edp=4: experts over edp/2 = 2, shared ones over 8 of dp = 16."""
    stage = toy("ep=4,sharding=hsdp", devices=16).memory.stages[0]
    assert stage.expert.weights_bytes == 2 * TOY_EXPERTS // 4 // 2
    assert stage.expert.optimizer_bytes == 12 * TOY_EXPERTS // 4 // 2
    assert stage.shared.weights_bytes == math.ceil(2 * (TOY_MATRICES + TOY_NORMS) / 8)


def test_ap_ep_02_parts_sum_to_the_whole() -> None:
    """Without any split, all parameters of the model are on the one device, each once, and cost 18 bytes."""
    stage = toy("ep=1,sharding=none", devices=1).memory.stages[0]
    states = stage.shared.total_bytes + stage.expert.total_bytes + stage.router_bytes
    assert states == 18 * 460_864 == 18 * (TOY_EXPERTS + TOY_ROUTERS + TOY_MATRICES + TOY_NORMS)


def test_ap_ep_02_token_buffers_follow_top_k() -> None:
    """Saved copies, dispatch state and buffers grow with top-k; parameters do not."""
    sizes = []
    for top_k in (1, 2, 4):
        where = cases.context(with_top_k(load_model("toy-moe"), top_k), 8, seq_len=1024)
        sizes.append(cases.price(where, "ep=8").memory.stages[0])
    assert len({stage.expert for stage in sizes}) == 1
    for fewer, more in pairwise(sizes):
        assert more.activations_bytes > fewer.activations_bytes
        assert more.dispatch_bytes > fewer.dispatch_bytes


# AP-EP-04: constraints (3.3).


def test_ap_ep_04_01_experts_divide_by_ep() -> None:
    """8 experts do not divide by 3; 2 and 4 are named, of which 12 devices hold both."""
    priced = toy("ep=3", devices=12, global_batch=24)
    assert "experts_ep" in broken(priced)
    (violation,) = (one for one in priced.violations if one.rule_id == "experts_ep")
    assert (violation.demand, violation.bound) == (3, 8)
    assert [lever.change for lever in violation.levers] == ["ep=2 or ep=4"]
    assert not priced.feasible


@pytest.mark.parametrize("ep", ["0", "-1", "-8", "x", "2.5"])
def test_ap_ep_04_02_ep_is_a_positive_whole_number(ep: str) -> None:
    wrong = (lambda: toy(f"ep={ep}"), lambda: search(model="toy-moe", devices=8, set=[f"ep={ep}"]))
    for call in wrong:
        with pytest.raises(SpecError) as caught:
            call()
        assert all("ep" in fault.path for fault in caught.value.faults)


def test_ap_ep_04_03_a_search_filters_and_says_why() -> None:
    """ep=3 alone: nothing is found; among others it is rejected with a count."""
    alone = toy_search(devices=12, set={"ep": [3]})
    assert not alone.plans
    assert alone.infeasibility is not None
    assert "experts_ep" in {rule.rule_id for rule in alone.infeasibility.clash}
    among = toy_search(set={"ep": [2, 3]})
    assert {priced.plan.ep for priced in among.plans} == {2}
    assert sum(one.count for one in among.search.rejections if one.rule_id == "experts_ep") > 0


def test_ap_ep_04_04_hidden_size_and_heads_divide_by_tp() -> None:
    """64 % 3 = 1 and 8 heads % 3 = 2."""
    assert broken(toy("tp=3,sp=1", devices=3, global_batch=3, seq_len=768)) >= {"hidden_tp", "heads_tp"}


def test_ap_ep_04_05_expert_width_divides_by_etp() -> None:
    """64 % 3 = 1."""
    assert "expert_ffn_etp" in broken(toy("etp=3", devices=3, global_batch=3))


def test_ap_ep_04_06_products_fill_the_devices() -> None:
    """tp*cp*pp = 16 and etp*ep*pp = 16 do not divide 24 devices; 8 of a dense mesh of 8 and ep=8 fold onto 8."""
    assert "world_dense" in broken(toy("tp=4,pp=4", devices=24))
    assert "world_expert" in broken(toy("ep=8,pp=2", devices=24))
    assert toy("tp=2,cp=2,ep=8").feasible
    too_many = toy("tp=4,cp=2,pp=2", devices=8)
    assert "world_dense" in broken(too_many)


def test_ap_ep_04_07_batch_and_sequence_make_whole_micro_batches() -> None:
    """12 sequences over mbs*dp = 8; 1,026 tokens over 2*cp = 4; 1,026 tokens over tp = 4 for dispatch."""
    assert "batch" in broken(toy("ep=8", global_batch=12))
    assert "batch" in broken(toy("ep=8,mbs=16", global_batch=64))
    assert "sequence_cp" in broken(toy("cp=2", seq_len=1022))
    assert broken(toy("tp=4", seq_len=1022)) >= {"sequence_tp", "token_dispatch"}


def test_ap_ep_04_08_all_that_is_broken_is_reported_at_once() -> None:
    """One plan, seven rules and the memory limit; the plan is priced all the same."""
    priced = toy(
        "tp=3,ep=3,etp=3,cp=2,pp=3", devices=16, global_batch=7, seq_len=1022, memory_limit_gib=2.6, reserve_gib=2.5
    )
    assert broken(priced) >= {
        "hidden_tp",
        "heads_tp",
        "experts_ep",
        "expert_ffn_etp",
        "sequence_cp",
        "world_dense",
        "world_expert",
        "stage_layers",
    }
    assert not priced.feasible
    assert math.isfinite(priced.step_time_s)
    everything = toy("ep=3", devices=8, memory_limit_gib=2.6, reserve_gib=2.5)
    assert broken(everything) == {"experts_ep", "world_expert", "memory_limit"}


# AP-EP-07: EP with TP (ETP), and the toy MoE end to end (3.1, 6).


def test_ap_ep_07_etp_gathers_and_cuts() -> None:
    """etp=2 halves what a rank holds of an expert and doubles the rows it works on; ep=2 halves the experts instead."""
    cut, spread = toy("tp=2,ep=2,etp=2"), toy("tp=2,ep=4,etp=1")
    assert cut.memory.stages[0].expert == spread.memory.stages[0].expert
    assert float(shape("tp=2,ep=2,etp=2").rows[0]) == 2 * float(shape("tp=2,ep=4").rows[0]) == 2 * 1024
    assert cut.traffic.dispatch_bytes > 0


def test_ap_ep_07_ep_wider_than_dp_folds_over_tp_and_cp() -> None:
    """dp=2 with tp=2, cp=2: an ep of 8 spans all of them; one of 16 does not exist on 8 devices."""
    priced = toy("tp=2,cp=2,ep=8")
    assert (priced.plan.dp, priced.plan.edp) == (2, 1)
    assert priced.feasible
    groups = estimate(
        model="toy-moe", devices=8, global_batch=64, seq_len=1024, plan="tp=2,cp=2,ep=8", explain=True
    ).explanation
    assert groups is not None
    assert {group.name: group.first_ranks for group in groups.groups}["ep"] == tuple(range(8))


def test_ap_ep_07_the_toy_searches_end_to_end() -> None:
    """Plans ranked by time, each within memory, its parts complete: time sums to the step, memory to its stage."""
    answer = toy_search(set={"etp": [1, 2], "cp": [1]})
    assert [priced.rank for priced in answer.plans] == list(range(1, len(answer.plans) + 1))
    for faster, slower in pairwise(answer.plans):
        assert faster.step_time_s <= slower.step_time_s * (1 + 1e-12)
    assert {priced.plan.etp for priced in answer.plans} == {1, 2}
    assert {priced.plan.ep for priced in answer.plans} == {1, 2, 4, 8}
    assert {priced.plan.pp for priced in answer.plans} >= {1, 2, 4}
    assert answer.search.candidates == answer.search.priced + sum(one.count for one in answer.search.rejections)
    for entry in answer.to_json()["plans"]:
        assert entry["feasible"] and not entry["violations"]
        assert sum(entry["time"].values()) == pytest.approx(entry["step_time_s"])
        assert entry["peak_memory_bytes"] == max(stage["total_bytes"] for stage in entry["memory"]["stages"])
        for stage in entry["memory"]["stages"]:
            assert stage["total_bytes"] == _sum_of_parts(stage)


def _sum_of_parts(stage: dict[str, Any]) -> int:
    """What a stage's parts sum to."""
    owned = sum(sum(stage[owner].values()) for owner in ("shared", "expert"))
    named = ("router", "activations", "dispatch", "logits", "buffers", "reserve")
    return int(owned + sum(stage[f"{name}_bytes"] for name in named))


def test_ap_ep_07_breakdowns_tell_the_moe_path_apart() -> None:
    """Router, dispatch, experts and combine have seconds of their own; expert and shared memory are apart."""
    priced = toy("tp=2,ep=4,pp=2,etp=1")
    time = priced.time
    assert min(time.router_s, time.dispatch_s, time.expert_s, time.combine_s, time.attention_s) > 0
    for stage in priced.memory.stages:
        assert min(stage.shared.total_bytes, stage.expert.total_bytes, stage.router_bytes, stage.dispatch_bytes) > 0


def test_ap_ep_07_the_command_line_writes_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`ap-search --json -` prints one object of the documented form and exits with 0."""
    assert main(["--model", "toy-moe", "--devices", "8", "--global-batch", "64", "--explain", "--json", "-"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told["schema_version"] == 1
    assert set(told) >= {"tool_version", "model", "cluster", "job", "search", "plans", "explain"}
    assert told["model"]["num_experts"] == 8
    best = told["plans"][0]
    assert set(best["plan"]) >= {"tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs", "stage_layers"}
