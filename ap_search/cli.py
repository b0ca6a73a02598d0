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
from typing import TYPE_CHECKING, Any, NoReturn

from ap_search.errors import Fault, SpecError
from ap_search.version import __version__

if TYPE_CHECKING:
    from ap_search.result import SearchResult

# The machinery of an answer (numpy, pydantic, the solver) is imported inside the actions: --help waits for none of it.
# ruff: noqa: PLC0415

FOUND, NOTHING_FEASIBLE, BAD_INPUT, INTERNAL_ERROR, INTERRUPTED, READER_LEFT = 0, 1, 2, 70, 130, 141

MAX_WIDTH = 120
MIN_WIDTH = 80

HIGHEST = {"devices": 1_048_576, "global_batch": 16_777_216, "seq_len": 16_777_216, "top": 1_000_000}
LOWEST_GIB = {"memory_limit_gib": "above 0", "reserve_gib": "0"}
HIGHEST_GIB = 1_000_000
CHOICES = {
    "precision": ("bf16", "fp8", "mxfp8"),
    "target": ("any", "megatron", "torchtitan", "hyperparallel", "deepspeed"),
}
REQUIRED = {
    "model": "a preset's name (see ap-search models), a YAML, or a Hugging Face config.json",
    "devices": "",
    "plan": '"tp=2,pp=4,ep=8", or a plan\'s name as printed',
}

# Flag, placeholder, default, help.
JOB_FLAGS: tuple[tuple[str, str, str | None, str], ...] = (
    ("--model", "M", None, "preset name, YAML, or Hugging Face config.json (required)"),
    ("--devices", "N", None, "devices of the whole job (required)"),
    ("--cluster", "C", "h100-sxm", "preset name or YAML (h100-sxm, 8 devices per node)"),
    ("--global-batch", "B", None, "sequences per step (1024)"),
    ("--seq-len", "S", None, "tokens per sequence (4096)"),
    ("--precision", "P", None, "of the linear layers: bf16 fp8 mxfp8 (bf16)"),
    ("--set", "AXIS=V[,V...]", None, "fix an axis or knob, or give its candidates; repeatable"),
    ("--memory-limit-gib", "X", None, "GiB that one device may hold (the cluster's usable memory)"),
    ("--reserve-gib", "Y", None, "GiB of it kept free for context and communicators (the cluster's)"),
    ("--software", "S", "default", "profile of the trainer's software: what is fused and overlapped (default)"),
    ("--load", "L", "balanced", "tokens per expert: balanced, zipf:A, or a histogram in YAML/JSON/CSV/NPY (balanced)"),
    ("--target", "T", "any", "framework that must run the plan: any megatron torchtitan hyperparallel deepspeed (any)"),
    ("--top", "K", "10", "plans shown (10)"),
    ("--json", "PATH", None, "write the machine-readable result to PATH; with - alone on stdout"),
)
PLAN_FLAG = ("--plan", "PLAN", None, "the plan: axes and knobs, or a name as printed (required)")

AXES_AND_EXIT_CODES = """
axes and knobs of --set and --plan:
  tp           tensor parallel: splits heads and matrix widths
  cp           context parallel: splits the sequence
  pp, vpp      pipeline stages; virtual stages (model chunks) on each
  dp           data parallel: replicas of the dense layers; devices = dp*cp*tp*pp
  ep, etp      expert parallel; tensor parallel inside experts; devices = edp*ep*etp*pp
  mbs          sequences per micro-batch
  sharding     none | zero1 | zero2 | zero3 | hsdp
  recompute    none | full | selective:a+b
               of core_attn moe_act layernorm mla_up_proj mlp moe shared_experts
  dispatcher   allgather | alltoall | deepep | hybridep
  schedule     1f1b | interleaved | gpipe | zb_h1 | dualpipe
only in --plan:
  sp           0 switches sequence parallelism off (on where tp > 1)
  stage_layers layers per stage, such as 8x5+7x3; by default as even as they divide

exit codes: 0 found or feasible, 1 nothing feasible, 2 bad input (one line per fault on stderr)
"""

ABOUT = {
    "": """\
Which parallel strategy should train this model on this cluster? Prices every legal plan
in seconds and GiB, ranks them, and says why the others fell out.

commands:
  ap-search --model M --devices N       search (needs no more than this)
  ap-search estimate ... --plan PLAN    price one plan, feasible or not
  ap-search models                      list model presets
  ap-search clusters                    list cluster presets
  ap-search software                    list software profiles""",
    "estimate": """\
Price one plan, feasible or not. Axes left out are 1 (etp included); dp, edp and the number of
micro-batches follow. Knobs left out: mbs=1, sharding=zero1, recompute=none, dispatcher=alltoall,
schedule=1f1b (interleaved when vpp > 1).""",
    "models": "List the model presets: parameters in all and active for one token, layers, experts.",
    "clusters": "List the cluster presets: a device's memory and peak, its network in and beyond the scale-up domain.",
    "software": "List the profiles of trainers' software: what is fused, overlapped, captured in graphs.",
}
EXAMPLES = {
    "": """\
examples:
  ap-search --model deepseek-v3 --devices 256
  ap-search --model my/config.json --devices 512 --cluster h200-sxm --global-batch 4096 --seq-len 8192
  ap-search --model mixtral-8x7b --devices 64 --set ep=4,8 --set recompute=none --json result.json
"""
    + AXES_AND_EXIT_CODES,
    "estimate": """\
examples:
  ap-search estimate --model mixtral-8x7b --devices 64 --plan "tp=2,pp=4,ep=8"
  ap-search estimate --model deepseek-v3 --devices 256 --plan "pp=8,ep=32,dispatcher=deepep" --json -
"""
    + AXES_AND_EXIT_CODES,
}


class _Parser(argparse.ArgumentParser):
    """Raises `SpecError` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message, `argument --x: reason`, into a fault."""
        named = re.fullmatch(r"argument (--[a-z-]+): (.*)", message)
        if named is None:
            raise SpecError("arguments", message)
        raise SpecError(named[1], named[2], _legal(named[1].removeprefix("--").replace("-", "_")))


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
        raise SpecError(repr(command), "unknown command" + _did_you_mean(command, ACTIONS), legal)
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
        usage=f"ap-search {command + ' ' if command else ''}[flags]",
        description=ABOUT[command],
        epilog=EXAMPLES.get(command),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=_screen_width()
        ),
        allow_abbrev=False,
        add_help=False,
    )
    plan = (PLAN_FLAG,) if command == "estimate" else ()
    for flag, placeholder, default, text in (*plan, *(JOB_FLAGS if command in EXAMPLES else ())):
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
    return _answer(result, flags.json, render_search)


def _estimate(flags: argparse.Namespace, faults: list[Fault]) -> int:
    """Price one plan; how many plans to show means nothing here."""
    arguments = _job_arguments(flags, faults)
    del arguments["top"]
    from ap_search import api
    from ap_search.report.terminal import render_estimate

    return _answer(api.estimate(**arguments), flags.json, render_estimate)


def _answer(result: "SearchResult", target: str | None, write: Callable[..., str]) -> int:
    """Put the answer where it was asked for."""
    if target == "-":
        _emit(result.to_json_text())
    else:
        text = write(result, **_screen())
        if target is not None:
            from ap_search.report.json_file import write_target

            write_target(target, result.to_json_text())
        _emit(text)
    return FOUND if result.feasible else NOTHING_FEASIBLE


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
    "models": _presets,
    "clusters": _presets,
    "software": _presets,
}


def _job_arguments(flags: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Turn flags into the arguments of the Python functions, or raise all faults at once."""
    given = {name: value for name, value in vars(flags).items() if name not in ("command", "help", "version")}
    found = [*faults, *_missing_faults(given, " ".join(fault.reason for fault in faults))]
    for name, value in given.items():
        try:
            given[name] = _read(name, value)
        except SpecError as error:
            found += error.faults
    _raise_any(found)
    del given["json"]
    return given


def _missing_faults(given: dict[str, Any], corrected: str) -> list[Fault]:
    """Name each required flag that is neither given nor what an unknown flag probably meant."""
    return [
        Fault(path=_flag(name), reason="required", legal=_legal(name))
        for name in REQUIRED
        if name in given and given[name] is None and f"{_flag(name)}?" not in corrected
    ]


def _read(name: str, value: Any) -> Any:
    """Read one flag's text as the value that it stands for."""
    if value is None:
        return None
    if name == "json" and value != "-":
        from ap_search.report.json_file import check_target

        check_target(value)
    elif name in HIGHEST:
        return _integer(name, value)
    elif name in LOWEST_GIB:
        return _gib(name, value)
    elif value == "" or (name in CHOICES and value not in CHOICES[name]):
        near = _did_you_mean(value, CHOICES.get(name, ()))
        raise SpecError(_flag(name), f"got {value!r}{near}", _legal(name))
    return "".join(value.split()) if name == "plan" else value  # a long name is printed, and pasted, in several lines


def _integer(name: str, text: str) -> int:
    """Read an integer from 1 to the flag's bound."""
    if not re.fullmatch("[0-9]{1,12}", text) or not 1 <= int(text) <= HIGHEST[name]:
        raise SpecError(_flag(name), f"got {text!r}", _legal(name))
    return int(text)


def _gib(name: str, text: str) -> float:
    """Read a size in GiB within the flag's bounds."""
    number = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text)
    if not number or float(text) > HIGHEST_GIB or (float(text) == 0 and LOWEST_GIB[name] != "0"):
        raise SpecError(_flag(name), f"got {text!r}", _legal(name))
    return float(text)


def _legal(name: str) -> str:
    """Say what a flag takes, or nothing where its file or preset is judged later."""
    if name in HIGHEST:
        return f"an integer from 1 to {HIGHEST[name]}"
    if name in LOWEST_GIB:
        return f"GiB, {LOWEST_GIB[name]} to {HIGHEST_GIB}"
    return REQUIRED.get(name, "") or " ".join(CHOICES.get(name, ()))


def _unknown_faults(rest: Sequence[str], flags: argparse.Namespace) -> list[Fault]:
    """Name each flag that does not exist with the nearest that does; its value is no fault of its own."""
    known = [_flag(name) for name in vars(flags) if name != "command"]
    faults = []
    for before, argument in zip(("", *rest), rest, strict=False):
        if argument.startswith("-"):
            flag = argument.split("=")[0]
            elsewhere = ", it belongs to: ap-search estimate" if flag == PLAN_FLAG[0] else ""
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
    flags = {_flag for _flag, *_ in (*JOB_FLAGS, PLAN_FLAG)}
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
