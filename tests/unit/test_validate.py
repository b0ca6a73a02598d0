"""Recorded runs against their prices: conversions, statistics, order, feasibility, what is printed."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from ap_search import estimate, validate, validate_log
from ap_search.cost.flops import model_flops_per_token, reported_flops_per_token
from ap_search.errors import SpecError
from ap_search.fidelity.measured import compare_memory
from ap_search.fidelity.price import software_for
from ap_search.fidelity.records import Status
from ap_search.fidelity.statistics import error_stats, ranks, spearman, summarise
from ap_search.spec.model import load_model
from ap_search.spec.profiles import load_software
from ap_search.spec.run import CudaGraphs, FlopsRule, MemoryKind, MemoryReading, MemoryStage, Switches
from ap_search.spec.runs import load_runs
from ap_search.spec.switches import switched
from ap_search.units import GIB

RUN = {"model": "llama-3.1-8b", "devices": 8, "plan": "tp=2,pp=2", "global_batch": 64, "seq_len": 4096}


@pytest.fixture
def write(tmp_path):
    """Write runs to a file and return its path."""

    def written(*runs, **defaults):
        file = tmp_path / "runs.yaml"
        rows = [{"id": f"r{number}", **run} for number, run in enumerate(runs)]
        file.write_text(yaml.safe_dump({"defaults": RUN | defaults, "runs": rows}), encoding="utf-8")
        return file

    return written


def only(result):
    (row,) = result.rows
    return row


def test_a_run_is_priced_as_estimate_prices_its_plan(write):
    """Without overlap or graphs of its own, a run in the default profile is what `estimate` says."""
    row = only(validate([write({"measured": {"step_time_s": 4.0}, "memory": {"peak_gib": 30.0}})]))
    arguments = {key: value for key, value in RUN.items() if key != "plan"}
    priced = estimate(**arguments, plan=RUN["plan"]).plans[0]
    assert row.status is Status.PRICED
    assert row.plan_name == priced.name
    assert row.predicted_step_time_s == pytest.approx(priced.step_time_s)
    assert row.step_error_ratio == pytest.approx(priced.step_time_s / 4.0 - 1)
    assert row.fullest_bytes == pytest.approx(priced.memory.peak_bytes, abs=100)
    reserve = priced.memory.stages[0].reserve_bytes
    assert row.memory[0].predicted_bytes == pytest.approx(priced.memory.peak_bytes - reserve, abs=100)
    assert row.limit_bytes == priced.memory.limit_bytes
    assert row.time.attention_s == pytest.approx(priced.time.attention_s)


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [
        ({"step_time_s": 3.0, "tokens_per_s_per_device": 1.0}, 3.0),
        ({"tokens_per_s_per_device": 8192.0}, 4.0),
    ],
)
def test_speeds_become_seconds(write, measured, seconds):
    """64 x 4096 tokens on 8 devices at 8192 tokens per second take 4 s."""
    assert only(validate([write({"measured": measured})])).measured_step_time_s == pytest.approx(seconds)


def test_flops_become_seconds_by_their_rule(write):
    """Seconds are FLOPs by the rule over the rate; the whole square adds 6 x 4096 x 4096 / 2 x 2 per layer, token."""
    rows = [
        {"measured": {"tflops_per_device": 400.0, "flops_rule": rule}}
        for rule in ("causal-halved", "full-attention", "hardware")
    ]
    halved, full, hardware = (row.measured_step_time_s for row in validate([write(*rows)]).rows)
    model = load_model("llama-3.1-8b")
    tokens = 64 * 4096 / 8
    assert halved == pytest.approx(tokens * model_flops_per_token(model, 4096) / 4e14)
    square = 6 * 32 * 4096 * 4096
    assert full - halved == pytest.approx(tokens * square / 4e14)
    assert hardware == full, "nothing is recomputed"


def test_hardware_flops_count_what_is_recomputed():
    """A quarter more passes over the layers: (count - head) x 4/3 + head."""
    model = load_model("llama-3.1-8b")
    full = reported_flops_per_token(model, 4096, rule=FlopsRule.FULL_ATTENTION)
    head = 6 * model.hidden_size * model.vocab_size
    again = reported_flops_per_token(model, 4096, rule=FlopsRule.HARDWARE, full_recompute=True)
    assert again == pytest.approx((full - head) * 4 / 3 + head)


def test_mtp_modules_may_be_left_out_of_flops():
    model = load_model("deepseek-v3")
    whole, without = (
        reported_flops_per_token(model, 4096, rule=FlopsRule.CAUSAL_HALVED, mtp=mtp) for mtp in (True, False)
    )
    assert whole == model_flops_per_token(model, 4096)
    assert without == model_flops_per_token(replace(model, mtp_layers=0), 4096)


def test_mfu_is_a_share_of_the_bf16_peak(write):
    flops = {"tflops_per_device": 0.4 * 989.5, "flops_rule": "full-attention"}
    share = {"mfu_ratio": 0.4, "flops_rule": "full-attention"}
    first, second = validate([write({"measured": flops}, {"measured": share})]).rows
    assert second.measured_step_time_s == pytest.approx(first.measured_step_time_s, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "stage", "stages", "predicted"),
    [
        (MemoryKind.ALLOCATED, MemoryStage.MAX, (), 60),
        (MemoryKind.ALLOCATED, MemoryStage.FIRST, (), 60),
        (MemoryKind.ALLOCATED, MemoryStage.LAST, (), 50),
        (MemoryKind.ALLOCATED, MemoryStage.ENDS, (), 60),
        (MemoryKind.RESERVED, MemoryStage.LAST, (), 50 * 1.038),
        (MemoryKind.NVIDIA_SMI, MemoryStage.MAX, (), 60 * 1.038 + 2.2),
        (MemoryKind.ALLOCATED, MemoryStage.LIST, (0, 30, 40), 50),
    ],
)
def test_memory_is_compared_like_with_like(kind, stage, stages, predicted):
    """62, 42 and 52 GiB with a reserve of 2: tensors alone, with what the allocator holds, with the context besides."""
    reading = MemoryReading(
        kind=kind, stage=stage, peak_bytes=40 * GIB, stage_bytes=tuple(size * GIB for size in stages)
    )
    sizes = np.array([62.0, 42.0, 52.0]) * GIB
    found = compare_memory(reading, sizes, reserve_bytes=2 * GIB, fragmentation_ratio=0.038)
    assert found.predicted_bytes == pytest.approx(predicted * GIB)
    assert found.error_ratio == pytest.approx(predicted / 40 - 1)
    assert [part[0] for part in found.stages] == ([1, 2] if stages else [])


def test_statistics_of_errors():
    """Of -10, 20 and 30 %: median of the absolute values 20, of the values 20, 90th percentile 28."""
    stats = error_stats([-0.1, None, 0.2, 0.3])
    assert (stats.rows, stats.bias_ratio, stats.median_abs_error_ratio) == (3, 0.2, 0.2)
    assert stats.p90_abs_error_ratio == pytest.approx(0.28)
    assert error_stats([None]) is None


def test_rank_correlation():
    """Ties share the mean of their ranks; one swap of neighbours among four costs 6 x 2 / (4 x 15) = 0.2."""
    assert ranks(np.array([3.0, 1.0, 3.0, 9.0])).tolist() == [2.5, 1.0, 2.5, 4.0]
    assert spearman(np.array([1.0, 2, 3, 4]), np.array([1.0, 2, 4, 3])) == pytest.approx(0.8)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
    assert spearman(np.array([1.0, 2, 3]), np.array([5.0, 5, 5])) == 0.0


def priced_group(write, measured, group="g", **defaults):
    plans = ("tp=1", "tp=2", "tp=4", "tp=8")
    rows = [{"plan": plan, "measured": {"step_time_s": seconds}} for plan, seconds in zip(plans, measured, strict=True)]
    return validate([write(*rows, group=group, **defaults)])


def test_order_and_regret_of_a_group(write):
    """Predicted order is tp 1, 2, 4, 8; measured tp 2 is the fastest and tp 1 takes a tenth more: regret 10 %."""
    (group,) = priced_group(write, (1.1, 1.0, 2.0, 3.0)).groups
    assert (group.rows, group.plans) == (4, 4)
    assert group.spearman == pytest.approx(0.8)
    assert group.top1_regret_ratio == pytest.approx(0.1)
    assert (group.chosen, group.fastest) == ("r0", "r1")


def test_several_runs_of_one_plan_count_once(write):
    """The median of 1.0, 1.2 and 5.0 stands for the plan that is run three times."""
    plans = ("tp=1", "tp=1", "tp=1", "tp=2", "tp=4", "tp=8")
    seconds = (1.0, 1.2, 5.0, 1.0, 2.0, 3.0)
    rows = [{"plan": plan, "measured": {"step_time_s": each}} for plan, each in zip(plans, seconds, strict=True)]
    (group,) = validate([write(*rows, group="g")]).groups
    assert (group.rows, group.plans) == (6, 4)
    assert group.top1_regret_ratio == pytest.approx(0.2)


def test_only_one_job_is_a_ranking(write):
    """Three plans, or two sequence lengths, or no group's name, are no ranking."""
    assert priced_group(write, (1.0, 1.0, 1.0, 1.0), group="").groups == ()
    rows = [{"plan": plan, "measured": {"step_time_s": 1.0}} for plan in ("tp=1", "tp=2", "tp=4", "tp=8")]
    assert validate([write(*rows[:3], group="g")]).groups == ()
    assert validate([write(*rows[:3], rows[3] | {"seq_len": 2048}, group="g")]).groups == ()
    assert len(validate([write(*rows[:3], rows[3] | {"global_batch": 128}, group="g")]).groups) == 1


def test_runs_out_of_memory_and_runs_that_trained(write):
    """8 GB less than the prediction needs is full; 16 times it is called safe."""
    plan = {"plan": "tp=8"}
    row = only(validate([write(plan)]))
    need_gib = row.fullest_bytes / GIB
    result = validate(
        [
            write(
                plan | {"memory_limit_gib": need_gib * 0.9, "measured": {"step_time_s": 1.0}},
                plan | {"memory_limit_gib": need_gib * 16, "oom": True, "measured": {"step_time_s": 1.0}},
                plan | {"memory_limit_gib": need_gib * 1.04, "oom": True},
                plan | {"memory_limit_gib": need_gib * 0.5, "failed": True, "measured": {"step_time_s": 1.0}},
            )
        ]
    )
    fate = result.summary.feasibility
    assert (fate.oom_rows, fate.called_safe) == (2, ("r1",))
    assert (fate.ran_rows, fate.called_full) == (1, ("r0",))
    assert result.summary.step.rows == 1, "a run that ended early has no time"


def test_a_rule_that_a_plan_breaks_refuses_it(write):
    good = {"measured": {"step_time_s": 1.0}}
    result = validate(
        [write({"plan": "tp=3"}, {"plan": "tp=nine"}, {"precision": "fp8", "cluster": "a100-80-sxm"}, good)]
    )
    reasons = [row.reason for row in result.rows]
    assert [row.status.value for row in result.rows] == ["refused", "refused", "refused", "priced"]
    assert reasons[0].startswith("heads_tp: ")
    assert "is no positive integer" in reasons[1]
    assert "has no fp8 arithmetic" in reasons[2]
    assert (result.summary.priced, result.summary.refused, result.summary.coverage_ratio) == (1, 3, 0.25)


def test_a_layout_that_nobody_states_is_assumed_aloud(write):
    row = only(validate([write({"plan": "tp=1,pp=3", "devices": 6, "global_batch": 60})]))
    assert any(line.startswith("stage_layers: not stated, balanced by FLOPs") for line in row.assumed)
    summary = validate([write({"plan": "pp=3", "devices": 6, "global_batch": 60})]).summary
    assert dict(summary.assumed)["stage_layers"] == 1
    assert dict(summary.assumed)["plan"] == 1


def test_software_is_the_runs_own_or_recognised_or_the_default(write):
    runs = load_runs(
        write(
            {},
            {"software": "deepspeed"},
            {"source": "TorchTitan benchmarks"},
            {"source": "Megatron-LM, golden values", "overlap": {"ep": True}},
        )
    )
    names = [software_for(run).name for run in runs]
    assert names == ["default", "deepspeed", "torchtitan", "megatron-core"]
    assert software_for(runs[3]).ep_overlap_ratio > 0
    forced = load_software("no-overlap")
    assert [software_for(run, forced) for run in runs] == [forced] * 4


def test_a_profile_that_was_written_anew_is_read_anew(write, tmp_path):
    """In one session of Python: calibrate, write, validate, and again."""
    runs, profile = write({"measured": {"step_time_s": 4.0}}), tmp_path / "mine.yaml"
    seconds = []
    for ratio in (0.9, 0.45):
        profile.write_text(f"name: mine\ncompute_efficiency_ratio: {ratio}\n", encoding="utf-8")
        seconds.append(only(validate([runs], software=profile)).predicted_step_time_s)
    assert seconds[1] > 1.5 * seconds[0]


def test_switches_change_only_what_they_say():
    base = load_software("default")
    assert switched(base, Switches()) == base
    off = switched(base, Switches(dp_reduce_overlap=False))
    assert off == replace(base, dp_reduce_overlap_ratio=0.0)
    on = switched(base, Switches(tp_overlap=True, dp_reduce_overlap=True))
    assert (on.tp_overlap_ratio > 0, on.dp_reduce_overlap_ratio) == (True, base.dp_reduce_overlap_ratio)
    costs = [
        switched(base, Switches(cuda_graphs=graphs)).launch_per_layer_s
        + switched(base, Switches(cuda_graphs=graphs)).launch_per_moe_layer_s
        for graphs in (CudaGraphs.NONE, CudaGraphs.ATTENTION, CudaGraphs.MOE, CudaGraphs.LAYER, CudaGraphs.FULL)
    ]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("wish", "left"),
    [
        ({"quality": "A,B"}, ["r0", "r1"]),
        ({"quality": ["C"]}, ["r2"]),
        ({"hardware": "A100"}, ["r1"]),
        ({"group": "small"}, ["r0"]),
        ({"source": "TWO"}, ["r1", "r2"]),
        ({"only": "dense"}, ["r0", "r1"]),
        ({"only": "moe"}, ["r2"]),
    ],
)
def test_filters(write, wish, left):
    file = write(
        {"quality": "A", "group": "Small-8", "source": "one"},
        {"quality": "B", "cluster": "a100-80-sxm", "source": "two"},
        {"quality": "C", "model": "toy-moe", "plan": "ep=2", "source": "Two"},
    )
    assert [row.label.id for row in validate([file], **wish).rows] == left


def test_filters_that_leave_nothing(write):
    with pytest.raises(SpecError, match="no run of 1 is left"):
        validate([write({})], source="nobody")
    with pytest.raises(SpecError, match="--only"):
        validate([write({})], only="sparse")
    with pytest.raises(SpecError, match="nosuch"):
        validate([write({})], software="nosuch")


def test_a_log_stands_for_a_run(tmp_path):
    """Two intervals after the warm-up, and memory of the first of two stages."""
    line = " iteration {}/ 9 | elapsed time per iteration (ms): {} | global batch size: 32 |"
    lines = [line.format(*each) for each in enumerate((9000.0, 2000.0, 3000.0), start=1)]
    memory = "allocated: 1 | max allocated: 20480 | reserved: 1 | max reserved: 30720"
    lines.append(f"[Rank 0] (after 2 iterations) memory (MB) | {memory}")
    file = tmp_path / "train.log"
    file.write_text("\n".join(lines), encoding="utf-8")
    row = only(validate_log(file, model="llama-3.1-8b", devices=8, plan="tp=2,pp=2"))
    assert (row.measured_step_time_s, row.run.global_batch) == (2.5, 32)
    assert [reading.measured_bytes for reading in row.memory] == [20 * GIB, 30 * GIB]
    assert row.memory[0].stages[0][:2] == (0, 20 * GIB)
    assert len(row.memory[0].stages) == 1
    assert row.software == "megatron-core"
    assert "global_batch: the log's" in row.assumed
    assert "seq_len: not stated, 4096" in row.assumed


def test_summaries_of_no_rows_do_not_fail():
    empty = summarise([])
    assert (empty.summary.rows, empty.summary.step, empty.groups) == (0, None, ())
