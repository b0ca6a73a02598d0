"""Writing an answer to a file: whole or not at all."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ap_search.errors import SpecError

FLAG = "--json"


def check_target(target: str, flag: str = FLAG) -> None:
    """Refuse a file that could not be written, before any work is done; faults name the flag.

    Raises
    ------
    SpecError
        If the name is empty or a folder, or its folder is missing or read-only.
    """
    path = Path(target)
    if not target or path.is_dir():
        raise SpecError(flag, f"{target!r} is not a file name", "a file in an existing folder, or - for stdout")
    if not path.parent.is_dir():
        raise SpecError(flag, f"folder {str(path.parent)!r} does not exist", "a file in an existing folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SpecError(flag, f"{target!r} cannot be written (no permission)", "a file in a folder you may write to")


def json_text(answer: Mapping[str, Any]) -> str:
    """Write a JSON object as text that ends with a newline."""
    return json.dumps(answer, indent=2, allow_nan=False) + "\n"


def write_target(target: str, text: str, flag: str = FLAG) -> None:
    """Write a file through a temporary one beside it: readers see the old text or the new, never a part.

    Parameters
    ----------
    target : str
        Path; a device or a pipe is written straight, since it must not be replaced.
    text : str
    flag : str
        Where the name came from, for the error.

    Raises
    ------
    SpecError
        If the system refuses; nothing is left behind.
    """
    path = Path(os.path.realpath(target))
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SpecError(flag, f"{target!r} cannot be written: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then take its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
