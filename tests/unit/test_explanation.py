"""`--explain`: which ranks talk to each other over what, and the steps of a MoE layer, read from its priced block."""

import json
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from ap_search import estimate, search
from ap_search.cost.prepared import prepare
from ap_search.plan.mesh import plan_placement
from ap_search.plan.table import PlanTable
from ap_search.report.explanation import explanation_lines, folded_ranks
from ap_search.report.terminal import render_estimate, render_search
from ap_search.result import CommunicationGroup, Explanation, PathStep
from ap_search.search.explanation import communication_groups, explain_plan
from ap_search.spec.job import Precision
from ap_search.units import MIB
from tests import cost_cases as cases
from tests.unit.fake_answers import found


def _groups(plan: str, devices: int, *, experts: bool = True, **machine: object) -> dict[str, CommunicationGroup]:
    where = cases.context(cases.small_model(), devices, machine=cases.round_machine(**machine))
    found = communication_groups(where.machine, cases.plan(where, plan), devices=devices, has_experts=experts)
    return {group.name: group for group in found}


def test_groups_of_16_ranks_by_hand() -> None:
    """tp2 cp2 dp2 pp2 ep8 on nodes of 8: ranks as Megatron-Core lists them (tp [0,1], cp [0,2], dp [0,4], pp [0,8]).

    dp-cp has 4 groups of 4, [0,2,4,6] first; ep and tp-ep are [0..7] and [8..15]; etp and edp have one member and are
    left out. Only pp leaves a node: its second member lies in the other.
    """
    groups = _groups("tp=2,cp=2,pp=2,ep=8", 16)
    shape = {name: (group.groups, group.size, group.first_ranks) for name, group in groups.items()}
    assert shape == {
        "tp": (8, 2, (0, 1)),
        "cp": (8, 2, (0, 2)),
        "dp": (8, 2, (0, 4)),
        "dp-cp": (4, 4, (0, 2, 4, 6)),
        "pp": (8, 2, (0, 8)),
        "ep": (2, 8, tuple(range(8))),
        "tp-ep": (2, 8, tuple(range(8))),
    }
    place = {name: (group.domains, group.leaving, group.level) for name, group in groups.items()}
    assert place.pop("pp") == (2, 1, "network")
    assert set(place.values()) == {(1, 0, "inside")}


def test_the_worst_group_counts_not_the_first() -> None:
    """24 ranks on nodes of 8, ep = 6: [0..5] stays inside, [6..11] has 2 members in one node and 4 in the next."""
    ep = _groups("ep=6", 24)["ep"]
    assert (ep.groups, ep.size, ep.first_ranks) == (4, 6, (0, 1, 2, 3, 4, 5))
    assert (ep.domains, ep.leaving, ep.level) == (2, 4, "network")


def test_expert_tensor_groups_are_neighbours() -> None:
    """tp4 etp2 ep2 of 8 ranks: etp [0,1], ep [0,2], edp [0,4], tp-ep [0..3]."""
    groups = _groups("tp=4,etp=2,ep=2", 8)
    first = {name: groups[name].first_ranks for name in ("etp", "ep", "edp", "tp-ep")}
    assert first == {"etp": (0, 1), "ep": (0, 2), "edp": (0, 4), "tp-ep": (0, 1, 2, 3)}


def test_a_rack_has_an_edge() -> None:
    """On the preset of NVL72 racks, of which a job takes 64 devices each, an ep of 128 leaves the rack."""
    answer = estimate(model="deepseek-v3", cluster="gb200-nvl72", devices=256, plan="ep=128", explain=True)
    assert answer.explanation is not None
    ep = next(group for group in answer.explanation.groups if group.name == "ep")
    assert (ep.domains, ep.leaving, ep.level) == (2, 64, "rack edge")
    inside = estimate(model="deepseek-v3", cluster="gb200-nvl72", devices=256, plan="ep=64", explain=True)
    assert inside.explanation is not None
    ep = next(group for group in inside.explanation.groups if group.name == "ep")
    assert (ep.domains, ep.leaving, ep.level) == (1, 0, "inside")


@pytest.mark.parametrize("plan", ["tp=2,pp=4,ep=8", "tp=4,cp=2,ep=4,etp=2", "pp=2,ep=4", "tp=8,ep=2,etp=4"])
def test_lists_of_ranks_agree_with_what_is_priced(plan: str) -> None:
    """Domains per group are those of the placement that the cost kernels use."""
    where = cases.context(cases.small_model(), 64)
    parsed = cases.plan(where, plan)
    for group in communication_groups(where.machine, parsed, devices=64, has_experts=True):
        placed = plan_placement(PlanTable.from_plans([parsed]), group=group.name, domain_size=8, world=64)
        assert int(placed.domains[0]) == group.domains


def test_a_dense_model_has_no_expert_groups() -> None:
    """16 ranks, tp2: the expert mesh of a dense model carries nothing, so edp = 16 is not listed."""
    assert set(_groups("tp=2", 16, experts=False)) == {"tp", "dp", "dp-cp"}
    answer = estimate(model="llama-3.1-8b", devices=16, plan="tp=2", explain=True)
    assert answer.explanation is not None
    assert {group.name for group in answer.explanation.groups} == {"tp", "dp", "dp-cp"}
    assert answer.explanation.moe_path == ()
    assert answer.explanation.moe_stage is None


def test_meshes_that_do_not_fill_the_devices_have_no_groups() -> None:
    """24 devices do not divide by tp4 pp4; the plan is priced all the same, and explained without groups."""
    answer = estimate(model="toy-moe", devices=24, global_batch=24, plan="tp=4,pp=4", explain=True)
    assert not answer.feasible
    assert answer.explanation is not None
    assert answer.explanation.groups == ()
    assert "groups   none" in render_estimate(answer, width=120, styled=False)


def _path(explanation: Explanation | None) -> dict[str, PathStep]:
    assert explanation is not None
    return {step.name: step for step in explanation.moe_path}


def test_steps_sum_to_the_layer() -> None:
    """Forward and backward of the router, exchange, experts and shared experts are what the layer's block holds.

    Permute + dispatch is the forward part `dispatch`; in backward it is unpermute's and combine's mirror.
    """
    where = cases.context(cases.small_model(), 16)
    priced = cases.price(where, "ep=8,dispatcher=alltoall")
    path = _path(explain_plan(where, priced))
    times = prepare(where, PlanTable.from_plans([priced.plan])).blocks.times
    moe = next(index for index, kind in enumerate(where.model.kinds) if kind.is_moe)
    parts = np.arange(2, 7)
    assert sum(step.forward_s for step in path.values()) == pytest.approx(times[moe].forward[parts, 0].sum())
    assert sum(step.backward_s for step in path.values()) == pytest.approx(times[moe].backward[parts, 0].sum())
    sent = times[moe].sent_forward_bytes[:2, 0].sum() + times[moe].sent_backward_bytes[:2, 0].sum()
    told = sum(step.sent_forward_bytes + step.sent_backward_bytes for step in path.values())
    assert told == pytest.approx(sent, abs=2)


def test_steps_are_the_steps_of_the_plans_breakdown() -> None:
    """One stage, 7 MoE layers and no MTP, 2 micro-batches: the step's router, dispatch and combine are 14 of each."""
    where = cases.context(cases.small_model(mtp_layers=0), 8, global_batch=16)
    priced = cases.price(where, "ep=8")
    assert priced.plan.num_microbatches == 2
    path = _path(explain_plan(where, priced))
    times = {name: step.forward_s + step.backward_s for name, step in path.items()}
    assert 14 * times["router"] == pytest.approx(priced.time.router_s)
    experts = [times[f"expert {step}"] for step in ("fc1", "activation", "fc2")]
    assert 14 * sum(experts) == pytest.approx(priced.time.expert_s)
    assert min(experts) > 0
    exchange = times["permute"] + times["dispatch"] + times["combine"] + times["unpermute"]
    assert 14 * exchange == pytest.approx(priced.time.dispatch_s + priced.time.combine_s)
    sent = sum(step.sent_forward_bytes + step.sent_backward_bytes for step in path.values())
    assert 14 * sent == priced.traffic.dispatch_bytes + priced.traffic.combine_bytes


def test_copies_for_padding_and_projections_are_no_products() -> None:
    """In fp8 rows are copied into padded ones: seconds of the experts that no product has; in bf16 there are none."""
    name = "expert padding, projections"
    where = cases.context(cases.small_model(mtp_layers=0), 8, global_batch=8)
    assert name not in _path(explain_plan(where, cases.price(where, "ep=8")))
    narrow = cases.context(cases.small_model(mtp_layers=0), 8, global_batch=8, precision=Precision.FP8)
    priced = cases.price(narrow, "ep=8")
    path = _path(explain_plan(narrow, priced))
    assert path[name].forward_s == pytest.approx(path[name].backward_s)
    each = [step.forward_s + step.backward_s for step_name, step in path.items() if step_name.startswith("expert ")]
    assert 7 * sum(each) == pytest.approx(priced.time.expert_s)


def test_backward_mirrors_forward() -> None:
    """Dispatch's backward is a combine that also returns gradients of probabilities, combine's a dispatch without them.

    4,096 tokens, top-2: 8,192 copies, 7/8 of which leave: 8192*7/8*4 = 28,672 bytes of probabilities.
    """
    where = cases.context(cases.small_model(), 16)
    path = _path(explain_plan(where, cases.price(where, "ep=8")))
    dispatch, combine = path["dispatch"], path["combine"]
    assert combine.sent_forward_bytes == combine.sent_backward_bytes == 8192 * 1024 * 2 * 7 // 8
    assert dispatch.sent_backward_bytes == combine.sent_forward_bytes + 28_672
    assert combine.backward_s < dispatch.backward_s <= dispatch.forward_s


def test_nothing_is_sent_where_ep_is_1() -> None:
    """Every token stays: dispatch and combine take no time and send nothing; permutation stays."""
    where = cases.context(cases.small_model(), 8)
    path = _path(explain_plan(where, cases.price(where, "ep=1")))
    for name in ("dispatch", "combine"):
        step = path[name]
        assert (step.forward_s, step.backward_s, step.sent_forward_bytes, step.sent_backward_bytes) == (0, 0, 0, 0)
    assert path["permute"].forward_s > 0


def test_recompute_and_imbalance_are_steps_only_where_they_are() -> None:
    """`moe` recompute sends dispatch and combine once more, in backward; skew makes the busiest rank slower."""
    where = cases.context(cases.small_model(), 16)
    plain = _path(explain_plan(where, cases.price(where, "ep=8")))
    assert {"recompute of the layer", "imbalance"} & set(plain) == set()
    again = _path(explain_plan(where, cases.price(where, "ep=8,recompute=selective:moe")))["recompute of the layer"]
    assert again.forward_s == 0
    assert again.backward_s > 0
    sent = plain["dispatch"].sent_forward_bytes + plain["combine"].sent_forward_bytes
    assert again.sent_backward_bytes == pytest.approx(sent, abs=2)
    skewed = cases.context(cases.small_model(), 16, shares=[[0.3] + [0.1] * 7])
    assert _path(explain_plan(skewed, cases.price(skewed, "ep=8")))["imbalance"].forward_s > 0


def test_the_layer_is_one_of_the_critical_stage() -> None:
    """Stage 0 of two holds the dense layers only where the layout says so; the path is then the other stage's."""
    where = cases.context(cases.deepseek_v3(dense=3, moe=3), 16)
    explained = explain_plan(where, cases.price(where, "pp=2,ep=8,stage_layers=3+3"))
    assert explained.moe_stage == 1
    assert explained.moe_path


def test_16384_devices_are_explained_in_a_moment() -> None:
    """Listing 9 kinds of groups of 16,384 ranks takes less than 0.3 s."""
    where = cases.context(cases.deepseek_v3(), 16384, global_batch=16384)
    priced = cases.price(where, "tp=2,pp=8,ep=64")
    started = perf_counter()
    explain_plan(where, priced)
    assert perf_counter() - started < 0.3


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(8), "0-7"),
        ((0, 1), "0-1"),
        ((0, 16), "0,16"),
        (range(0, 256, 8), "0,8,16,..,248"),
        ((0, 2, 4, 6), "0,2,4,6"),
        ((0, 1, 4, 5), "0-1,4-5"),
    ],
)
def test_ranks_are_folded(ranks: range | tuple[int, ...], text: str) -> None:
    assert folded_ranks(tuple(ranks)) == text


MADE_UP = Explanation(
    plan="made-up",
    groups=(
        CommunicationGroup(
            name="ep", groups=8, size=32, first_ranks=tuple(range(32)), domains=4, leaving=24, level="network"
        ),
    ),
    moe_stage=2,
    moe_path=(
        PathStep(name="router", forward_s=0.001, backward_s=0.002, sent_forward_bytes=0, sent_backward_bytes=0),
        PathStep(
            name="dispatch", forward_s=0.25, backward_s=0.5, sent_forward_bytes=2 * MIB, sent_backward_bytes=4 * MIB
        ),
    ),
)


def test_the_terminal_shows_groups_and_path_after_the_breakdown() -> None:
    answer = replace(found(), explanation=MADE_UP)
    for text in (render_search(answer, width=120, styled=False), render_estimate(answer, width=120, styled=False)):
        lines = text.splitlines()
        rows = {line.split()[0]: line.split() for line in lines if line.strip()}
        assert rows["ep"] == ["ep", "8", "32", "4", "24", "network", "0-31"]
        assert rows["dispatch"] == ["dispatch", "250.00", "500.00", "2.0", "4.0"]
        assert rows["sum"] == ["sum", "251.00", "502.00", "2.0", "4.0"]
        assert "slowest MoE layer of stage 2, per layer and micro-batch on the busiest device:" in lines
        sends = next(at for at, line in enumerate(lines) if line.startswith("  sends"))
        assert sends < lines.index("slowest MoE layer of stage 2, per layer and micro-batch on the busiest device:")
        assert all(len(line) <= 120 for line in lines)


def test_nothing_is_explained_unasked() -> None:
    answer = estimate(model="toy-moe", devices=8, plan="ep=4", global_batch=64)
    assert answer.explanation is None
    assert "explain" not in answer.to_json()
    assert "slowest MoE layer" not in render_estimate(answer, width=120, styled=False)


def test_json_has_the_key_where_asked() -> None:
    """`explain{plan, groups[...], moe_stage, moe_path[...]}` beside `plans`."""
    answer = search(model="toy-moe", devices=8, global_batch=64, explain=True)
    told = json.loads(answer.to_json_text())["explain"]
    assert told["plan"] == answer.plans[0].name
    assert set(told) == {"plan", "groups", "moe_stage", "moe_path"}
    for group in told["groups"]:
        assert set(group) == {"name", "groups", "size", "first_ranks", "domains", "leaving", "level"}
        assert len(group["first_ranks"]) == group["size"] > 1
        assert group["groups"] * group["size"] == 8
    assert told["moe_path"][0]["name"] == "router"
    keys = {"name", "forward_s", "backward_s", "sent_forward_bytes", "sent_backward_bytes"}
    assert all(set(step) == keys for step in told["moe_path"])


def test_an_explanation_without_groups_is_one_line() -> None:
    alone = replace(MADE_UP, groups=(), moe_path=(), moe_stage=None)
    lines = [str(line) for line in explanation_lines(alone, 120)]
    assert lines[1].startswith("  groups   none")
    assert len(lines) == 2
