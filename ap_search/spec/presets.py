"""Presets: data files that ship with the package and resolve by name from any folder."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ap_search.errors import SpecError
from ap_search.spec.reader import nearest

_SUFFIXES = (".yaml", ".yml", ".json")
T = TypeVar("T")
_PACKAGE = Path(__file__).resolve().parents[1]


@lru_cache(maxsize=1)
def _root() -> Path:
    """Find the `configs` folder: inside the package when installed, beside it in a checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


@lru_cache(maxsize=8)
def _presets(kind: str) -> dict[str, Path]:
    """Presets of one kind by lower-case name."""
    folder = _root() / kind
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.stem.lower(): path for path in found if path.suffix in _SUFFIXES}


def preset_names(kind: str) -> tuple[str, ...]:
    """Names of all presets of a kind (`models`, `clusters`, `software`, `jobs`), in alphabetical order."""
    return tuple(path.stem for path in _presets(kind).values())


def locate(kind: str, name_or_path: str | Path) -> Path:
    """Find the file that a user means by a preset's name or a path.

    Parameters
    ----------
    kind : str
        `models`, `clusters`, `software` or `jobs`.
    name_or_path : str or Path
        A preset's whole name in any case (deepseek-v2 is not deepseek-v2-lite), or a path. A path
        `configs/<kind>/<preset>.yaml` that does not exist from the current folder means that preset, so that the
        documented commands work outside a checkout.

    Returns
    -------
    Path
        A path that exists, or that the reader will refuse with its own reason (a folder, say).

    Raises
    ------
    SpecError
        When nothing matches: names the nearest presets, or all of them.
    """
    given = str(name_or_path)
    found = _presets(kind).get(given.strip().lower()) if isinstance(name_or_path, str) else None
    if found:
        return found
    path = Path(given)
    if given and "\0" not in given and _exists(path):
        return path
    shipped = _shipped(kind, path)
    if shipped:
        return shipped
    names = preset_names(kind)
    close = nearest(path.stem.lower(), names)
    what = "there is no such file" if path.suffix in _SUFFIXES else "is neither a preset nor a file"
    raise SpecError(given or "''", what, ", ".join(close or names))


def _exists(path: Path) -> bool:
    """Whether a path exists; one too long or malformed to ask for does not."""
    try:
        return path.exists()
    except OSError:
        return False


def remembered(kind: str, load: Callable[[str | Path], T]) -> Callable[[str | Path], T]:
    """Make a reader that reads a preset or a file once, and anew where the file has changed since.

    Parameters
    ----------
    kind : str
        As for `locate`.
    load : callable
        Reads what a name or a path stands for.

    Returns
    -------
    callable
    """

    @lru_cache(maxsize=256)
    def once(source: str | Path, _path: Path, _changed: tuple[int, int]) -> T:
        return load(source)

    def loaded(source: str | Path) -> T:
        path = locate(kind, source).resolve()
        now = path.stat()
        return once(source, path, (now.st_mtime_ns, now.st_size))

    return loaded


def _shipped(kind: str, path: Path) -> Path | None:
    """Find the preset that a path into a checkout's `configs/<kind>` names."""
    if path.suffix in _SUFFIXES and path.parts[-3:-1] == ("configs", kind):
        return _presets(kind).get(path.stem.lower())
    return None
