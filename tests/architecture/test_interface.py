"""The flags of the command line are the documented ones, and the arguments of the Python functions are the flags."""

import argparse
import inspect
import re

import pytest

from ap_search import api, cli, cli_flags
from tests.architecture.source import ROOT

GUIDE = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
PLANS = (ROOT / "docs" / "guides" / "plans.md").read_text(encoding="utf-8")


def _documented() -> dict[str, tuple[str | None, str]]:
    """Flag -> its placeholder (None for a switch) and default, from the table under `Flags`."""
    section = re.search(r"^## Flags\n(.*?)^## ", GUIDE, re.MULTILINE | re.DOTALL)
    assert section
    found = {}
    for row in re.findall(r"^\| (`--.*) \|$", section[1], re.MULTILINE):
        cells = [cell.strip() for cell in row.split(" | ")]
        for flag, placeholder in re.findall(r"`(--[a-z-]+)(?: ([^`]+))?`", cells[0]):
            found[flag] = (placeholder or None, cells[-1])
    return found


def _actions(command: str) -> dict[str, argparse.Action]:
    """Flags of one command's parser, help and version left out."""
    parser = cli._build_parser(command)
    flags = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    return {flag: action for flag, action in flags.items() if flag not in ("--help", "--version")}


def test_flags_of_a_search_are_the_documented_ones() -> None:
    """Same flags, same placeholders."""
    documented = {flag: placeholder for flag, (placeholder, _) in _documented().items()}
    assert {flag: action.metavar for flag, action in _actions("").items()} == documented


def test_estimate_takes_the_same_flags_and_a_plan() -> None:
    """`--plan` is the only flag more, and is shown beside the command."""
    assert set(_actions("estimate")) == {*_actions(""), "--plan"}
    assert "ap-search estimate --model M --devices N --plan P" in GUIDE


@pytest.mark.parametrize(
    ("command", "title"), [("validate", "Recorded runs: validate"), ("calibrate", "Constants of your own: calibrate")]
)
def test_flags_of_commands_on_runs_are_the_documented_ones(command: str, title: str) -> None:
    """Same flags, same placeholders, in the command's section."""
    section = re.search(rf"^## {title}\n(.*?)^## ", GUIDE, re.MULTILINE | re.DOTALL)
    assert section
    cells = [row.split(" | ")[0] for row in re.findall(r"^\| (`--.*) \|$", section[1], re.MULTILINE)]
    documented = [found for cell in cells for found in re.findall(r"`(--[a-z-]+)(?: ([^`]+))?`", cell)]
    written = {flag: placeholder or None for flag, placeholder in documented}
    assert {flag: action.metavar for flag, action in _actions(command).items()} == written


def test_flags_of_verify_are_the_documented_ones() -> None:
    """Same flags, same placeholders, same defaults; and the function takes them."""
    section = re.search(r"^## Executed plans: verify\n(.*?)^## ", GUIDE, re.MULTILINE | re.DOTALL)
    assert section
    rows = [row.split(" | ") for row in re.findall(r"^\| (`--.*) \|$", section[1], re.MULTILINE)]
    actions = _actions("verify")
    written = {}
    for first, _, said in rows:
        for flag, placeholder in re.findall(r"`(--[a-z-]+)(?: ([^`]+))?`", first):
            written[flag] = placeholder or None
            default = actions[flag].default
            assert said.strip("`") == default or default in (None, False), flag
    assert {flag: action.metavar for flag, action in actions.items()} == written
    parameters = set(inspect.signature(api.verify).parameters) - {"progress"}
    assert parameters == {flag.removeprefix("--").replace("-", "_") for flag in actions} - {"json"}


def test_defaults_are_the_documented_ones() -> None:
    """A default that the parser has stands in the table's last column."""
    for flag, (_, said) in _documented().items():
        default = _actions("")[flag].default
        if isinstance(default, bool):
            assert (said, default) == ("off", False), flag
        elif default is not None:
            assert said.strip("`") == default, flag


def test_commands_are_the_documented_ones() -> None:
    """Every command has its line in the guide."""
    first = GUIDE.split("## Flags")[0]
    documented = set(re.findall(r"\b(estimate|validate|calibrate|verify|[a-z]+(?= \||  +list| +list))\b", first))
    assert set(filter(None, cli.ACTIONS)) == documented


@pytest.mark.parametrize(
    ("function", "command", "more"), [(api.search, "", {"progress"}), (api.estimate, "estimate", set())]
)
def test_arguments_of_the_functions_are_the_flags(function: object, command: str, more: set[str]) -> None:
    """`--seq-len` is `seq_len`; `--json` and, for one plan, `--top` mean nothing in Python."""
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    flags = {flag.removeprefix("--").replace("-", "_") for flag in _actions(command)} - {"json"}
    flags -= {"top"} if command == "estimate" else set()
    assert set(parameters) - more == flags
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_arguments_of_validate_are_its_flags() -> None:
    """Either the flags that choose runs, or those that describe the run of a log."""
    for function, names in ((api.validate, cli.ONLY_RUNS), (api.validate_log, cli.LOG_FACTS)):
        first, *others = inspect.signature(function).parameters
        assert first in ("files", "log")
        assert set(others) - {"progress"} == {*names, "software"}
    assert {"runs", *cli.NOT_ARGUMENTS, *cli_flags.FILE_FLAGS, "megatron_log", "software"}.isdisjoint(cli.ONLY_RUNS)


def test_arguments_of_calibrate_are_its_flags() -> None:
    """As for `validate`; `fit` says in Python what the two files to write say on the command line."""
    more = {"software", "fit", "date", "progress"}
    for function, first, names in (
        (api.calibrate, "files", {*cli.RUN_CHOICES, "cluster", "leave_out"}),
        (api.calibrate_log, "log", set(cli.LOG_FACTS)),
    ):
        argument, *others = inspect.signature(function).parameters
        assert argument == first
        assert set(others) == names | more


def test_axes_and_knobs_are_the_documented_ones() -> None:
    """What `--set` and `--plan` take is listed in both guides and in the help."""
    from ap_search.plan.text import PLAN_KEYS, SETTABLE  # noqa: PLC0415

    assert f"`{' '.join(SETTABLE)}`" in GUIDE
    tables = set(re.findall(r"^\| `([a-z_]+)`", PLANS, re.MULTILINE))
    assert set(PLAN_KEYS) <= tables
    assert set(PLAN_KEYS) <= set(re.findall(r"[a-z_]+", cli_flags.AXES_AND_EXIT_CODES))


def test_exit_codes_are_the_documented_ones() -> None:
    """Every code that the command line returns has its row."""
    rows = re.findall(r"^\| ([0-9, ]+) \|", GUIDE, re.MULTILINE)
    documented = {int(code) for row in rows for code in row.split(",")}
    codes = {
        cli.FOUND,
        cli.NOTHING_FEASIBLE,
        cli.BAD_INPUT,
        cli.INTERNAL_ERROR,
        cli.INTERRUPTED,
        cli.READER_LEFT,
    }
    assert codes == documented
