"""Texts of the command line's flags as values: every fault named, none hidden by another."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ap_search.cli_flags import CHOICES, FILE_FLAGS, HIGHEST, HIGHEST_FACTOR, HIGHEST_GIB, LOWEST, LOWEST_GIB, REQUIRED
from ap_search.errors import Fault, SpecError

# The writers of files are imported inside: --help waits for none of it.
# ruff: noqa: PLC0415


def read_all(given: dict[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Read the text of every flag, or raise all faults at once."""
    found, read = list(faults), {}
    for name, value in given.items():
        try:
            read[name] = _read(name, value)
        except SpecError as error:
            found += error.faults
    raise_any(found)
    return read


def missing_faults(given: dict[str, Any], corrected: str) -> list[Fault]:
    """Name each required flag that is neither given nor what an unknown flag probably meant."""
    return [
        Fault(path=flag_of(name), reason="required", legal=legal_text(name))
        for name in REQUIRED
        if name in given and given[name] is None and f"{flag_of(name)}?" not in corrected
    ]


def _read(name: str, value: Any) -> Any:
    """Read one flag's text as the value that it stands for."""
    if value is None:
        return None
    if name in FILE_FLAGS and (name, value) != ("json", "-"):
        from ap_search.report.json_file import check_target

        check_target(value, flag_of(name))
    elif name in HIGHEST:
        return _integer(name, value)
    elif name in LOWEST_GIB or name in HIGHEST_FACTOR:
        return _decimal(name, value)
    elif value == "" or (name in CHOICES and value not in CHOICES[name]):
        near = did_you_mean(value, CHOICES.get(name, ()))
        raise SpecError(flag_of(name), f"got {value!r}{near}", legal_text(name))
    if name == "date" and not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
        raise SpecError(flag_of(name), f"got {value!r}", "YYYY-MM-DD")
    return "".join(value.split()) if name == "plan" else value  # a long name is printed, and pasted, in several lines


def _integer(name: str, text: str) -> int:
    """Read an integer within the flag's bounds."""
    if not re.fullmatch("[0-9]{1,12}", text) or not LOWEST.get(name, 1) <= int(text) <= HIGHEST[name]:
        raise SpecError(flag_of(name), f"got {text!r}", legal_text(name))
    return int(text)


def _decimal(name: str, text: str) -> float:
    """Read a size in GiB, or a factor, within the flag's bounds."""
    number = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", text)
    highest, lowest = HIGHEST_FACTOR.get(name, HIGHEST_GIB), LOWEST_GIB.get(name, "0")
    if not number or float(text) > highest or (float(text) == 0 and lowest != "0"):
        raise SpecError(flag_of(name), f"got {text!r}", legal_text(name))
    return float(text)


def legal_text(name: str) -> str:
    """Say what a flag takes, or nothing where its file or preset is judged later."""
    if name in HIGHEST:
        return f"an integer from {LOWEST.get(name, 1)} to {HIGHEST[name]}"
    if name in HIGHEST_FACTOR:
        return f"a number from 0 to {HIGHEST_FACTOR[name]}"
    if name in LOWEST_GIB:
        return f"GiB, {LOWEST_GIB[name]} to {HIGHEST_GIB}"
    return REQUIRED.get(name, "") or " ".join(CHOICES.get(name, ()))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Name the nearest known word, if one is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


def raise_any(faults: Sequence[Fault]) -> None:
    """Raise the faults, if there are any."""
    if faults:
        raise SpecError.of(faults)


def flag_of(name: str) -> str:
    """Spell an argument's name as its flag."""
    return "--" + name.replace("_", "-")
