"""AP-EP-01 to AP-EP-07: what was asked for of expert parallelism, through the public functions.

The requirement is HyperParallel's "Expert Parallelism estimation" (001); each docstring names the section it answers.
The toy MoE has 4 layers, the first one dense: hidden 64, 8 heads of 8, 4 key/value heads, vocabulary 512, dense width
256, 8 experts of width 64, top-2, no shared experts.
"""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ap_search import estimate, search
from ap_search.cli import main
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.shapes import block_shapes
from ap_search.errors import SpecError
from ap_search.plan.plan import Dispatcher
from ap_search.plan.table import PlanTable
from ap_search.result import Explanation, PathStep, PricedPlan, SearchResult
from ap_search.search.explanation import explain_plan
from ap_search.spec.blocks import Model
from ap_search.spec.model import load_model
from tests import cost_cases as cases

TOY_EXPERTS = 3 * 8 * 3 * 64 * 64  # 3 MoE layers, 8 experts, 3 matrices of 64 x 64
TOY_ROUTERS = 3 * 64 * 8
# Embedding and head 2*512*64; per layer q 64*64, k and v 2*64*32, out 64*64; dense feed-forward 3*64*256.
TOY_MATRICES = 65_536 + 4 * 12_288 + 49_152
TOY_NORMS = 4 * 2 * 64 + 64
SHARDINGS = ("none", "zero1", "zero2", "zero3")


def toy(plan: str, devices: int = 8, **more: Any) -> PricedPlan:
    """Price a plan of the toy MoE; 64 sequences of 1,024 tokens unless said otherwise."""
    given: dict[str, Any] = {"global_batch": 64, "seq_len": 1024, **more}
    return estimate(model="toy-moe", devices=devices, plan=plan, **given).plans[0]


def toy_search(devices: int = 8, **chosen: Any) -> SearchResult:
    """Search the toy MoE's plans over all meshes, one value of each knob unless more are chosen."""
    knobs = {"mbs": [1], "vpp": [1], "sharding": ["zero1"], "recompute": ["none"], "dispatcher": ["alltoall"]}
    return search(
        model="toy-moe",
        devices=devices,
        global_batch=48,
        seq_len=1024,
        top=1000,
        set=knobs | chosen.pop("set", {}),
        **chosen,
    )


def broken(priced: PricedPlan) -> set[str]:
    """Rules that a plan breaks."""
    return {violation.rule_id for violation in priced.violations}


def steps(explained: Explanation | None) -> dict[str, PathStep]:
    """Steps of the MoE layer by name."""
    assert explained is not None
    return {step.name: step for step in explained.moe_path}


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
        where = cases.context(_with_top_k(load_model("toy-moe"), top_k), 8, seq_len=1024)
        sizes.append(cases.price(where, "ep=8").memory.stages[0])
    assert len({stage.expert for stage in sizes}) == 1
    for fewer, more in pairwise(sizes):
        assert more.activations_bytes > fewer.activations_bytes
        assert more.dispatch_bytes > fewer.dispatch_bytes


def _with_top_k(model: Model, top_k: int) -> Model:
    """The same model with another top-k."""
    kinds = (replace(kind, ffn=replace(kind.ffn, top_k=top_k)) if kind.is_moe else kind for kind in model.kinds)
    return replace(model, kinds=tuple(kinds))


# AP-EP-03: token dispatch and combine (3.2).

TOKENS, WIDTH_BYTES = 1024, 64 * 2


def _path(dispatcher: str, devices: int = 8, *, ep: int = 8, model: Model | None = None) -> dict[str, PathStep]:
    """Steps of the toy's MoE layer on a machine of round figures: 1e11 B/s inside nodes of 8, 1e10 B/s beyond."""
    where = cases.context(model or load_model("toy-moe"), devices, machine=cases.round_machine(), seq_len=TOKENS)
    return steps(explain_plan(where, cases.price(where, f"ep={ep},dispatcher={dispatcher}")))


def test_ap_ep_03_alltoall_by_hand() -> None:
    """1,024 tokens, top-2: 2,048 copies of 128 bytes with a probability of 4; 7 of 8 leave the rank.

    Dispatch 2048*132*7/8 = 236,544 bytes at 1e11 B/s, and with it the counts of 8 experts (8 bytes) to 7 ranks.
    Combine 2048*128*7/8 = 229,376 bytes. Backward the other way round.
    """
    path = _path("alltoall")
    assert path["dispatch"].sent_forward_bytes == 236_544 + 8 * 8 * 7
    assert path["combine"].sent_forward_bytes == 229_376
    assert path["dispatch"].forward_s == pytest.approx(236_544 / 1e11)
    assert path["combine"].forward_s == pytest.approx(229_376 / 1e11)
    assert path["dispatch"].backward_s == path["combine"].forward_s
    assert path["combine"].backward_s == path["dispatch"].forward_s


def test_ap_ep_03_alltoall_beyond_the_node_by_hand() -> None:
    """ep=16 of 16 experts on two nodes: half of 2048*132 bytes crosses at 1e10 B/s while the rest moves inside."""
    path = _path("alltoall", 16, ep=16, model=_with_experts(load_model("toy-moe"), 16))
    assert path["dispatch"].forward_s == pytest.approx(2048 * 132 / 2 / 1e10)


def _with_experts(model: Model, num_experts: int) -> Model:
    """The same model with another number of experts."""
    kinds = (
        replace(kind, ffn=replace(kind.ffn, num_experts=num_experts)) if kind.is_moe else kind for kind in model.kinds
    )
    return replace(model, kinds=tuple(kinds))


def test_ap_ep_03_allgather_by_hand() -> None:
    """Each token goes to 7 others with its map (8 bytes) and probabilities (32), and comes back in fp32 (256)."""
    path = _path("allgather")
    assert path["dispatch"].sent_forward_bytes == 1024 * (128 + 8 + 32) * 7
    assert path["combine"].sent_forward_bytes == 1024 * 64 * 4 * 7
    assert path["dispatch"].forward_s == pytest.approx(1024 * 168 * 7 / 1e11)


def test_ap_ep_03_deepep_sends_a_token_once_per_rank() -> None:
    """Top-2 of 8 on 8 ranks: two distinct ranks; on 4 ranks 4*(1 - C(6,2)/C(8,2)) = 1.857 instead of 2 copies."""
    assert _path("deepep")["dispatch"].forward_s == pytest.approx(1024 * 128 * 2.0 / 1e11)
    assert _path("deepep", 4, ep=4)["dispatch"].forward_s == pytest.approx(1024 * 128 * 4 * (1 - 15 / 28) / 1e11)


def _sent(dispatcher: str, ep: int) -> float:
    """Bytes of forward dispatch and combine of a DeepSeek-V3 layer, 4,096 tokens."""
    where = cases.context(cases.deepseek_v3(dense=0, moe=1), 64, machine=cases.round_machine())
    path = steps(explain_plan(where, cases.price(where, f"ep={ep},dispatcher={dispatcher}")))
    return path["dispatch"].sent_forward_bytes + path["combine"].sent_forward_bytes


def test_ap_ep_03_dispatchers_of_deepseek_v3() -> None:
    """Deduplication sends less than a copy per expert (5.29 against 8 at ep=8); gathering all tokens costs ep - 1."""
    for ep in (8, 16, 32, 64):
        assert _sent("deepep", ep) < _sent("alltoall", ep)
    for ep in (16, 32, 64):
        assert _sent("alltoall", ep) < _sent("allgather", ep)
    assert _sent("allgather", 64) > 4 * _sent("alltoall", 64)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_ap_ep_03_ep_1_sends_nothing(dispatcher: str) -> None:
    """Neither bytes nor seconds of communication; what is left of both parts is the permutation."""
    priced = toy(f"ep=1,dispatcher={dispatcher}")
    assert priced.traffic.dispatch_bytes == priced.traffic.combine_bytes == 0
    path = _path(dispatcher, ep=1)
    assert path["dispatch"].forward_s == path["combine"].forward_s == 0


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_ap_ep_03_never_less_with_a_larger_top_k(dispatcher: str) -> None:
    paths = [_path(dispatcher, model=_with_top_k(load_model("toy-moe"), top_k)) for top_k in (1, 2, 4, 8)]
    for name in ("dispatch", "combine"):
        sent = [path[name].sent_forward_bytes for path in paths]
        seconds = [path[name].forward_s for path in paths]
        assert sent == sorted(sent)
        assert seconds == sorted(seconds)


@pytest.mark.parametrize("dispatcher", list(Dispatcher))
def test_ap_ep_03_never_less_with_a_larger_capacity(dispatcher: Dispatcher) -> None:
    """The more copies capacity lets through, the more travel."""
    where = cases.context(load_model("toy-moe"), 8)
    table = PlanTable.from_plans([cases.plan(where, f"ep=8,dispatcher={dispatcher.name.lower()}")])
    shapes, moe = block_shapes(where.machine, where.job, table), where.model.moe
    assert moe is not None
    one = np.ones(1)
    shaped = [dispatch_shape(where, moe, shapes, load_ratio=one, kept_ratio=kept * one) for kept in (0.5, 0.75, 1.0)]
    for fewer, more in pairwise(shaped):
        assert fewer.copies < more.copies
        assert fewer.rows < more.rows


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
    priced = toy("tp=3,ep=3,etp=3,cp=2,pp=3", devices=16, global_batch=7, seq_len=1022, memory_limit_gib=2.6)
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
    everything = toy("ep=3", devices=8, memory_limit_gib=2.6)
    assert broken(everything) == {"experts_ep", "world_expert", "memory_limit"}


# AP-EP-05: expert compute, balanced and not (3.2).


def _histogram(folder: Path, counts: list[int] | list[list[int]]) -> str:
    """A file of tokens per expert."""
    path = folder / "histogram.json"
    path.write_text(json.dumps({"tokens_per_expert": counts}))
    return str(path)


def _shape(where_plan: str, load_ratio: float = 1.0) -> DispatchShape:
    """What a rank of the toy MoE dispatches on 8 devices."""
    where = cases.context(load_model("toy-moe"), 8, seq_len=TOKENS)
    shapes = block_shapes(where.machine, where.job, PlanTable.from_plans([cases.plan(where, where_plan)]))
    assert where.model.moe is not None
    ratio = np.full(1, load_ratio)
    return dispatch_shape(where, where.model.moe, shapes, load_ratio=ratio, kept_ratio=np.ones(1))


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_ap_ep_05_balanced_work_per_rank_does_not_depend_on_ep(ep: int) -> None:
    """Each rank brings 1,024 tokens with 2 copies and receives as many: 2,048 rows, over 8/ep experts."""
    assert float(_shape(f"ep={ep}").rows[0]) == 2048


def test_ap_ep_05_a_uniform_histogram_is_balanced_in_every_figure(tmp_path: Path) -> None:
    """Step, parts, memory and traffic, for all of a search's plans."""
    balanced, uniform = toy_search(), toy_search(load=_histogram(tmp_path, [125] * 8))
    assert len(balanced.plans) == len(uniform.plans) > 10
    for one, other in zip(balanced.plans, uniform.plans, strict=True):
        assert replace(other, imbalance=None) == one


@pytest.mark.parametrize(("ep", "ratio"), [(8, 2.4), (4, 1.6), (2, 1.2), (1, 1.0)])
def test_ap_ep_05_a_skewed_histogram_by_hand(tmp_path: Path, ep: int, ratio: float) -> None:
    """Counts 300, 100 x 7: the first rank has 300 of a mean of 125, 400 of 250, 600 of 500, all of all."""
    load = _histogram(tmp_path, [300] + [100] * 7)
    priced, even = toy(f"ep={ep}", load=load), toy(f"ep={ep}")
    assert priced.imbalance is not None
    assert priced.imbalance.worst_rank_ratio_max == pytest.approx(ratio)
    assert float(_shape(f"ep={ep}", ratio).rows[0]) == pytest.approx(2048 * ratio)
    assert priced.time.expert_s == pytest.approx(even.time.expert_s)
    if ep > 1:
        assert priced.time.imbalance_s > 0
        assert priced.memory.stages[0].activations_bytes > even.memory.stages[0].activations_bytes
        assert priced.step_time_s > even.step_time_s
    else:
        assert priced.step_time_s == pytest.approx(even.step_time_s)


def test_ap_ep_05_layers_add_their_own_worst_ranks(tmp_path: Path) -> None:
    """Three layers with different busy experts cost as much as three with the same one: maxima are summed."""
    same = [[300] + [100] * 7] * 3
    turned = [row[-turn:] + row[:-turn] for turn, row in enumerate(same)]
    assert turned[0] != turned[1]
    one = toy("ep=8", load=_histogram(tmp_path, same))
    other = toy("ep=8", load=_histogram(tmp_path, turned))
    assert other.step_time_s == pytest.approx(one.step_time_s)
    averaged = toy("ep=8", load=_histogram(tmp_path, [sum(column) for column in zip(*turned, strict=True)]))
    assert averaged.step_time_s < other.step_time_s


def test_ap_ep_05_more_skew_is_never_faster(tmp_path: Path) -> None:
    times = [toy("ep=8", load=load).step_time_s for load in ("balanced", "zipf:0.2", "zipf:0.5", "zipf:1", "zipf:2")]
    assert times == sorted(times)


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
    """Four wide dense layers on stage 0, which paces the pipeline: no expert memory, no dispatch, no expert time."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps(DENSE_FIRST))
    answer = estimate(
        model=path, devices=16, global_batch=256, plan="pp=2,ep=8,stage_layers=4+2", explain=True, seq_len=1024
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


@pytest.mark.parametrize("stage", range(4))
def test_ap_ep_06_03_more_sharding_never_needs_more(stage: int) -> None:
    """Weights, gradients and optimizer of experts, shared parameters and router, on every stage; ZeRO-3 <= ZeRO-2."""
    kept = []
    for sharding in SHARDINGS:
        one = v3(f"pp=4,ep=8,stage_layers=16x3+13,sharding={sharding}").memory.stages[stage]
        kept.append((one.expert.total_bytes, one.shared.total_bytes, one.router_bytes, one.total_bytes))
    for less, more in pairwise(kept):
        assert all(after <= before for before, after in zip(less[:3], more[:3], strict=True))
    assert kept[3][3] <= kept[2][3]


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


# AP-EP-07: EP with TP (ETP), and the toy MoE end to end (3.1, 6).


def test_ap_ep_07_etp_gathers_and_cuts() -> None:
    """etp=2 halves what a rank holds of an expert and doubles the rows it works on; ep=2 halves the experts instead."""
    cut, spread = toy("tp=2,ep=2,etp=2"), toy("tp=2,ep=4,etp=1")
    assert cut.memory.stages[0].expert == spread.memory.stages[0].expert
    assert float(_shape("tp=2,ep=2,etp=2").rows[0]) == 2 * float(_shape("tp=2,ep=4").rows[0]) == 2 * 1024
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
    answer = toy_search(set={"etp": [1, 2], "sharding": ["zero1", "zero3"]})
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
