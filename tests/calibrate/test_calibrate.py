"""Calibration recovers what was planted, leaves alone what runs cannot tell, and adopts nothing that is no better."""

import math

import pytest
import yaml

from ap_search import calibrate, estimate, validate
from ap_search.calibration.records import Fate
from ap_search.errors import SpecError
from ap_search.units import bytes_to_gib
from tests.calibrate.planted import CLUSTER, planted_rows, scaled, write_rows

PLANTED = {"compute_efficiency": math.log(0.8), "attention": math.log(1.25), "launch_per_moe_layer": -math.log(4.0)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return planted_rows(tmp_path_factory.mktemp("planted"), PLANTED)


@pytest.fixture(scope="module")
def shipped_rows(tmp_path_factory):
    """Runs that the shipped constants predict exactly."""
    return planted_rows(tmp_path_factory.mktemp("shipped"), {}, ("llama-4k", "mixtral"))


@pytest.fixture(scope="module")
def slow_rows(tmp_path_factory):
    """Runs on a cluster whose kernels are slower than shipped."""
    return planted_rows(tmp_path_factory.mktemp("slow"), {"compute": math.log(0.75)}, ("llama-4k", "mixtral"))


@pytest.fixture(scope="module")
def found(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("found")
    return calibrate([write_rows(folder / "runs.yaml", rows)], date="2026-01-02")


def gains(result, fate=Fate.FITTED):
    return {constant.name: constant.gain_ratio for constant in result.constants if constant.fate is fate}


def test_planted_constants_are_recovered(found):
    assert found.chosen == "full"
    fitted = gains(found)
    for name, log_gain in PLANTED.items():
        # The pull towards the shipped value costs a strong constant little, a weak one (launches) more.
        assert fitted[name] == pytest.approx(math.exp(log_gain), rel=0.15 if "launch" in name else 0.06), name
    others = {name: gain for name, gain in fitted.items() if name not in PLANTED}
    assert all(gain == pytest.approx(1.0, abs=0.05) for gain in others.values()), others


def test_errors_fall_on_groups_left_out(found):
    judged = found.cross_validation
    assert judged.units == 4
    assert judged.before.step.median_abs_error_ratio > 0.1
    assert judged.full.step.median_abs_error_ratio < 0.05
    assert judged.full.spearman >= judged.before.spearman
    assert found.fitted.step.median_abs_error_ratio < 0.01


def test_what_no_run_depends_on_stays_and_is_named(found):
    left = {constant.name: constant for constant in found.constants if constant.fate is Fate.NOT_IDENTIFIED}
    assert left["gemm_fp8"].reason == "no run depends on it"
    assert left["gemm"].reason == "collinear with grouped_gemm and compute_efficiency: the runs cannot tell them apart"
    for constant in left.values():
        assert constant.reason
        assert (constant.before, constant.gain_ratio) == (constant.after, 1.0), constant.name
    assert found.combinations < len(found.constants)


def test_written_files_are_used_as_they_are(found, rows, tmp_path):
    files = {"cluster": tmp_path / "cluster.yaml", "software": tmp_path / "software.yaml"}
    files["cluster"].write_text(found.cluster_text, encoding="utf-8")
    files["software"].write_text(found.software_text, encoding="utf-8")
    errors = []
    for row in rows:
        asked = {key: row[key] for key in ("model", "devices", "global_batch", "seq_len", "plan")}
        priced = estimate(**asked, **files).plans[0]
        errors.append(abs(priced.step_time_s / row["measured"]["step_time_s"] - 1))
    assert sorted(errors)[len(errors) // 2] == pytest.approx(found.fitted.step.median_abs_error_ratio, abs=0.002)
    again = validate(
        [write_rows(tmp_path / "runs.yaml", [row | {"cluster": "cluster.yaml"} for row in rows])],
        software=files["software"],
    )
    assert again.summary.step.median_abs_error_ratio == pytest.approx(
        found.fitted.step.median_abs_error_ratio, abs=0.001
    )


def test_written_files_say_where_constants_are_from(found):
    cluster, software = yaml.safe_load(found.cluster_text), yaml.safe_load(found.software_text)
    assert cluster["name"] == "h100-sxm-calibrated"
    assert cluster["attention"]["provenance"] == "calibrated"
    assert cluster["sources"]["attention"].startswith(
        "attention calibrated on 16 runs of runs.yaml, 2026-01-02; before: "
    )
    assert software["sources"]["compute_efficiency_ratio"].startswith("compute_efficiency calibrated on 16 runs")
    assert "calibrated on" not in cluster["sources"]["hbm_tb_per_s"]


def test_same_runs_give_the_same_bytes(found, rows, tmp_path):
    again = calibrate([write_rows(tmp_path / "runs.yaml", rows)], date="2026-01-02")
    assert (again.cluster_text, again.software_text) == (found.cluster_text, found.software_text)
    assert again.to_json() == found.to_json()


def test_a_cluster_alone_takes_no_constant_of_the_software(slow_rows, tmp_path):
    result = calibrate([write_rows(tmp_path / "runs.yaml", slow_rows)], fit="cluster")
    assert not result.software_text
    assert {constant.home for constant in result.constants} == {"cluster"}
    assert gains(result)["compute"] == pytest.approx(0.75, rel=0.05)
    assert result.cross_validation.full.step.median_abs_error_ratio < 0.05


def test_runs_of_one_group_set_the_level_alone(rows, tmp_path):
    one = [scaled(row, 1.3) for row in rows if row["group"] == "mixtral"]
    result = calibrate([write_rows(tmp_path / "runs.yaml", one)], fit="software")
    assert (result.chosen, result.cross_validation) == ("level", None)
    assert list(gains(result)) == ["compute_efficiency"]
    assert abs(result.fitted.step.bias_ratio) < 0.05 < 0.25 < abs(result.before.step.bias_ratio)
    assert "nothing can be left out" in result.statement


def test_one_run_within_the_scatter_moves_little_and_one_far_off_nearly_whole(shipped_rows, tmp_path):
    after = {}
    for factor in (1.05, 1.5):
        file = write_rows(tmp_path / "runs.yaml", [scaled(shipped_rows[0], factor)])
        after[factor] = calibrate([file], fit="software").fitted.step.bias_ratio
    assert -0.048 < after[1.05] < -0.015
    assert abs(after[1.5]) < 0.05


def test_constants_that_worsen_groups_left_out_are_not_adopted(shipped_rows, tmp_path):
    contradicting = [scaled(row, 1.3 if row["group"] == "mixtral" else 1 / 1.2) for row in shipped_rows]
    result = calibrate([write_rows(tmp_path / "runs.yaml", contradicting)])
    assert (result.chosen, result.adopted) == ("none", False)
    assert (result.cluster_text, result.software_text) == ("", "")
    assert result.statement.startswith("not adopted: on each group left out the median error would go from")
    assert all(constant.gain_ratio == 1.0 for constant in result.constants)


def test_runs_that_are_predicted_well_change_nothing(shipped_rows, tmp_path):
    result = calibrate([write_rows(tmp_path / "runs.yaml", shipped_rows)])
    assert not result.adopted


def test_an_outlier_is_named_and_hardly_moves_the_fit(rows, tmp_path):
    one = [scaled(row, 2.5) if row["id"] == "llama-4k-1" else row for row in rows]
    result = calibrate([write_rows(tmp_path / "runs.yaml", one)], fit="software")
    assert result.outliers[0].id == "llama-4k-1"
    assert gains(result)["compute_efficiency"] == pytest.approx(0.8, rel=0.1)


@pytest.mark.parametrize("unit", ["group", "source", "model", "hardware"])
def test_units_left_out(rows, tmp_path, unit):
    named = [row | {"source": row["group"][:5]} for row in rows[::2]]
    result = calibrate([write_rows(tmp_path / "runs.yaml", named)], leave_out=unit, fit="software")
    judged = result.cross_validation
    assert (judged.units if judged else 1) == {"group": 4, "source": 3, "model": 3, "hardware": 1}[unit]


def test_the_reserve_is_what_runs_hold_beyond_allocated_tensors(slow_rows, tmp_path):
    memory = [{"peak_gib": 50.0, "kind": "allocated"}, {"peak_gib": 53.5, "kind": "nvidia-smi"}]
    slower = [row | {"memory": memory} for row in slow_rows]
    result = calibrate([write_rows(tmp_path / "runs.yaml", slower)], fit="cluster")
    assert bytes_to_gib(result.reserve_bytes) == pytest.approx(3.5)
    cluster = yaml.safe_load(result.cluster_text)
    assert cluster["reserve_gib"] == pytest.approx(3.5)
    assert "median of 8 runs" in cluster["sources"]["reserve_gib"]
    wrong = [row | {"memory": [memory[0], {"peak_gib": 79.0, "kind": "nvidia-smi"}]} for row in slower]
    result = calibrate([write_rows(tmp_path / "runs.yaml", wrong)], fit="cluster")
    assert result.reserve_bytes is None
    assert "no reserve" in result.reserve_statement


def faults(error):
    return "\n".join(str(fault) for fault in error.value.faults)


def test_a_row_whose_time_cannot_be_is_refused_by_name(rows, tmp_path):
    wrong = [scaled(row, {"llama-4k-0": 1000.0, "qwen-1": 0.1}.get(row["id"], 1.0)) for row in rows]
    result = calibrate([write_rows(tmp_path / "runs.yaml", wrong)], fit="software")
    refused = {run.id: run.reason for run in result.unused if run.refused}
    assert set(refused) == {"llama-4k-0", "qwen-1"}
    assert "times the" in refused["llama-4k-0"]
    assert "with every efficiency at 1" in refused["qwen-1"]
    assert result.rows == 14


def test_nothing_but_nonsense_is_bad_input(rows, tmp_path):
    with pytest.raises(SpecError) as error:
        calibrate([write_rows(tmp_path / "runs.yaml", [scaled(rows[0], 0.05), scaled(rows[1], 20)])])
    assert "llama-4k-0: measured" in faults(error)
    assert "llama-4k-1: measured" in faults(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measured": {}}, "no run has a measured time and a price (llama-4k-0: no time measured)"),
        ({"oom": True}, "no time measured"),
    ],
)
def test_runs_without_a_time_are_bad_input(rows, tmp_path, change, message):
    with pytest.raises(SpecError) as error:
        calibrate([write_rows(tmp_path / "runs.yaml", [rows[0] | change])])
    assert message in faults(error)


def test_mixed_machines_and_stacks_are_named(rows, tmp_path):
    mixed = write_rows(tmp_path / "runs.yaml", [rows[0], rows[1] | {"cluster": "b200-sxm"}])
    with pytest.raises(SpecError) as error:
        calibrate([mixed])
    assert "runs of several clusters: b200-sxm (1), h100-sxm (1); choose one with --hardware" in faults(error)
    assert calibrate([mixed], fit="software").clusters == ("b200-sxm", "h100-sxm")
    stacks = write_rows(tmp_path / "stacks.yaml", [rows[0], rows[1] | {"software": "torchtitan"}])
    with pytest.raises(SpecError) as error:
        calibrate([stacks])
    assert "default (1), torchtitan (1); name the one to start from with --software" in faults(error)
    assert calibrate([stacks], fit="cluster").profiles == ("default", "torchtitan")


def test_a_cluster_that_the_runs_are_not_of_is_bad_input(rows, tmp_path):
    with pytest.raises(SpecError, match="is b200-sxm, but the runs are of h100-sxm"):
        calibrate([write_rows(tmp_path / "runs.yaml", rows)], cluster="b200-sxm")


def test_an_efficiency_over_one_is_bad_input(rows, tmp_path):
    cluster = tmp_path / "mine.yaml"
    text = yaml.safe_dump(
        {
            "name": "mine",
            "hbm_gib": 80,
            "hbm_tb_per_s": 3.35,
            "bf16_tflops": 989,
            "devices_per_domain": 8,
            "scale_up_gbyte_per_s": 450,
            "nic_gbit_per_s": 400,
            "gemm": {"efficiency_ratio": 1.2},
        }
    )
    cluster.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r"gemm\.efficiency_ratio"):
        calibrate([write_rows(tmp_path / "runs.yaml", rows)], cluster=cluster)


def test_words_that_do_not_exist_are_bad_input(rows, tmp_path):
    file = write_rows(tmp_path / "runs.yaml", rows)
    with pytest.raises(SpecError, match="leave_out"):
        calibrate([file], leave_out="plan")
    with pytest.raises(SpecError, match="fit"):
        calibrate([file], fit="everything")


def test_a_file_of_ones_own_is_the_start(slow_rows, tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text(
        yaml.safe_dump(
            {
                "name": "mine",
                "hbm_gib": 80,
                "hbm_tb_per_s": 3.35,
                "bf16_tflops": 989,
                "devices_per_domain": 8,
                "scale_up_gbyte_per_s": 450,
                "nic_gbit_per_s": 400,
            }
        )
    )
    result = calibrate([write_rows(tmp_path / "runs.yaml", slow_rows)], cluster=own, fit="cluster")
    written = yaml.safe_load(result.cluster_text)
    assert written["name"] == "mine-calibrated"
    assert written["dispatch"]["provenance"] in ("derived", "calibrated")
    assert CLUSTER not in result.clusters
