"""The command line against a stand-in for the Python functions: exit codes, messages, what goes where."""

import json
import os
import subprocess
import sys

import pytest

import ap_search
from ap_search import __version__
from ap_search.calibration.calibrate import LEAVE_OUT
from ap_search.cli import main
from ap_search.cli_flags import CHOICES
from ap_search.errors import Fault, SpecError
from ap_search.fidelity.select import ONLY
from ap_search.plan.text import DISPATCHER_VALUES, RECOMPUTE_MODULES, SCHEDULE_VALUES, SETTABLE, SHARDING_VALUES
from ap_search.runtime.settings import DTYPES
from ap_search.spec.job import PlacementPolicy, Precision, Target
from tests.unit.fake_answers import FakeApi, found, nothing, priced

JOB = ["--model", "m", "--devices", "8"]


@pytest.fixture
def api(monkeypatch):
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "ap_search.api", fake)
    monkeypatch.setattr(ap_search, "api", fake, raising=False)
    return fake


@pytest.fixture
def refused(capsys, api):
    """Run a command that must be refused; return its lines on stderr."""

    def run(*argv: str) -> list[str]:
        assert main(list(argv)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert not api.arguments, "bad input must be refused before any work"
        lines = captured.err.splitlines()
        assert all(line.startswith("ap-search: error: ") for line in lines)
        return [line.removeprefix("ap-search: error: ") for line in lines]

    return run


def test_a_search_needs_a_model_and_devices_only(api, capsys):
    assert main(JOB) == 0
    progress = api.arguments.pop("progress")
    assert progress is None
    assert api.arguments == {
        "model": "m",
        "devices": 8,
        "cluster": "h100-sxm",
        "global_batch": None,
        "seq_len": None,
        "precision": None,
        "set": None,
        "memory_limit_gib": None,
        "reserve_gib": None,
        "software": "default",
        "load": "balanced",
        "placement": "contiguous",
        "redundant_experts": 0,
        "capacity_factor": None,
        "pad_to_capacity": False,
        "target": "any",
        "explain": False,
        "top": 10,
    }
    captured = capsys.readouterr()
    assert captured.out.startswith("model    made-up-moe")
    assert captured.err == ""


def test_flags_become_arguments(api):
    flags = "--cluster c --global-batch 64 --seq-len 8192 --precision fp8 --set ep=8,16 --set recompute=none --top 3"
    more = "--memory-limit-gib 70.5 --reserve-gib 0 --software s --load zipf:1.2 --target megatron"
    placed = "--placement eplb --redundant-experts 8 --capacity-factor 1.25 --pad-to-capacity --explain"
    assert main([*JOB, *flags.split(), *more.split(), *placed.split()]) == 0
    del api.arguments["progress"]
    assert api.arguments == {
        "model": "m",
        "devices": 8,
        "cluster": "c",
        "global_batch": 64,
        "seq_len": 8192,
        "precision": "fp8",
        "set": ["ep=8,16", "recompute=none"],
        "memory_limit_gib": 70.5,
        "reserve_gib": 0.0,
        "software": "s",
        "load": "zipf:1.2",
        "placement": "eplb",
        "redundant_experts": 8,
        "capacity_factor": 1.25,
        "pad_to_capacity": True,
        "target": "megatron",
        "explain": True,
        "top": 3,
    }


def test_estimate_passes_the_plan_and_no_count(api, capsys):
    assert main(["estimate", *JOB, "--plan", "tp=2,pp=4"]) == 0
    assert api.arguments["plan"] == "tp=2,pp=4"
    assert "top" not in api.arguments
    assert "progress" not in api.arguments
    assert "step 10.00 s" in capsys.readouterr().out


def test_a_plan_name_pasted_in_several_lines_is_whole_again(api):
    assert main(["estimate", *JOB, "--plan", " tp2-pp4-\n  dp8 "]) == 0
    assert api.arguments["plan"] == "tp2-pp4-dp8"


def test_nothing_feasible_is_exit_1(api, capsys):
    api.outcome = nothing()
    assert main(JOB) == 1
    assert "Nothing feasible" in capsys.readouterr().out


def test_an_infeasible_estimate_is_exit_1(api, capsys):
    api.outcome = found(priced(feasible=False))
    assert main(["estimate", *JOB, "--plan", "tp=2"]) == 1
    assert "not feasible" in capsys.readouterr().out


def test_json_stands_alone_on_stdout(api, capsys):
    assert main([*JOB, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == found().to_json()
    assert captured.err == ""


def test_json_of_nothing_feasible_is_printed_with_exit_1(api, capsys):
    api.outcome = nothing()
    assert main([*JOB, "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["plans"] == []


def test_json_file_is_written_beside_the_report(api, capsys, tmp_path):
    target = tmp_path / "result.json"
    target.write_text("old")
    assert main([*JOB, "--json", str(target)]) == 0
    assert json.loads(target.read_text()) == found().to_json()
    assert "Best plan" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_json_file_behind_a_link_is_replaced_and_the_link_stays(api, tmp_path):
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert main([*JOB, "--json", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(target.read_text())["schema_version"] == 1


def test_a_device_is_written_not_replaced(api):
    assert main([*JOB, "--json", os.devnull]) == 0
    assert not os.path.isfile(os.devnull)


def test_a_failed_write_leaves_the_old_file_and_no_part(api, capsys, tmp_path, monkeypatch):
    target = tmp_path / "result.json"
    target.write_text("old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert main([*JOB, "--json", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"ap-search: error: --json: '{target}' cannot be written: No space left\n"
    assert captured.out == ""
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("failure", [SpecError("m.yaml", "is empty"), RuntimeError("bug")])
def test_nothing_is_written_when_the_work_fails(api, tmp_path, failure):
    api.outcome = failure
    assert main([*JOB, "--json", str(tmp_path / "result.json")]) in (2, 70)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["", "missing/result.json", "."])
def test_a_target_that_cannot_be_written_is_refused_first(refused, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (line,) = refused(*JOB, "--json", target)
    assert line.startswith("--json: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["0", "-3", "abc", "1e9", "nan", "8.5", "", "100000000", "٣", "1_000", "9" * 5000])
@pytest.mark.parametrize("flag", ["--devices", "--global-batch", "--seq-len", "--top"])
def test_bad_counts_are_refused_with_their_range(refused, flag, text):
    rest = JOB[:2] if flag == "--devices" else JOB
    (line,) = refused(*rest, f"{flag}={text}")
    assert line.startswith(f"{flag}: got ")
    assert "(legal: an integer from 1 to " in line


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1e999", "lots", "", "1,5"])
@pytest.mark.parametrize(("flag", "lowest"), [("--memory-limit-gib", "above 0"), ("--reserve-gib", "0")])
def test_bad_sizes_are_refused_with_their_range(refused, flag, lowest, text):
    assert refused(*JOB, f"{flag}={text}") == [f"{flag}: got {text!r} (legal: GiB, {lowest} to 1000000)"]


def test_a_limit_of_zero_is_refused(refused):
    assert refused(*JOB, "--memory-limit-gib", "0") == ["--memory-limit-gib: got '0' (legal: GiB, above 0 to 1000000)"]


def test_unknown_words_name_the_nearest(refused):
    assert refused(*JOB, "--precision", "fp88") == [
        "--precision: got 'fp88', did you mean fp8? (legal: bf16 fp8 mxfp8)"
    ]
    (line,) = refused(*JOB, "--target", "megatrom")
    assert line.startswith("--target: got 'megatrom', did you mean megatron? (legal: any megatron ")


def test_every_fault_has_its_line(refused):
    lines = refused("--devcies", "8", "--top", "0", "--precision", "x", "stray")
    assert [line.split(": ")[0] for line in lines] == ["--devcies", "stray", "--model", "--precision", "--top"]


def test_a_misspelt_flag_names_the_nearest_and_is_not_missed_too(refused):
    assert refused("--model", "m", "--devcies", "8") == ["--devcies: unknown flag, did you mean --devices?"]
    assert refused("--model", "m", "--devcies=8") == ["--devcies: unknown flag, did you mean --devices?"]


def test_flags_are_not_abbreviated(refused):
    assert refused(*JOB, "--prec", "fp8")[0].startswith("--prec: unknown flag, did you mean --precision?")


def test_a_flag_of_another_command_says_so(refused):
    assert refused(*JOB, "--plan", "tp=2") == ["--plan: unknown flag, it belongs to: ap-search estimate"]


def test_missing_flags_are_named(refused):
    assert [line.split(" (legal")[0] for line in refused()] == ["--model: required", "--devices: required"]
    assert [line.split(" (legal")[0] for line in refused("estimate", *JOB)] == ["--plan: required"]


def test_a_flag_without_its_value(refused):
    assert refused("--model", "m", "--devices") == [
        "--devices: expected one argument (legal: an integer from 1 to 1048576)"
    ]


def test_an_unknown_command_names_the_nearest(refused):
    (line,) = refused("estmate", *JOB)
    assert line.startswith(
        "'estmate': unknown command, did you mean estimate? (legal: estimate, validate, calibrate, verify, "
    )


def test_faults_of_the_input_are_one_line_each(api, capsys):
    api.outcome = SpecError.of(
        [
            Fault(path="m.yaml: layers", reason="is negative", legal="1 or more"),
            Fault(path="global_batch", reason="does not divide\nby 3"),
        ]
    )
    assert main(JOB) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "ap-search: error: m.yaml: layers: is negative (legal: 1 or more)",
        "ap-search: error: --global-batch: does not divide by 3",
    ]
    assert captured.out == ""


def test_a_bug_of_ours_is_one_line(api, capsys, monkeypatch):
    monkeypatch.delenv("AP_SEARCH_DEBUG", raising=False)
    api.outcome = ZeroDivisionError("division\nby zero")
    assert main(JOB) == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ap-search: internal error: ZeroDivisionError: division by zero; please report it")


def test_the_traceback_is_shown_on_demand(api, capsys, monkeypatch):
    monkeypatch.setenv("AP_SEARCH_DEBUG", "1")
    api.outcome = ZeroDivisionError("division by zero")
    assert main(JOB) == 70
    assert "Traceback" in capsys.readouterr().err


def test_interrupted_is_one_line(api, capsys):
    api.outcome = KeyboardInterrupt()
    assert main(JOB) == 130
    assert capsys.readouterr().err == "ap-search: interrupted\n"


@pytest.mark.parametrize(
    ("command", "word"), [("models", "made-up-moe"), ("clusters", "Gbit/s"), ("software", "as most do")]
)
def test_presets_are_listed(api, capsys, command, word):
    assert main([command]) == 0
    assert word in capsys.readouterr().out


def test_presets_take_no_job(refused):
    assert refused("models", "--devices", "8") == ["--devices: unknown flag"]


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ap-search {__version__}\n"


def test_help_teaches_axes_values_defaults_and_codes(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (*SETTABLE, *SHARDING_VALUES, *DISPATCHER_VALUES, *SCHEDULE_VALUES, *RECOMPUTE_MODULES):
        assert word in text
    for word in ("h100-sxm", "(1024)", "(4096)", "(10)", "examples:", "exit codes: 0", "estimate", "clusters"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("command", ["estimate", "calibrate", "models", "clusters", "software"])
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: ap-search {command} [flags]")


def test_choices_are_those_of_the_job():
    legal = {"precision": tuple(Precision), "placement": tuple(PlacementPolicy), "target": tuple(Target), "only": ONLY}
    legal["dtype"] = DTYPES
    assert legal | {"leave_out": LEAVE_OUT} == CHOICES


def test_colours_need_a_terminal_and_respect_no_color(api, capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(JOB) == 0
    assert "\x1b[" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(JOB) == 0
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(JOB) == 0
    assert "\x1b[" not in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal_only_and_never_on_stdout(api, capsys, monkeypatch):
    def search(*, progress, **_):
        progress("pricing [plans]", 0.5)
        return found()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(api, "search", search)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main([*JOB, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert "pricing [plans]" in captured.err
    assert json.loads(captured.out) == found().to_json()


def test_help_loads_neither_numpy_nor_the_solver():
    heavy = "numpy pydantic ortools yaml rich"
    code = f"import sys, ap_search.cli as c; c.main(['--help']); print(set('{heavy}'.split()) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "ap_search", "--help"], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_ascii_terminal_gets_ascii(monkeypatch):
    code = "from ap_search.cli import _emit; _emit('\\u00e9\\n')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert done.stdout == b"\\xe9\n"


def test_functions_are_found_although_a_package_shares_a_name(api):
    from ap_search import search  # noqa: PLC0415

    assert callable(search)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ap_search.nothing  # noqa: B018
