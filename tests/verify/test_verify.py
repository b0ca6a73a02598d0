"""`ap-search verify` as a user runs it: answers, refusals, and that a wrong figure is found."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ap_search import api
from ap_search.cli import main
from ap_search.runtime import launch as launcher
from ap_search.runtime import verify as verifier
from tests.verify import ranks

TWO = ("--devices", "2", "--plan")
SMALL = ("--steps", "1", "--seq-len", "8")
MODEL = """\
hidden_size: 32
vocab_size: 128
num_layers: 1
attention: {num_heads: 4}
moe: {num_experts: 4, top_k: 2, expert_width: 16}
"""


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a run that takes a second: one layer, two processes."""
    path = tmp_path / "small.yaml"
    path.write_text(MODEL, encoding="utf-8")
    return ("verify", "--model", str(path), "--devices", "2", "--plan", "ep=2", *SMALL)


def test_the_json_is_the_documented_one() -> None:
    """From a shell, with FSDP, tensor and expert parallelism: exit code 0, JSON alone on stdout."""
    command = [sys.executable, "-m", "ap_search", "verify", "--devices", "4", "--plan", "tp=2,ep=2,sharding=zero3"]
    run = subprocess.run([*command, *SMALL, "--json", "-"], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    assert (answer["ok"], answer["world_size"], answer["backend"], answer["dtype"]) == (True, 4, "gloo", "float32")
    checks = {check["name"]: check for check in answer["checks"]}
    wanted = {
        "forward",
        "loss",
        "hook_order",
        "in_flight",
        "grad.experts.w1",
        "weights.router.weight",
        "bytes.tp",
        "bytes.dp",
    }
    wanted |= {
        "bytes.dispatch",
        "bytes.combine",
        "bytes.weights.expert",
        "bytes.optimizer.router",
        "bytes.saved.moe_layer",
    }
    assert wanted <= set(checks)
    assert {"name", "ok", "expected", "actual", "tolerance"} <= set(checks["forward"])
    assert checks["forward"]["tolerance"] == 1e-3
    assert checks["hook_order"]["expected"] > 0
    for purpose in ("dispatch", "combine", "tp", "dp"):
        assert checks[f"bytes.{purpose}"]["actual"] == checks[f"bytes.{purpose}"]["expected"] > 0
    assert "Warning" not in run.stderr


def test_the_table_and_the_file(small: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every check with its figures, a verdict at the end; `--json PATH` besides; float64 is held to 1e-9."""
    target = tmp_path / "answer.json"
    assert main([*small, "--dtype", "float64", "--json", str(target)]) == 0
    written, printed = json.loads(target.read_text(encoding="utf-8")), capsys.readouterr().out
    assert {check["tolerance"] for check in written["checks"] if check["unit"] == "ratio"} == {1e-9}
    assert f"all {len(written['checks'])} checks hold" in printed
    assert "tp1-pp1-dp2-ep2-mbs1-zero1-alltoall" in printed
    assert max(map(len, printed.splitlines())) <= 120
    for check in written["checks"]:
        assert f"\n{check['name']} " in printed


@pytest.mark.parametrize(
    ("sabotage", "name"),
    [
        (ranks.halving_gradients, "grad.experts."),
        (ranks.overpricing_combine, "bytes.combine"),
    ],
)
def test_a_wrong_figure_is_found_and_named(
    sabotage: Callable[..., str],
    name: str,
    small: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 1, that check and no other."""
    monkeypatch.setattr(verifier, "verify_rank", sabotage)
    assert main([*small, "--json", "-"]) == 1
    answer = json.loads(capsys.readouterr().out)
    failed = [check["name"] for check in answer["checks"] if not check["ok"]]
    assert failed
    assert all(each.startswith(name) for each in failed)
    assert not answer["ok"]


def test_a_process_that_dies_is_no_failed_check(
    small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 70, its own traceback and one line on stderr, nothing on stdout."""
    monkeypatch.setattr(verifier, "verify_rank", ranks.raising)
    assert main(small) == 70
    said = capsys.readouterr()
    assert "ValueError: no VerifyJob" in said.err
    assert said.err.splitlines()[-1].startswith("ap-search: error: rank 1 of 2 failed while ")
    assert said.out == ""


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--devices", "2"), "--plan: required"),
        (("--plan", "ep=2"), "--devices: required"),
        (
            ("--devices", "2", "--plan", "ep=2", "--dtype", "fp8"),
            "--dtype: got 'fp8' (legal: float32 float64 bfloat16)",
        ),
        (("--devices", "2", "--plan", "ep=2", "--steps", "0"), "--steps: got '0' (legal: an integer from 1 to 1000)"),
        (("--devices", "2", "--plan", "ep=2", "--top", "3"), "--top: unknown flag"),
        (("--devices", "2", "--plan", "ep=2", "--model", "nope"), "nope: is neither a preset nor a file"),
        (
            ("--devices", "2", "--plan", "cp=2", "--seq-len", "64"),
            "--plan cp: context parallelism 2 is not run (legal: 1)",
        ),
        (("--devices", "3", "--plan", "ep=2"), "--plan: world_expert"),
        (("--devices", "2", "--plan", "ep=2", "--global-batch", "3"), "--plan: batch: global batch 3 does not divide"),
        (("--devices", "2", "--plan", "pp=2,schedule=zb_h1"), "--plan schedule: schedule zb_h1 is not run"),
    ],
)
def test_bad_input_is_refused_by_name(flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line per fault, before any process is started."""
    assert main(["verify", *flags]) == 2
    said = capsys.readouterr()
    assert any(each.startswith(f"ap-search: error: {line}") for each in said.err.splitlines()), said.err
    assert said.out == ""


def test_more_processes_than_the_machine_may_run(
    small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is named."""
    monkeypatch.setattr(launcher, "process_limit", lambda: 1)
    assert main(small) == 2
    assert (
        "--devices: 2 processes are too many for this machine (legal: 1 to 1 on this machine" in capsys.readouterr().err
    )


def test_without_pytorch_the_extra_is_named(
    small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of PyTorch is needed to say so."""
    monkeypatch.setattr(api, "find_spec", lambda name: None)
    assert main(small) == 2
    assert 'needs PyTorch, which is not installed (legal: pip install "ap-search[runtime]")' in capsys.readouterr().err


def test_nothing_else_imports_pytorch() -> None:
    """The package, its public functions and an estimate do without."""
    code = (
        "import sys, ap_search\n"
        "ap_search.estimate(model='toy-moe', devices=2, plan='ep=2'), ap_search.verify\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def test_under_torchrun_the_first_process_answers() -> None:
    """Two processes that torchrun starts: one answer, one exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "ap_search", "verify", *TWO, "ep=2", *SMALL, "--json", "-"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["ok"]
