"""Files of recorded runs in our own form, the sets that ship, and a log of Megatron-LM."""

import json
import re

import pytest
import yaml

from ap_search.errors import SpecError
from ap_search.spec.megatron_log import log_memory, read_megatron_log
from ap_search.spec.presets import preset_names
from ap_search.spec.run import CudaGraphs, MemoryKind, Run
from ap_search.spec.run_file import TEMPLATE
from ap_search.spec.runs import load_runs, run_presets
from ap_search.units import GIB, MIB


def own(tmp_path, **changes):
    """Runs of a file in our own form with one run."""
    run = {"id": "a", "model": "toy-moe", "devices": 8, "plan": "ep=4", "global_batch": 64, "seq_len": 2048} | changes
    file = tmp_path / "runs.yaml"
    file.write_text(yaml.safe_dump({"runs": [run]}), encoding="utf-8")
    return load_runs(file)


def test_our_own_form(tmp_path):
    (run,) = own(
        tmp_path,
        source="mine",
        cluster="a100-80-sxm",
        network_gbit_per_s=100,
        measured={"tflops_per_device": 100.0, "flops_rule": "full-attention"},
        memory=[{"peak_gib": [10.0, 0], "stage": "list"}, {"peak_gib": 12.0, "kind": "reserved"}],
        overlap={"ep": True},
        cuda_graphs="full",
        assumed=["load: balanced"],
    )
    assert run.machine.network.bytes_per_s == pytest.approx(12.5e9)
    assert run.measured.flops_per_s_per_device == 1e14
    assert run.measured.memory[0].stage_bytes == (10 * GIB, 0)
    assert run.measured.memory[1].kind is MemoryKind.RESERVED
    assert (run.switches.ep_overlap, run.switches.cuda_graphs) == (True, CudaGraphs.FULL)
    assert run.label.moe
    stated, *rest = run.assumed
    assert stated == "load: balanced"
    assert rest == [
        "precision: not stated, bf16",
        "plan: mbs, sharding, recompute, dispatcher not stated, the defaults of a plan",
    ]


def test_nothing_is_assumed_of_a_run_that_states_all(tmp_path):
    whole = {"cluster": "h100-sxm", "precision": "bf16", "unknown": ["recompute"]}
    (run,) = own(tmp_path, **whole, plan="ep=4,mbs=1,sharding=zero1,dispatcher=alltoall")
    assert run.assumed == ()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"oom": True, "failed": True}, "not both"),
        ({"measured": {"mfu_ratio": 38}}, "mfu_ratio"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, changes, fault):
    with pytest.raises(SpecError, match=fault):
        own(tmp_path, **changes)


def test_models_of_the_file_and_beside_it(tmp_path):
    content = {
        "hidden_size": 64,
        "vocab_size": 128,
        "num_layers": 2,
        "attention": {"num_heads": 4},
        "ffn": {"width": 9},
    }
    (tmp_path / "beside.yaml").write_text(yaml.safe_dump(content | {"num_layers": 3}), encoding="utf-8")
    base = {"devices": 1, "plan": "mbs=1", "global_batch": 1, "seq_len": 64}
    runs = [base | {"id": name, "model": name} for name in ("mine", "beside.yaml")]
    runs.append(base | {"id": "inline", "model": content | {"num_layers": 4}})
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"models": {"mine": content}, "runs": runs}), encoding="utf-8")
    assert [run.model.num_layers for run in load_runs(file)] == [2, 3, 4]


def test_faults_of_our_own_form_are_all_named(tmp_path):
    file = tmp_path / "runs.yaml"
    run = {"id": "a", "model": "toy-moe", "devices": 8, "plan": "ep=4", "global_batch": 64, "seq_len": 2048}
    rows = [run | {"devices": 0}, run | {"modell": 1, "id": "b"}, run | {"memory": {"peak_gib": [1.0, 2.0]}, "id": "c"}]
    file.write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_runs(file)
    lines = str(caught.value).splitlines()
    assert [line.split(" is ")[0].split(": ")[1] for line in lines] == ["runs[0]", "runs[1]", "runs[2]"]
    assert "modell: is not a known key (legal: model)" in lines[1]
    assert lines[2].endswith("memory[0]: peak_gib is a list of stages, so stage must be list")


def test_names_are_unique(tmp_path):
    run = {"id": "a", "model": "toy-moe", "devices": 8, "plan": "ep=4", "global_batch": 64, "seq_len": 2048}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"defaults": run, "runs": [{}, {"devices": 4}]}), encoding="utf-8")
    with pytest.raises(SpecError, match="two runs are called 'a'"):
        load_runs(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{\n", "line 1 is not JSON"),
        ("[1]\n", "runs\\[0\\]: is a list"),
        ("", "is empty"),
    ],
)
def test_lines_that_are_no_runs(tmp_path, text, reason):
    file = tmp_path / "runs.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=reason):
        load_runs(file)


def test_the_template_is_a_file_of_runs(tmp_path):
    file = tmp_path / "template.yaml"
    file.write_text(TEMPLATE, encoding="utf-8")
    (run,) = load_runs(file)
    assert run.label.source == "my cluster, my trainer 1.0, June 2026"
    whole = re.sub(r"^( +)# (\w+: )", r"\1\2", TEMPLATE, flags=re.MULTILINE)
    file.write_text(whole.replace("    notes: what to know before comparing\n", ""), encoding="utf-8")
    (run,) = load_runs(file)
    assert (run.software, run.measured.oom, run.capacity_factor) == ("megatron-core", True, 1.0)


def test_the_sets_that_ship_have_sources_and_are_many():
    """150 runs at least over six kinds of hardware, dense and MoE, with memory, groups and runs out of memory."""
    runs = [run for path in run_presets() for run in load_runs(path)]
    assert len(run_presets()) == len(preset_names("runs"))
    assert len(runs) >= 150
    assert all(isinstance(run, Run) and run.label.source for run in runs)
    assert len({run.label.hardware for run in runs}) >= 6
    assert {run.label.moe for run in runs} == {True, False}
    assert sum(bool(run.measured.memory) for run in runs) >= 50
    assert sum(run.measured.oom for run in runs) >= 5
    groups = [run.label.group for run in runs if run.label.group]
    assert sum(groups.count(group) >= 4 for group in set(groups)) >= 10


LOG = "\n".join(
    [
        " [2026-06-01 10:00:00] iteration 1/ 100 | elapsed time per iteration (ms): 9000.0 | global batch size: 512 |",
        " [2026-06-01 10:00:10] iteration 2/ 100 | elapsed time per iteration (ms): 5000.0 | global batch size: 512 |",
        "0: [Rank 0] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: 300.5 | reserved: 400.0 | "
        "max reserved: 500.0",
        "9: [Rank 9] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: 200.0 | reserved: 400.0 | "
        "max reserved: 450.0 | total device memory used: 7.0",
        " [2026-06-01 10:00:20] iteration 3/ 100 | elapsed time per iteration (ms): 5200.0 | global batch size: 512 |",
        " [2026-06-01 10:00:30] iteration 4/ 100 | elapsed time per iteration (ms): 8000.0 | global batch size: 512 |",
    ]
)


def test_a_log_of_megatron(tmp_path):
    """Without the warm-up 5.0, 5.2 and 8.0 s: the median is 5.2. Sixteen ranks on four stages: rank 9 is on stage 2."""
    file = tmp_path / "train.log"
    file.write_text(LOG, encoding="utf-8")
    log = read_megatron_log(file)
    assert (log.step_time_s, log.intervals, log.global_batch) == (5.2, 3, 512)
    assert log.allocated_bytes == ((0, int(300.5 * MIB)), (9, 200 * MIB))
    allocated, reserved = log_memory(log, devices=16, pp=4)
    assert allocated.stage_bytes == (int(300.5 * MIB), 0, 200 * MIB, 0)
    assert (reserved.kind, reserved.stage_bytes) == (MemoryKind.RESERVED, (500 * MIB, 0, 450 * MIB, 0))


def test_a_log_without_the_lines_that_matter(tmp_path):
    file = tmp_path / "train.log"
    file.write_text("nothing of interest\n", encoding="utf-8")
    with pytest.raises(SpecError, match="no line of an iteration"):
        read_megatron_log(file)


def test_a_log_with_figures_that_are_none(tmp_path):
    """Lines that are cut, or say 0, are left out; a rank that the run does not have is a fault."""
    file = tmp_path / "train.log"
    cut = LOG.replace("max allocated: ", "max allocated: .", 1).replace("(ms): ", "(ms): 0.0 was ", 1)
    file.write_text(cut + " iteration 9/ 9 | elapsed time per iteration (ms): 9.1.2 |\n", encoding="utf-8")
    log = read_megatron_log(file)
    assert (log.intervals, len(log.allocated_bytes)) == (2, 1)
    with pytest.raises(SpecError, match="names rank 9"):
        log_memory(log, devices=8, pp=4)
