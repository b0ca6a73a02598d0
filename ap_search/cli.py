"""The command line: flags in, an answer on stdout, an exit code; nothing is computed here."""

import argparse
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any, NoReturn

from ap_search.cli_flags import ABOUT, EXAMPLES, FILE_FLAGS, FLAGS
from ap_search.cli_values import did_you_mean, flag_of, legal_text, missing_faults, raise_any, read_all
from ap_search.errors import Fault, RunFailed, SpecError
from ap_search.version import __version__

if TYPE_CHECKING:
    from ap_search.fidelity.records import ValidationResult
    from ap_search.result import SearchResult
    from ap_search.result.verification import Verification

# The machinery of an answer (numpy, pydantic, the solver) is imported inside the actions: --help waits for none of it.
# ruff: noqa: PLC0415

FOUND, NOTHING_FEASIBLE, BAD_INPUT, INTERNAL_ERROR, INTERRUPTED, READER_LEFT = 0, 1, 2, 70, 130, 141

MAX_WIDTH = 120
MIN_WIDTH = 80
NOT_ARGUMENTS = ("command", "help", "version", "template", "summary")
# Flags of `validate` that choose recorded runs, and those that describe the run of a log.
RUN_CHOICES = ("quality", "hardware", "group", "only", "source")
ONLY_RUNS = (*RUN_CHOICES, "best_plans")
LOG_FACTS = ("model", "devices", "plan", "cluster", "global_batch", "seq_len", "precision")


class _Parser(argparse.ArgumentParser):
    """Raises `SpecError` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message, `argument --x: reason`, into a fault."""
        named = re.fullmatch(r"argument (--[a-z-]+): (.*)", message)
        if named is None:
            raise SpecError("arguments", message)
        raise SpecError(named[1], named[2], legal_text(named[1].removeprefix("--").replace("-", "_")))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the process's own by default.

    Returns
    -------
    int
        0 found or feasible, 1 nothing feasible, 2 bad input, 70 a bug of ours, 130 interrupted, 141 the reader of
        stdout left.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except SpecError as error:
        for fault in error.faults:
            _complain(f"error: {_in_flags(fault)}")
        return BAD_INPUT
    except RunFailed as error:
        print(error.trace, file=sys.stderr, end="")
        _complain(f"error: {error}")
        return INTERNAL_ERROR
    except BrokenPipeError:
        _silence_stdout()
        return READER_LEFT
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("AP_SEARCH_DEBUG"):
            traceback.print_exc()
        what = " ".join(f"{type(error).__name__}: {error}".split())
        _complain(f"internal error: {what}; please report it (AP_SEARCH_DEBUG=1 shows the traceback)")
        return INTERNAL_ERROR


def _run(argv: list[str]) -> int:
    """Find the command, read its flags, act."""
    command = argv.pop(0) if argv and not argv[0].startswith("-") else ""
    if command not in ACTIONS:
        legal = f"{', '.join(filter(None, ACTIONS))}, or only flags for a search"
        raise SpecError(repr(command), "unknown command" + did_you_mean(command, ACTIONS), legal)
    parser = _build_parser(command)
    flags, rest = parser.parse_known_args(argv)
    if flags.help or flags.version:
        _emit(parser.format_help() if flags.help else f"ap-search {__version__}\n")
        return FOUND
    return ACTIONS[command](flags, _unknown_faults(rest, flags))


def _build_parser(command: str) -> _Parser:
    """Describe the flags of one command; values stay text, so that all their faults are found at once."""
    parser = _Parser(
        prog=f"ap-search {command}".rstrip(),
        usage=f"ap-search {command + ' ' if command else ''}{'[RUNS ...] ' if command == 'validate' else ''}[flags]",
        description=ABOUT[command],
        epilog=EXAMPLES.get(command),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=_screen_width()
        ),
        allow_abbrev=False,
        add_help=False,
    )
    if command == "validate":
        parser.add_argument("runs", metavar="RUNS", nargs="*", help="files of recorded runs, YAML, JSON or JSONL")
    for flag, placeholder, default, text in FLAGS.get(command, ()):
        if not placeholder:
            parser.add_argument(flag, action="store_true", help=text)
        elif flag == "--runs":
            parser.add_argument(flag, metavar=placeholder, action="extend", nargs="+", help=text)
        else:
            action = "append" if flag == "--set" else "store"
            parser.add_argument(flag, metavar=placeholder, default=default, action=action, help=text)
    parser.set_defaults(command=command)
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--version", action="store_true", help="show the version")
    return parser


def _search(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Search, and answer with the ranking or with the reasons why nothing fits."""
    arguments = _job_arguments(flags, faults)
    from ap_search import api
    from ap_search.report.progress import shown_progress
    from ap_search.report.terminal import render_search

    with shown_progress() as progress:
        result = api.search(**arguments, progress=progress)
    return _answer(result, flags.json, render_search, code=FOUND if result.feasible else NOTHING_FEASIBLE)


def _estimate(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Price one plan; how many plans to show means nothing here."""
    arguments = _job_arguments(flags, faults)
    del arguments["top"]
    from ap_search import api
    from ap_search.report.terminal import render_estimate

    result = api.estimate(**arguments)
    return _answer(result, flags.json, render_estimate, code=FOUND if result.feasible else NOTHING_FEASIBLE)


def _answer(result: "SearchResult | Verification", target: str | None, write: Callable[..., str], *, code: int) -> int:
    """Put the answer where it was asked for."""
    if target not in (None, "-"):
        from ap_search.report.json_file import write_target

        write_target(str(target), result.to_json_text())
    _emit(result.to_json_text() if target == "-" else write(result, **_screen()))
    return code


def _validate(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Price recorded runs, or the run of a log, and set what was measured beside."""
    if flags.template:
        raise_any(faults)
        from ap_search.spec.run_file import TEMPLATE

        _emit(TEMPLATE)
        return FOUND
    asked = _validate_arguments(flags, faults)
    from ap_search import api
    from ap_search.report.json_file import json_text
    from ap_search.report.progress import shown_progress
    from ap_search.report.validation import render_validation

    with shown_progress() as progress:
        result = api.validate_log(**asked) if "log" in asked else api.validate(**asked, progress=progress)
    _write_validation(flags, result)
    rows = not flags.summary
    _emit(json_text(result.to_json()) if flags.json == "-" else render_validation(result, **_screen(), rows=rows))
    return FOUND if result.summary.priced else NOTHING_FEASIBLE


def _write_validation(flags: argparse.Namespace, result: "ValidationResult") -> None:
    """Write the files that were asked for: plot, tables, JSON."""
    from ap_search.report.json_file import json_text, write_target
    from ap_search.report.plot import plot_page
    from ap_search.report.validation_markdown import markdown_tables

    if flags.plot is not None:
        write_target(flags.plot, plot_page(result), "--plot")
    if flags.markdown is not None:
        chosen = [f"--{name} {getattr(flags, name)}" for name in (*RUN_CHOICES, "software") if getattr(flags, name)]
        chosen += ["--best-plans"] if flags.best_plans else []
        command = " ".join(["ap-search validate", *flags.runs, *chosen])
        tables = markdown_tables(result, date=date.today().isoformat(), command=command)
        write_target(flags.markdown, tables, "--markdown")
    if flags.json not in (None, "-"):
        write_target(flags.json, json_text(result.to_json()))


def _validate_arguments(flags: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Turn flags into the arguments of `validate`, or of `validate_log` where a log is given."""
    given = {name: value for name, value in vars(flags).items() if name not in NOT_ARGUMENTS}
    given["best_plans"] = flags.best_plans or None
    log, runs = given.pop("megatron_log"), given.pop("runs")
    alien, why = (ONLY_RUNS, "has no effect on a log") if log else (LOG_FACTS, "belongs to --megatron-log")
    found = [*faults, *(Fault(path=flag_of(name), reason=why) for name in alien if given[name] is not None)]
    if log and runs:
        found.append(Fault(path=runs[0], reason="files of runs and --megatron-log exclude each other"))
    found += missing_faults(given, "") if log else []
    read = read_all(given, found)
    asked = {name: value for name, value in read.items() if value is not None and name not in (*alien, *FILE_FLAGS)}
    return asked | ({"log": log} if log else {"files": runs})


def _calibrate(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Fit constants on recorded runs, or the level on a log, and write the files that were asked for."""
    asked = _calibrate_arguments(flags, faults)
    from ap_search import api
    from ap_search.report.calibration import render_calibration
    from ap_search.report.json_file import json_text, write_target
    from ap_search.report.progress import shown_progress

    with shown_progress() as progress:
        fitted = api.calibrate_log if "log" in asked else api.calibrate
        result = fitted(**asked, progress=progress)
    for target, text, flag in (
        (flags.out, result.cluster_text, "--out"),
        (flags.software_out, result.software_text, "--software-out"),
    ):
        if target is not None and text:
            write_target(target, text, flag)
    if flags.json not in (None, "-"):
        write_target(flags.json, json_text(result.to_json()))
    _emit(json_text(result.to_json()) if flags.json == "-" else render_calibration(result, **_screen()))
    return FOUND if result.adopted else NOTHING_FEASIBLE


def _calibrate_arguments(flags: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Turn flags into the arguments of `calibrate`, or of `calibrate_log` where a log is given."""
    given = {name: value for name, value in vars(flags).items() if name not in NOT_ARGUMENTS}
    log, runs = given.pop("megatron_log"), given.pop("runs")
    described = [name for name in LOG_FACTS if name != "cluster"]
    alien, why = (RUN_CHOICES, "has no effect on a log") if log else (described, "belongs to --megatron-log")
    found = [*faults, *(Fault(path=flag_of(name), reason=why) for name in alien if given[name] is not None)]
    if bool(log) == bool(runs):
        found.append(Fault(path="--runs", reason="give files of runs, or --megatron-log", legal="one of both"))
    found += missing_faults(given, "") if log else []
    if given["out"] is not None and given["out"] == given["software_out"]:
        found.append(Fault(path="--software-out", reason="is the file of --out", legal="another file"))
    read = read_all(given, found)
    written = [home for home, flag in (("cluster", "out"), ("software", "software_out")) if read[flag] is not None]
    ignored = (*alien, *FILE_FLAGS, *(["leave_out"] if log else []))
    asked = {name: value for name, value in read.items() if value is not None and name not in ignored}
    asked |= {"date": date.today().isoformat()} if "date" not in asked else {}
    return asked | {"fit": written or ["cluster", "software"]} | ({"log": log} if log else {"files": runs})


def _verify(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Execute a plan, and answer with every check; of torchrun's processes the first one speaks."""
    arguments = _job_arguments(flags, faults)
    from ap_search import api
    from ap_search.report.progress import shown_progress
    from ap_search.report.verification import render_verification

    with shown_progress() as progress:
        result = api.verify(**arguments, progress=progress)
    from ap_search.runtime.launch import under_torchrun

    # Other launchers set RANK too: only where all processes share one run has another of them answered.
    silent = under_torchrun() and os.environ["RANK"] != "0"
    code = FOUND if result.ok else NOTHING_FEASIBLE
    return code if silent else _answer(result, flags.json, render_verification, code=code)


def _presets(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """List the presets that the command names."""
    raise_any(faults)
    from ap_search import api
    from ap_search.report import listing

    if flags.command == "models":
        _emit(listing.render_models(api.list_models(), **_screen()))
    elif flags.command == "clusters":
        _emit(listing.render_clusters(api.list_clusters(), **_screen()))
    else:
        _emit(listing.render_software(api.list_software(), **_screen()))
    return FOUND


ACTIONS: dict[str, Callable[[argparse.Namespace, list[Fault]], int]] = {
    "": _search,
    "estimate": _estimate,
    "validate": _validate,
    "calibrate": _calibrate,
    "verify": _verify,
    "models": _presets,
    "clusters": _presets,
    "software": _presets,
}


def _job_arguments(flags: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Turn flags into the arguments of the Python functions, or raise all faults at once."""
    given = {name: value for name, value in vars(flags).items() if name not in NOT_ARGUMENTS}
    read = read_all(given, [*faults, *missing_faults(given, " ".join(fault.reason for fault in faults))])
    del read["json"]
    return read


def _unknown_faults(rest: Sequence[str], flags: argparse.Namespace) -> list[Fault]:
    """Name each flag that does not exist with the nearest that does; its value is no fault of its own."""
    known = [flag_of(name) for name in vars(flags) if name not in ("command", "runs")]
    faults = []
    for before, argument in zip(("", *rest), rest, strict=False):
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            elsewhere = ", it belongs to: ap-search estimate" if flag == "--plan" else ""
            faults.append(Fault(path=flag, reason="unknown flag" + (elsewhere or did_you_mean(flag, known))))
        elif not before.startswith("-") or "=" in before:
            faults.append(Fault(path=argument, reason="unexpected argument"))
    return faults


def _in_flags(fault: Fault) -> Fault:
    """Call an argument of the Python functions what the user of the command line calls it."""
    flags = {flag for flag, *_ in (*FLAGS["estimate"], *FLAGS["calibrate"], *FLAGS["validate"], *FLAGS["verify"])}
    return replace(fault, path=flag_of(fault.path)) if flag_of(fault.path) in flags else fault


def _screen_width() -> int:
    """Columns to write: the terminal's, 120 at most; 120 where stdout is not a terminal."""
    if not _is_terminal():
        return MAX_WIDTH
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns))


def _screen() -> dict[str, Any]:
    """Say how wide to write, and whether with colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return {"width": _screen_width(), "styled": _is_terminal() and not plain}


def _is_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout is not None and sys.stdout.isatty()


def _emit(text: str) -> None:
    """Write to stdout at once; characters that it cannot show are spelt out."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


def _complain(line: str) -> None:
    """Write one line to stderr."""
    print(f"ap-search: {line}", file=sys.stderr)


def _silence_stdout() -> None:
    """Point stdout nowhere, so that Python's last flush does not fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
