"""The JSON is the documented one: every key of the interface, parts that sum to totals, only strict numbers."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ap_search import __version__
from ap_search.result.json import strict_json
from ap_search.units import GIB
from tests.unit.fake_answers import MEMORY_VIOLATION, found, interleaved_plan, nothing, priced, search_summary

PLAN_KEYS = (
    "tp cp pp vpp dp ep etp edp mbs num_microbatches sequence_parallel sharding recompute dispatcher schedule "
    "stage_layers"
)
STAGE_KEYS = (
    "stage moment total_bytes shared expert router_bytes activations_bytes dispatch_bytes logits_bytes buffers_bytes "
    "reserve_bytes"
)
TIME_KEYS = (
    "attention_s dense_ffn_s router_s dispatch_s expert_s combine_s shared_expert_s head_s recompute_s tp_comm_s "
    "cp_comm_s pp_comm_s bubble_s dp_comm_s optimizer_s other_s imbalance_s"
)
PLANS_KEYS = (
    "rank name feasible violations plan step_time_s tokens_per_s_per_device model_flops_per_s_per_device mfu_ratio "
    "peak_memory_bytes memory time traffic"
)


def _missing(entry: dict, keys: str) -> set[str]:
    return set(keys.split()) - set(entry)


def test_every_documented_key_is_there():
    answer = found(priced(violations=(MEMORY_VIOLATION,))).to_json()
    assert not _missing(answer, "schema_version tool_version model cluster job search plans")
    assert not _missing(
        answer["model"],
        "name params_total params_active params_mtp num_layers dense_layers moe_layers num_experts top_k",
    )
    assert not _missing(answer["cluster"], "name devices device_memory_bytes")
    assert not _missing(answer["job"], "global_batch seq_len precision")
    assert not _missing(answer["search"], "candidates priced feasible elapsed_s optimality rejections")
    assert not _missing(answer["search"]["optimality"], "statement exhaustive lower_bound_s gap_ratio")
    assert not _missing(answer["search"]["rejections"][0], "rule_id count message example levers")


def test_every_documented_key_of_a_plan_is_there():
    entry = found(priced(violations=(MEMORY_VIOLATION,))).to_json()["plans"][0]
    assert not _missing(entry, PLANS_KEYS)
    assert not _missing(entry["plan"], PLAN_KEYS)
    assert not _missing(entry["violations"][0], "rule_id message demand bound unit levers")
    assert not _missing(entry["memory"], "limit_bytes stages")
    assert not _missing(entry["memory"]["stages"][0], STAGE_KEYS)
    assert set(entry["memory"]["stages"][0]["expert"]) == {"weights_bytes", "gradients_bytes", "optimizer_bytes"}
    assert set(entry["time"]) == set(TIME_KEYS.split())
    assert set(entry["traffic"]) == {f"{name}_bytes" for name in ("dispatch", "combine", "tp", "cp", "pp", "dp")}


def test_parts_sum_to_their_totals():
    """Stage 0: 1+2+3 + 4+5+6 + 0 + 20 + 1 + 2 + 1 + 4 = 49 GiB; the step: 4 + 3 + 2 + 1 = 10 s."""
    entry = found().to_json()["plans"][0]
    stage = entry["memory"]["stages"][0]
    parts = [stage[key] for key in STAGE_KEYS.split() if key.endswith("_bytes") and key != "total_bytes"]
    assert sum([*parts, *stage["shared"].values(), *stage["expert"].values()]) == stage["total_bytes"] == 49 * GIB
    assert entry["peak_memory_bytes"] == 49 * GIB
    assert sum(entry["time"].values()) == pytest.approx(entry["step_time_s"])


def test_knobs_are_the_words_of_the_flags():
    entry = found(priced(plan=interleaved_plan())).to_json()["plans"][0]["plan"]
    assert entry["sharding"] == "zero1"
    assert entry["recompute"] == "selective:core_attn+moe_act+layernorm"
    assert entry["dispatcher"] == "hybridep"
    assert entry["schedule"] == "interleaved"
    assert entry["sequence_parallel"] is True


def test_stage_layers_have_an_entry_per_stage_and_chunks_are_told_apart():
    """Chunks 16,15 (first round) and 15,15 (second): stage 0 holds 16 + 15, stage 1 holds 15 + 15."""
    entry = found(priced(plan=interleaved_plan())).to_json()["plans"][0]["plan"]
    assert entry["stage_layers"] == [31, 30]
    assert entry["virtual_stage_layers"] == [16, 15, 15, 15]
    assert "virtual_stage_layers" not in found().to_json()["plans"][0]["plan"]


def test_versions_stand_first():
    answer = found().to_json()
    assert answer["schema_version"] == 1
    assert answer["tool_version"] == __version__


def test_text_is_strict_json():
    def refuse(token: str) -> float:
        raise AssertionError(f"{token} is not JSON")

    summary = search_summary(optimality=replace(search_summary().optimality, lower_bound_s=-math.inf))
    unpriced = priced(feasible=False, step_time_s=math.nan, mfu_ratio=math.inf, rank=np.int64(0))
    text = replace(found(unpriced), search=summary).to_json_text()
    answer = json.loads(text, parse_constant=refuse)
    assert answer["plans"][0]["step_time_s"] is None
    assert answer["plans"][0]["mfu_ratio"] is None
    assert answer["search"]["optimality"]["lower_bound_s"] is None
    assert text.endswith("}\n")


def test_numpy_numbers_become_plain_ones():
    plain = strict_json({"count": np.int64(3), "share": np.float32(0.5), "flag": True, "none": None, "list": (1,)})
    assert plain == {"count": 3, "share": 0.5, "flag": True, "none": None, "list": [1]}
    assert type(plain["count"]) is int
    assert plain["flag"] is True


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError, match="object has no place in JSON"):
        strict_json({"plan": object()})


def test_infeasibility_is_told_with_its_nearest_plan():
    answer = nothing().to_json()
    assert answer["plans"] == []
    reason = answer["infeasibility"]
    assert reason["smallest_devices"] == 48
    assert reason["nearest"]["memory"]["stages"][0]["total_bytes"] == 91 * GIB
    assert reason["clash"] == [{"rule_id": "experts.ep", "sentence": "experts must divide by ep"}]
    assert "infeasibility" not in found().to_json()
    json.dumps(answer, allow_nan=False)
