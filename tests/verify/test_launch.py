"""The launcher: what rank 0 returns comes back; a rank that dies ends all; nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ap_search.errors import RunFailed, SpecError
from ap_search.runtime import launch as launcher
from ap_search.runtime.launch import launch
from tests.verify import ranks

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 15.0


def _quiet(what: str, share: float) -> None:
    """Report nothing."""


def _run(main: Callable[..., str], payload: str, *, devices: int = 2, timeout_s: float = 60.0) -> str:
    return launch(main, payload, devices=devices, timeout_s=timeout_s, progress=_quiet)


def _gone(pids: list[int]) -> bool:
    """Whether all processes have ended, soon."""
    for _ in range(int(SOON_S * 10)):
        if not any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _state(pid: int) -> str:
    """One letter of a process's state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_ranks_meet_and_rank_0_answers() -> None:
    """0 + 1 + 2 = 3, on one thread each; progress reaches whoever asked."""
    told: list[tuple[str, float]] = []
    answer = launch(ranks.adding, "sum", devices=3, timeout_s=60, progress=lambda *said: told.append(said))
    assert answer == "sum 3 gloo cpu 1"
    assert set(told) <= {("adding", 0.5)}


def test_a_rank_that_raises_ends_the_run_with_its_own_traceback() -> None:
    """Not that of a peer, which fails for want of it."""
    start = time.monotonic()
    with pytest.raises(RunFailed, match="rank 2 of 3 failed") as failed:
        _run(ranks.raising, "cheese", devices=3)
    assert "ValueError: no cheese here" in failed.value.trace
    assert time.monotonic() - start < SOON_S


def test_a_rank_that_is_killed_ends_the_run() -> None:
    """Its signal is named."""
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"rank 1 of 2 died: .*SIGKILL"):
        _run(ranks.killed, "")
    assert time.monotonic() - start < SOON_S


def test_a_run_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """What it was doing is said, and no process is left."""
    with pytest.raises(RunFailed, match=r"no end after 5 s .* while waiting for ever"):
        _run(ranks.waiting, str(tmp_path), timeout_s=5)
    assert _gone([int(name) for name in os.listdir(tmp_path)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_no_rank_outlives_the_process_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    """However that one ends."""
    code = (
        "from tests.verify import ranks\n"
        "from ap_search.runtime.launch import launch\n"
        "if __name__ == '__main__':\n"
        f"    launch(ranks.waiting, {str(tmp_path)!r}, devices=2, timeout_s=60, progress=print)\n"
    )
    script = tmp_path.with_suffix(".py")
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as run:
        for _ in range(300):
            if len(os.listdir(tmp_path)) == 2:
                break
            time.sleep(0.1)
        pids = [int(name) for name in os.listdir(tmp_path)]
        assert len(pids) == 2
        run.send_signal(number)
        run.wait(SOON_S)
        assert _gone(pids)


def test_more_processes_than_the_machine_may_run_are_refused() -> None:
    """With the limit and what it comes from."""
    limit = launcher.process_limit()
    with pytest.raises(
        SpecError, match=rf"--devices: {limit + 1} processes are too many .*1 to {limit} on this machine"
    ):
        _run(ranks.adding, "", devices=limit + 1)


def test_another_run_may_hold_any_port() -> None:
    """The store listens where the system says: a taken port, PyTorch's usual one included, is no clash."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        try:
            assert _run(ranks.adding, "sum").startswith("sum 1 ")
        finally:
            del os.environ["MASTER_PORT"]


def test_torchrun_must_have_started_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything waits for ranks that do not exist."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=r"--devices: is 3, but torchrun started 2 processes \(legal: 2\)"):
        _run(ranks.adding, "", devices=3)


def test_a_launcher_variable_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts."""
    for name in launcher.TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "x")
    with pytest.raises(SpecError, match="RANK: is 'x', as the launcher set it"):
        _run(ranks.adding, "sum")
