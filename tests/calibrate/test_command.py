"""`ap-search calibrate` as a user runs it: from a log or a file of runs to a search with constants of her own."""

import json

import pytest

from ap_search.cli import main
from tests.calibrate.planted import planted_rows, scaled, write_rows

LOG_LINE = (
    " [10:0{n}:00] iteration {n:8d}/     100 | consumed samples: 64 | elapsed time per iteration (ms): {ms} |"
    " learning rate: 1.0E-04 | global batch size:    64 | lm loss: 1.0E+00 |\n"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    planted = {"compute_efficiency": -0.25, "attention": 0.2}
    return planted_rows(tmp_path_factory.mktemp("planted"), planted, ("llama-4k", "llama-32k"))


def test_from_runs_to_a_search_with_files_of_ones_own(rows, tmp_path, capsys):
    runs = str(write_rows(tmp_path / "runs.yaml", rows))
    out = [str(tmp_path / "cluster.yaml"), str(tmp_path / "software.yaml")]
    written = ["--out", out[0], "--software-out", out[1], "--date", "2026-01-02"]
    assert main(["calibrate", "--runs", runs, *written]) == 0
    shown = capsys.readouterr().out
    assert "constants that were fitted" in shown
    assert "result   the median error on each group left out falls from" in shown
    assert max(map(len, shown.splitlines())) <= 120
    first = [(tmp_path / name).read_bytes() for name in ("cluster.yaml", "software.yaml")]
    assert main(["calibrate", "--runs", runs, *written, "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["adopted"]
    assert answer["cross_validation"]["full"]["step_median_abs_error_ratio"] < 0.08
    assert first == [(tmp_path / name).read_bytes() for name in ("cluster.yaml", "software.yaml")]
    job = ["--model", "llama-3.1-8b", "--devices", "8", "--cluster", out[0], "--software", out[1], "--top", "1"]
    assert main([*job, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["name"] == "h100-sxm-calibrated"
    assert found["job"]["software"] == "default-calibrated"
    assert "on 8 dense runs that the calibration left out" in found["fidelity"]["statement"]
    low, high = found["plans"][0]["step_time_band_s"]
    assert low < high < 1.3 * low


def test_from_one_log_to_the_level(rows, tmp_path, capsys):
    """A log of a run that is 1.4 times as slow: another plan of that stack is then predicted within 10 %."""
    row = scaled(rows[0], 1.4)
    log = tmp_path / "train.log"
    ms = row["measured"]["step_time_s"] * 1000
    log.write_text("".join(LOG_LINE.format(n=n, ms=f"{ms:.1f}") for n in range(1, 6)), encoding="utf-8")
    facts = ["--model", row["model"], "--devices", "8", "--plan", row["plan"], "--seq-len", "4096"]
    out = str(tmp_path / "software.yaml")
    assert main(["calibrate", "--megatron-log", str(log), *facts, "--software-out", out]) == 0
    assert "only the level was set" in capsys.readouterr().out
    other = scaled(rows[3], 1.4)
    facts = [*facts[:4], "--plan", other["plan"], "--seq-len", "4096", "--global-batch", "64"]
    assert main(["estimate", *facts, "--software", out, "--json", "-"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["step_time_s"] == pytest.approx(other["measured"]["step_time_s"], rel=0.1)
    assert plan["step_time_band_s"] is None  # the band of the shipped profile does not hold for another


@pytest.mark.parametrize("slower", [1.5, 2.0])
def test_one_log_of_experts_sets_the_level(slower, tmp_path, capsys):
    """Far slower than the model says: the log still counts, whether kernels or the host pace the step."""
    facts = ["--model", "qwen3-30b-a3b", "--devices", "64", "--plan", "pp=4,ep=8", "--global-batch", "512"]
    assert main(["estimate", *facts, "--json", "-"]) == 0
    seconds = json.loads(capsys.readouterr().out)["plans"][0]["step_time_s"] * slower
    log, out = tmp_path / "train.log", str(tmp_path / "software.yaml")
    lines = (LOG_LINE.format(n=n, ms=f"{seconds * 1000:.1f}").replace("   64", "  512") for n in range(1, 6))
    log.write_text("".join(lines), encoding="utf-8")
    assert main(["calibrate", "--megatron-log", str(log), *facts, "--software-out", out]) == 0
    assert "only the level was set" in capsys.readouterr().out
    assert main(["estimate", *facts, "--software", out, "--json", "-"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["step_time_s"] == pytest.approx(seconds, rel=0.1)


def test_nothing_is_written_where_nothing_is_adopted(rows, tmp_path, capsys):
    contradicting = [scaled(row, 1.4 if row["group"] == "llama-4k" else 0.9) for row in rows]
    out = tmp_path / "software.yaml"
    runs = str(write_rows(tmp_path / "runs.yaml", contradicting))
    assert main(["calibrate", "--runs", runs, "--software-out", str(out)]) == 1
    assert "not adopted" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--runs: give files of runs, or --megatron-log"),
        (["--runs", "none.yaml"], "none.yaml: there is no such file"),
        (["--runs", "vtrain-a100", "--leave-out", "plan"], "--leave-out: got 'plan'"),
        (["--runs", "vtrain-a100", "--plan", "tp=2"], "--plan: belongs to --megatron-log"),
        (["--runs", "vtrain-a100", "--out", "nowhere/cluster.yaml"], "--out: folder 'nowhere' does not exist"),
        (["--runs", "vtrain-a100", "--hardware", "gb300"], "recorded runs: no run of 36 is left by the filters"),
        (["--megatron-log", "x.log", "--quality", "A"], "--quality: has no effect on a log"),
        (["--megatron-log", "x.log"], "--model: required"),
        (["--runs", "megatron-bridge", "--out", "c.yaml"], "choose one with --hardware"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *flags]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not list(tmp_path.iterdir())
