"""The command line: flags in, an answer on stdout, an exit code; nothing is computed here."""

import argparse
import difflib
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any, NoReturn

from ap_search.cli_flags import (
    ABOUT,
    CHOICES,
    EXAMPLES,
    FLAGS,
    HIGHEST,
    HIGHEST_FACTOR,
    HIGHEST_GIB,
    LOWEST,
    LOWEST_GIB,
    REQUIRED,
    legal,
)
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
FILE_FLAGS = ("plot", "markdown", "json")
# Flags of `validate` that choose recorded runs, and those that describe the run of a log.
RUN_CHOICES = ("quality", "hardware", "group", "only", "source")
LOG_FACTS = ("model", "devices", "plan", "cluster", "global_batch", "seq_len", "precision")


class _Parser(argparse.ArgumentParser):
    """Raises `SpecError` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message, `argument --x: reason`, into a fault."""
        named = re.fullmatch(r"argument (--[a-z-]+): (.*)", message)
        if named is None:
            raise SpecError("arguments", message)
        raise SpecError(named[1], named[2], legal(named[1].removeprefix("--").replace("-", "_")))


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
        known = f"{', '.join(filter(None, ACTIONS))}, or only flags for a search"
        raise SpecError(repr(command), "unknown command" + _did_you_mean(command, ACTIONS), known)
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
            continue
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
        _raise_any(faults)
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
        command = " ".join(["ap-search validate", *flags.runs, *chosen])
        tables = markdown_tables(result, date=date.today().isoformat(), command=command)
        write_target(flags.markdown, tables, "--markdown")
    if flags.json not in (None, "-"):
        write_target(flags.json, json_text(result.to_json()))


def _validate_arguments(flags: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Turn flags into the arguments of `validate`, or of `validate_log` where a log is given."""
    given = {name: value for name, value in vars(flags).items() if name not in NOT_ARGUMENTS}
    log, runs = given.pop("megatron_log"), given.pop("runs")
    alien, why = (RUN_CHOICES, "has no effect on a log") if log else (LOG_FACTS, "belongs to --megatron-log")
    found = [*faults, *(Fault(path=_flag(name), reason=why) for name in alien if given[name] is not None)]
    if log and runs:
        found.append(Fault(path=runs[0], reason="files of runs and --megatron-log exclude each other"))
    found += _missing_faults(given, "") if log else []
    read = _read_all(given, found)
    asked = {name: value for name, value in read.items() if value is not None and name not in (*alien, *FILE_FLAGS)}
    return asked | ({"log": log} if log else {"files": runs})


def _verify(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Execute a plan, and answer with every check; of torchrun's processes the first one speaks."""
    arguments = _job_arguments(flags, faults)
    from ap_search import api
    from ap_search.report.progress import shown_progress
    from ap_search.report.verification import render_verification

    with shown_progress() as progress:
        result = api.verify(**arguments, progress=progress)
    silent = os.environ.get("RANK", "0") != "0"
    code = FOUND if result.ok else NOTHING_FEASIBLE
    return code if silent else _answer(result, flags.json, render_verification, code=code)


def _presets(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """List the presets that the command names."""
    _raise_any(faults)
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
    "verify": _verify,
    "models": _presets,
    "clusters": _presets,
    "software": _presets,
}


def _job_arguments(flags: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Turn flags into the arguments of the Python functions, or raise all faults at once."""
    given = {name: value for name, value in vars(flags).items() if name not in NOT_ARGUMENTS}
    read = _read_all(given, [*faults, *_missing_faults(given, " ".join(fault.reason for fault in faults))])
    del read["json"]
    return read


def _read_all(given: dict[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Read the text of every flag, or raise all faults at once."""
    found, read = list(faults), {}
    for name, value in given.items():
        try:
            read[name] = _read(name, value)
        except SpecError as error:
            found += error.faults
    _raise_any(found)
    return read


def _missing_faults(given: dict[str, Any], corrected: str) -> list[Fault]:
    """Name each required flag that is neither given nor what an unknown flag probably meant."""
    return [
        Fault(path=_flag(name), reason="required", legal=legal(name))
        for name in REQUIRED
        if name in given and given[name] is None and f"{_flag(name)}?" not in corrected
    ]


def _read(name: str, value: Any) -> Any:
    """Read one flag's text as the value that it stands for."""
    if value is None:
        return None
    if name in FILE_FLAGS and (name, value) != ("json", "-"):
        from ap_search.report.json_file import check_target

        check_target(value, _flag(name))
    elif name in HIGHEST:
        return _integer(name, value)
    elif name in LOWEST_GIB or name in HIGHEST_FACTOR:
        return _decimal(name, value)
    elif value == "" or (name in CHOICES and value not in CHOICES[name]):
        near = _did_you_mean(value, CHOICES.get(name, ()))
        raise SpecError(_flag(name), f"got {value!r}{near}", legal(name))
    return "".join(value.split()) if name == "plan" else value  # a long name is printed, and pasted, in several lines


def _integer(name: str, text: str) -> int:
    """Read an integer within the flag's bounds."""
    if not re.fullmatch("[0-9]{1,12}", text) or not LOWEST.get(name, 1) <= int(text) <= HIGHEST[name]:
        raise SpecError(_flag(name), f"got {text!r}", legal(name))
    return int(text)


def _decimal(name: str, text: str) -> float:
    """Read a size in GiB, or a factor, within the flag's bounds."""
    number = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text)
    highest, lowest = HIGHEST_FACTOR.get(name, HIGHEST_GIB), LOWEST_GIB.get(name, "0")
    if not number or float(text) > highest or (float(text) == 0 and lowest != "0"):
        raise SpecError(_flag(name), f"got {text!r}", legal(name))
    return float(text)


def _unknown_faults(rest: Sequence[str], flags: argparse.Namespace) -> list[Fault]:
    """Name each flag that does not exist with the nearest that does; its value is no fault of its own."""
    known = [_flag(name) for name in vars(flags) if name not in ("command", "runs")]
    faults = []
    for before, argument in zip(("", *rest), rest, strict=False):
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            elsewhere = ", it belongs to: ap-search estimate" if flag == "--plan" else ""
            faults.append(Fault(path=flag, reason="unknown flag" + (elsewhere or _did_you_mean(flag, known))))
        elif not before.startswith("-") or "=" in before:
            faults.append(Fault(path=argument, reason="unexpected argument"))
    return faults


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """Name the nearest known word, if one is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _raise_any(faults: Sequence[Fault]) -> None:
    """Raise the faults, if there are any."""
    if faults:
        raise SpecError.of(faults)


def _flag(name: str) -> str:
    """Spell an argument's name as its flag."""
    return "--" + name.replace("_", "-")


def _in_flags(fault: Fault) -> Fault:
    """Call an argument of the Python functions what the user of the command line calls it."""
    flags = {_flag for _flag, *_ in (*FLAGS["estimate"], *FLAGS["validate"], *FLAGS["verify"])}
    return replace(fault, path=_flag(fault.path)) if _flag(fault.path) in flags else fault


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
