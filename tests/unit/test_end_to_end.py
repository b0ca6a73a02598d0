"""The whole tool as a user meets it: real searches and estimates through the command, small enough to be quick."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ap_search import estimate, load_cluster, load_model, search
from ap_search.cli import main
from ap_search.errors import SpecError
from tests.unit.documented_json import ANSWER, AXES, STAGE_PARTS, strays

TOY = ["--model", "toy-moe", "--devices", "8"]
TOP = 12


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(argv))
    return code, out.getvalue(), err.getvalue()


def answer(*argv: str) -> dict[str, Any]:
    """The JSON of a command that must succeed and must print nothing else."""
    code, out, err = run(*argv, "--json", "-")
    assert (code, err) == (0, ""), err
    read: dict[str, Any] = json.loads(out)
    return read


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answer(*TOY, "--top", str(TOP))


# Every knob is used by at least one of these plans.
VARIED = [
    "tp=2,pp=2,ep=4,mbs=2,sharding=zero2,recompute=full",
    "cp=2,ep=2,etp=2,tp=2,dispatcher=allgather,sharding=zero3",
    "pp=2,vpp=2,ep=4,dispatcher=deepep,recompute=selective:moe_act+layernorm",
    "pp=4,schedule=gpipe,sharding=none",
    "pp=4,schedule=zb_h1,ep=2,dispatcher=hybridep",
    "pp=2,schedule=dualpipe,recompute=selective:core_attn+mlp+moe",
    "pp=2,stage_layers=3+1,ep=4",
    "tp=8,ep=8",
]


@pytest.fixture(scope="module")
def estimated() -> list[dict[str, Any]]:
    return [answer("estimate", *TOY, "--plan", plan) for plan in VARIED]


def test_the_answer_of_a_search_is_the_documented_one(found: dict[str, Any]) -> None:
    assert list(strays(found, ANSWER)) == []
    assert found["schema_version"] == 1
    assert [plan["rank"] for plan in found["plans"]] == list(range(1, TOP + 1))
    assert all(plan["feasible"] and not plan["violations"] for plan in found["plans"])
    counts = found["search"]
    assert counts["feasible"] <= counts["priced"] <= counts["candidates"]
    assert counts["feasible"] + sum(one["count"] for one in counts["rejections"]) == counts["candidates"]


def test_the_answer_of_an_estimate_is_the_documented_one(estimated: list[dict[str, Any]]) -> None:
    assert [list(strays(one, ANSWER)) for one in estimated] == [[]] * len(VARIED)
    assert [len(one["plans"]) for one in estimated] == [1] * len(VARIED)


def test_the_checker_sees_what_strays(found: dict[str, Any]) -> None:
    plan = {**found["plans"][0], "mfu_ratio": True, "nonsense": 1}
    del plan["name"]
    assert set(strays({**found, "plans": [plan]}, ANSWER)) == {
        ".plans[0].name is missing",
        ".plans[0].mfu_ratio is True, not number",
        ".plans[0].nonsense is documented nowhere",
    }


def test_parts_sum_to_their_totals(found: dict[str, Any], estimated: list[dict[str, Any]]) -> None:
    for plan in found["plans"] + [one["plans"][0] for one in estimated]:
        assert sum(plan["time"].values()) == pytest.approx(plan["step_time_s"], rel=1e-9), plan["name"]
        stages = plan["memory"]["stages"]
        for stage in stages:
            states = sum([*stage["shared"].values(), *stage["expert"].values()])
            assert states + sum(stage[part] for part in STAGE_PARTS) == stage["total_bytes"], plan["name"]
        assert plan["peak_memory_bytes"] == max(stage["total_bytes"] for stage in stages)
        assert [stage["stage"] for stage in stages] == list(range(plan["plan"]["pp"]))


def test_both_meshes_fill_the_devices(found: dict[str, Any], estimated: list[dict[str, Any]]) -> None:
    for plan in found["plans"] + [one["plans"][0] for one in estimated]:
        axes = plan["plan"]
        assert axes["dp"] * axes["cp"] * axes["tp"] * axes["pp"] == 8
        assert axes["edp"] * axes["ep"] * axes["etp"] == axes["dp"] * axes["cp"] * axes["tp"]
        assert axes["num_microbatches"] * axes["mbs"] * axes["dp"] == 1024
        assert sum(axes["stage_layers"]) == 4
        assert len(axes["stage_layers"]) == axes["pp"]


def test_ranks_follow_the_step_time(found: dict[str, Any]) -> None:
    steps = [plan["step_time_s"] for plan in found["plans"]]
    assert steps == sorted(steps)
    for plan in found["plans"]:
        assert plan["tokens_per_s_per_device"] == pytest.approx(1024 * 4096 / 8 / plan["step_time_s"])
        assert plan["peak_memory_bytes"] <= plan["memory"]["limit_bytes"]


def test_a_printed_name_is_the_same_plan(found: dict[str, Any], estimated: list[dict[str, Any]]) -> None:
    """Every name that was printed, given to `--plan`, is priced as it was."""
    for plan in found["plans"] + [one["plans"][0] for one in estimated]:
        again = estimate(model="toy-moe", devices=8, plan=plan["name"]).to_json()["plans"][0]
        assert again["name"] == plan["name"]
        assert again["plan"] == plan["plan"]
        assert again["step_time_s"] == pytest.approx(plan["step_time_s"], rel=1e-9)
        assert again["peak_memory_bytes"] == plan["peak_memory_bytes"]


def test_what_the_search_found_stands_in_the_report() -> None:
    code, out, err = run(*TOY, "--top", "2", "--set", "tp=2", "--set", "ep=4")
    best = search(model="toy-moe", devices=8, set={"tp": 2, "ep": 4}, top=1).plans[0]
    assert (code, err) == (0, ""), err
    assert best.name in out
    assert max(map(len, out.splitlines())) <= 120


SETS: dict[str, list[Any]] = {
    "tp": [1, 2, 4, 8, 3],
    "cp": [1, 2],
    "pp": [1, 2, 4],
    "vpp": [1, 2],
    "dp": [1, 2, 4, 8],
    "ep": [1, 2, 4, 8],
    "etp": [1, 2],
    "mbs": [1, 2, 3],
    "sharding": ["none", "zero1", "zero2", "zero3", "hsdp"],
    "recompute": ["none", "full", "selective:moe_act", "selective:mlp+moe"],
    "dispatcher": ["allgather", "alltoall", "deepep", "hybridep"],
    "schedule": ["1f1b", "interleaved", "gpipe", "zb_h1", "dualpipe"],
}
CHOICES = st.fixed_dictionaries(
    {}, optional={axis: st.lists(st.sampled_from(values), min_size=1, unique=True) for axis, values in SETS.items()}
)


# A search takes tenths of a second: hundreds of them to shrink a failure would take minutes.
@settings(max_examples=12, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(chosen=CHOICES)
def test_nothing_outside_the_users_candidates_is_returned(chosen: dict[str, list[Any]]) -> None:
    """Whatever the candidates: each plan keeps to them, or none is returned and a reason is given."""
    narrow = {"mbs": [1], "recompute": ["none"], "vpp": [1, 2], **chosen}
    result = search(model="toy-moe", devices=8, set=narrow, top=4)
    for plan in result.to_json()["plans"]:
        outside = [axis for axis, values in chosen.items() if plan["plan"][axis] not in values]
        assert not outside, plan["name"]
    assert bool(result.plans) != bool(result.infeasibility)


def test_one_value_per_axis_is_that_plan() -> None:
    axes = {"tp": 2, "cp": 1, "pp": 2, "vpp": 2, "ep": 4, "etp": 1, "mbs": 2, "sharding": "zero2"}
    knobs = {"recompute": "selective:layernorm", "dispatcher": "alltoall", "schedule": "interleaved"}
    result = search(model="toy-moe", devices=8, set={**axes, **knobs})
    assert [plan.name for plan in result.plans] == [
        "tp2-pp2-vpp2-dp2-ep4-mbs2-zero2-sel:layernorm-alltoall",
    ]
    assert result.search.candidates == result.search.priced == 1


THREE_BY_FOUR = """
name: three-by-four
usable_mib: 81559
bf16_tflops: 989
hbm_tb_per_s: 3.35
devices_per_domain: 4
scale_up_gbyte_per_s: 450
nic_gbit_per_s: 400
"""


@pytest.mark.parametrize(("devices", "batch"), [(1, 8), (24, 48), (96, 96), (12, 24)])
def test_odd_worlds(tmp_path: Path, devices: int, batch: int) -> None:
    """One device, 3 x 8, 12 x 8, and 3 nodes of 4: each has plans that fill it."""
    cluster = tmp_path / "three-by-four.yaml"
    cluster.write_text(THREE_BY_FOUR)
    named = ["--cluster", str(cluster)] if devices == 12 else []
    job = ["--model", "toy-moe", "--devices", str(devices), "--global-batch", str(batch), *named]
    found = answer(*job, "--top", "4", "--set", "mbs=1,2", "--set", "recompute=none", "--set", "vpp=1")
    assert found["cluster"]["devices"] == devices
    assert found["plans"]
    for plan in found["plans"]:
        axes = {axis: plan["plan"][axis] for axis in AXES}
        assert axes["dp"] * axes["cp"] * axes["tp"] * axes["pp"] == devices
        assert axes["edp"] * axes["ep"] * axes["etp"] * axes["pp"] == devices
        assert axes["num_microbatches"] * axes["mbs"] * axes["dp"] == batch


def test_a_world_of_three_uses_a_pipeline_of_three(tmp_path: Path) -> None:
    """12 devices, ep = 2, and the batch of 4 allows dp of 1, 2 and 4: only pp = 3 is left."""
    found = answer("--model", "toy-moe", "--devices", "12", "--global-batch", "4", "--set", "ep=2", "--set", "mbs=1")
    assert {plan["plan"]["pp"] for plan in found["plans"]} == {3}


def test_a_plan_that_does_not_fit_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """405 billion parameters over 8 devices: 2 + 4 bytes each make 304e9 bytes on every one, and they hold 85e9."""
    code, out, err = run("estimate", "--model", "llama-3.1-405b", "--devices", "8", "--plan", "tp=8", "--json", "-")
    (plan,) = json.loads(out)["plans"]
    assert (code, err) == (1, "")
    assert not plan["feasible"]
    assert [one["rule_id"] for one in plan["violations"]] == ["memory_limit"]
    assert plan["violations"][0]["demand"] == plan["peak_memory_bytes"] > 304e9
    assert plan["step_time_s"] > 0


def test_a_plan_that_breaks_rules_is_priced() -> None:
    code, out, _ = run("estimate", *TOY, "--plan", "tp=3,ep=3", "--json", "-")
    (plan,) = json.loads(out)["plans"]
    assert code == 1
    assert {"heads_tp", "experts_ep"} <= {one["rule_id"] for one in plan["violations"]}
    assert plan["step_time_s"] > 0
    assert list(strays(json.loads(out), ANSWER)) == []


@pytest.mark.parametrize("plan", ["pp=8", "pp=8,vpp=2,sharding=zero3", "pp=4,stage_layers=2+0+0+2,ep=2"])
def test_stages_without_layers_are_priced(plan: str) -> None:
    """More stages than layers, or a layout of the user's own: empty stages hold nothing but what every device holds."""
    _, out, err = run("estimate", *TOY, "--plan", plan, "--json", "-")
    (priced,) = json.loads(out)["plans"]
    empty = [stage for stage in priced["memory"]["stages"][1:-1] if not stage["shared"]["weights_bytes"]]
    assert err == ""
    assert empty
    assert all(stage["activations_bytes"] == stage["router_bytes"] == 0 for stage in empty)
    assert sum(priced["time"].values()) == pytest.approx(priced["step_time_s"], rel=1e-9)


def test_nothing_fits_is_an_answer_too() -> None:
    """DeepSeek-V3 on 16 devices: 671e9 parameters x 18 bytes / 16 are 755e9 bytes on each."""
    knobs = ["--set", "recompute=full", "--set", "mbs=1", "--set", "vpp=1", "--set", "sharding=zero3"]
    code, out, err = run("--model", "deepseek-v3", "--devices", "16", *knobs, "--json", "-")
    found = json.loads(out)
    why = found["infeasibility"]
    assert (code, err, found["plans"]) == (1, "", [])
    assert list(strays(found, ANSWER)) == []
    assert why["nearest"]["peak_memory_bytes"] > 755e9 > why["nearest"]["memory"]["limit_bytes"]
    assert why["smallest_devices"] > 128  # 671e9 x 18 / 128 are 94e9 bytes, more than the device has
    assert why["levers"]


def test_rules_that_clash_are_named() -> None:
    """8 devices, tp = 8 and pp = 2 are 16: no plan, and these are the rules."""
    code, out, _ = run(*TOY, "--set", "tp=8", "--set", "pp=2", "--json", "-")
    why = json.loads(out)["infeasibility"]
    assert code == 1
    assert why["nearest"] is None
    assert [rule["rule_id"] for rule in why["clash"]] == ["set:tp", "set:pp", "world_dense"]
    assert why["levers"]


def test_smallest_device_count_does_not_depend_on_the_count_asked_about() -> None:
    """Mixtral 8x7B on H100: whatever was asked, a search fits on the count that is named, and not on one less."""
    named = {
        result.infeasibility.smallest_devices
        for result in (search(model="mixtral-8x7b", devices=devices) for devices in (1, 8, 11))
        if result.infeasibility is not None
    }
    (smallest,) = named
    assert smallest is not None
    assert search(model="mixtral-8x7b", devices=smallest).plans
    assert not search(model="mixtral-8x7b", devices=smallest - 1).plans


def test_what_was_loaded_is_taken_for_its_name() -> None:
    """Model and cluster as values give the same answer as their names."""
    by_name = estimate(model="toy-moe", devices=8, cluster="h200-sxm", plan="pp=2,ep=4")
    by_value = estimate(model=load_model("toy-moe"), devices=8, cluster=load_cluster("h200-sxm"), plan="pp=2,ep=4")
    assert by_value.plans == by_name.plans
    with pytest.raises(SpecError, match="--plan"):
        estimate(model="toy-moe", devices=8, plan={"pp": 2})  # type: ignore[arg-type]
