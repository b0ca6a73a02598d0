"""What imbalance costs, as people and programs read it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ap_search import estimate, search
from ap_search.report.imbalance import imbalance_lines, placement_text
from ap_search.report.terminal import render_search
from ap_search.result import ImbalanceCost, OtherPlacement
from ap_search.result.json import plan_json
from ap_search.units import GIB
from tests.unit.fake_answers import priced

COST = ImbalanceCost(
    placement="contiguous",
    redundant_experts=0,
    worst_rank_ratio_max=3.414,
    cost_s=2.311,
    cost_bytes=4 * GIB,
    others=(
        OtherPlacement(
            placement="eplb", redundant_experts=0, worst_rank_ratio_max=1.5, gain_s=1.25, gain_bytes=3 * GIB
        ),
        OtherPlacement(
            placement="eplb", redundant_experts=32, worst_rank_ratio_max=1.05, gain_s=2.0, gain_bytes=-2 * GIB
        ),
    ),
)


def test_costs_and_gains_have_their_signs() -> None:
    """A gain of 1.25 s is a change of -1.25 s; a step of 10 s shows two decimals."""
    text = " ".join(" ".join(imbalance_lines(COST, step_s=10.0, width=80)).split())
    assert "load the busiest rank receives up to 3.41x its share, experts placed contiguous: +2.31 s, +4.0 GiB" in text
    assert "instead the same plan with experts placed eplb (1.50x): -1.25 s, -3.0 GiB" in text
    assert "eplb with 32 redundant (1.05x): -2.00 s, +2.0 GiB" in text


def test_nothing_has_no_sign() -> None:
    even = replace(COST, worst_rank_ratio_max=1.0, cost_s=1e-9, cost_bytes=0, others=())
    (first, second) = imbalance_lines(even, step_s=10.0, width=80)
    assert "1.00x its share" in first
    assert "0.00 s, 0.0 GiB" in f"{first} {second}"
    assert "instead" not in second


def test_lines_keep_to_the_width() -> None:
    assert max(map(len, imbalance_lines(COST, step_s=10.0, width=80))) <= 80


def test_a_placement_names_its_copies() -> None:
    assert placement_text("eplb", 0) == "eplb"
    assert placement_text("lplb", 16) == "lplb with 16 redundant"


def test_the_json_of_a_plan_says_what_imbalance_costs() -> None:
    assert plan_json(priced())["imbalance"] is None
    found = plan_json(replace(priced(), imbalance=COST))["imbalance"]
    assert found["cost_s"] == 2.311
    assert found["cost_bytes"] == 4 * GIB
    assert found["worst_rank_ratio_max"] == 3.414
    assert found["eplb_gain_s"] == 2.0
    assert found["others"][1]["gain_bytes"] == -2 * GIB


def test_eplb_wins_nothing_back_where_it_is_worse() -> None:
    worse = replace(COST, others=(replace(COST.others[0], gain_s=-1.0),))
    assert worse.eplb_gain_s == 0.0
    assert replace(COST, others=()).eplb_gain_s == 0.0
    assert replace(COST, others=(replace(COST.others[0], placement="contiguous"),)).eplb_gain_s == 0.0
    assert COST.eplb_gain_s == pytest.approx(2.0)


def test_search_and_estimate_say_what_imbalance_costs(tmp_path: Path) -> None:
    """The toy model on 8 devices, half of the tokens on one of 8 experts, counted on 8 source ranks.

    Its layers are so small that the host sets their pace; here it costs nothing.
    """
    instant = tmp_path / "instant.yaml"
    instant.write_text("name: instant\nhost_per_layer_us: 0.0\nhost_per_moe_layer_us: 0.0\n")
    counts = np.full((8, 8), 1.0)
    counts[:, 0] = 7.0
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"source_expert_loads": counts.tolist()}))
    asked = {"model": "toy-moe", "devices": 8, "load": path, "global_batch": 64, "seq_len": 512}
    asked |= {"software": instant}
    (plan,) = estimate(plan="ep=8", **asked).plans
    assert plan.imbalance is not None
    assert plan.imbalance.worst_rank_ratio_max == pytest.approx(4.0)
    assert plan.imbalance.eplb_gain_s > 0
    placed = estimate(plan="ep=8", placement="eplb", redundant_experts=8, **asked)
    assert (placed.job.placement, placed.job.redundant_experts) == ("eplb", 8)
    assert plan.step_time_s - placed.plans[0].step_time_s == pytest.approx(plan.imbalance.others[1].gain_s)
    found = search(set={"ep": [8]}, placement="lplb", redundant_experts=8, top=2, **asked)
    assert found.plans[0].imbalance is not None
    assert found.plans[1].imbalance is None
    assert "experts placed lplb with 8 redundant" in " ".join(render_search(found, width=120, styled=False).split())


def test_copies_that_ranks_cannot_share_evenly_are_named() -> None:
    found = estimate(model="toy-moe", devices=8, plan="ep=8", placement="eplb", redundant_experts=4)
    assert [broken.rule_id for broken in found.plans[0].violations] == ["redundant_experts_ep"]
