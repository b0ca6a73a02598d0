"""Reading one YAML or JSON file safely: every fault becomes one line with the path into the file."""

import difflib
import json
import re
import types
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ap_search.errors import Fault, SpecError
from ap_search.units import MIB

MAX_FILE_BYTES = 4 * MIB
MAX_NESTING = 64

SchemaT = TypeVar("SchemaT", bound=BaseModel)


class _DuplicateKeyError(ValueError):
    """A mapping that names one key twice."""


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader that builds plain values only and refuses aliases, duplicate keys and deep nesting."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one node, refusing what could expand without bound or build more than plain values."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _at(event, "aliases (*name) are not accepted: write the value out")
        if getattr(event, "tag", None) is not None:
            raise _at(event, f"tags ({event.tag}) are not accepted: write a plain value")
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _at(event, f"nested deeper than {MAX_NESTING} levels")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping whose keys are the words as written, each named once."""
        built: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _at(key_node, "a key must be a plain word")
            if key_node.value in built:
                raise _at(key_node, f"key {key_node.value!r} appears twice")
            built[key_node.value] = self.construct_object(value_node, deep=deep)
        return built


def _at(place: Any, problem: str) -> yaml.MarkedYAMLError:
    """Make the error that points at a YAML event or node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


# Text and numbers only: `2024-01-01` stays text, and `<<` is a key like any other.
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge", ":value"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 wants a dot in a float; people (and JSON) write 1e-6.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(path: Path) -> dict[str, object]:
    """Read a YAML or JSON file whose top level is a mapping, without evaluating anything in it.

    Parameters
    ----------
    path : Path
        The file; JSON is recognised by its suffix or by a first character `{`, all else is YAML.

    Returns
    -------
    dict of str to object
        The file's content in plain values: mappings, lists, text, numbers, booleans, None.

    Raises
    ------
    SpecError
        When the file is absent, a folder, empty, larger than 4 MiB, not UTF-8, not well formed, nested deeper than
        64 levels, has a key twice or an alias, or is not a mapping.
    """
    content = read_document(path)
    if not isinstance(content, dict):
        raise SpecError(path.name, f"must be a mapping of keys to values, not {describe(content)}")
    return {str(key): value for key, value in content.items()}


def read_document(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> object:
    """Read a YAML or JSON file of any top level, without evaluating anything in it.

    Parameters
    ----------
    path : Path
        The file; JSON is recognised by its suffix or by a first character `{`, all else is YAML.
    limit_bytes : int
        The largest file that is read, bytes.

    Returns
    -------
    object
        The file's content in plain values: mappings, lists, text, numbers, booleans, None.

    Raises
    ------
    SpecError
        As for `read_mapping`, but that the top level may be anything.
    """
    text = read_text(path, limit_bytes=limit_bytes)
    is_json = path.suffix.lower() == ".json" or text.lstrip()[:1] == "{"
    return _parse_json(text, path.name) if is_json else _parse_yaml(text, path.name)


def read_bytes(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Content of a file up to a limit; nothing of a file over the limit is read.

    Parameters
    ----------
    path : Path
        The file.
    limit_bytes : int
        The largest file that is read, bytes.

    Returns
    -------
    bytes

    Raises
    ------
    SpecError
        When the file is absent, a folder, unreadable or larger than the limit.
    """
    try:
        if path.is_dir():
            raise SpecError(str(path), "is a folder, not a file")
        with path.open("rb") as file:
            raw = file.read(limit_bytes + 1)
            if len(raw) > limit_bytes:
                size_bytes = path.stat().st_size  # 0 for a pipe or device
                shown = f"is {size_bytes / MIB:.1f} MiB" if size_bytes > limit_bytes else "is too large"
                raise SpecError(str(path), shown, f"files up to {limit_bytes // MIB} MiB")
    except FileNotFoundError:
        raise SpecError(str(path), "there is no such file") from None
    except (OSError, ValueError) as error:
        raise SpecError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return raw


def read_text(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> str:
    """Content of a UTF-8 file up to a limit, a byte-order mark left out.

    Parameters
    ----------
    path : Path
        The file.
    limit_bytes : int
        The largest file that is read, bytes.

    Returns
    -------
    str

    Raises
    ------
    SpecError
        As for `read_bytes`, and when the file is empty or not UTF-8.
    """
    raw = read_bytes(path, limit_bytes=limit_bytes)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(str(path), f"is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise SpecError(str(path), "is empty")
    return text


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object, refusing a key named twice."""
    built: dict[str, object] = {}
    for key, value in pairs:
        if key in built:
            raise _DuplicateKeyError(key)
        built[key] = value
    return built


def _parse_json(text: str, where: str) -> object:
    """Parse JSON; `Infinity` and `NaN` are read as floats because published configurations hold them."""
    try:
        content: object = json.loads(text, object_pairs_hook=_unique_pairs)
    except _DuplicateKeyError as error:
        raise SpecError(where, f"key {error.args[0]!r} appears twice") from None
    except json.JSONDecodeError as error:
        raise SpecError(where, f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise SpecError(where, f"is nested deeper than {MAX_NESTING} levels") from None
    except ValueError as error:
        raise SpecError(where, f"is not JSON: {error}") from None
    if _nesting(content) > MAX_NESTING:
        raise SpecError(where, f"is nested deeper than {MAX_NESTING} levels")
    return content


def _nesting(content: object) -> int:
    """Levels of mappings and lists in `content`, counted without recursion up to one past the limit."""
    level, depth = [content], 0
    while level and depth <= MAX_NESTING:
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        level = inner
        depth += 1
    return depth


def _parse_yaml(text: str, where: str) -> object:
    """Parse YAML into plain values."""
    try:
        loader = _StrictLoader(text)
        try:
            content: object = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(where, f"{line}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise SpecError(where, f"is not YAML: {error}") from None
    except (RecursionError, ValueError, TypeError) as error:
        raise SpecError(where, f"is not YAML: {type(error).__name__}: {error}") from None
    return content


def describe(value: object) -> str:
    """Say a value in a few words for an error line."""
    if value is None:
        return "nothing"
    names = {
        bool: "a true/false value",
        str: "text",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "a mapping",
    }
    return f"{names.get(type(value), type(value).__name__)} ({short(value)})"


def short(value: object) -> str:
    """`repr` of a value, cut to a length that fits on one line."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def nearest(word: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Find the known words closest to `word`, best first, at most `count`."""
    return tuple(difflib.get_close_matches(word, list(known), n=count, cutoff=0.5))


def validate(schema: type[SchemaT], data: Mapping[str, object], where: str) -> SchemaT:
    """Check `data` against a pydantic schema and report every fault at once.

    Parameters
    ----------
    schema : type of BaseModel
        The schema at the edge.
    data : mapping of str to object
        What was read.
    where : str
        The input's name, the head of each fault's path: `file.yaml`.

    Returns
    -------
    BaseModel
        An instance of `schema`.

    Raises
    ------
    SpecError
        With one fault per problem: path into the input, reason, legal values; an unknown key names the nearest ones.
    """
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        raise SpecError.of(_fault(schema, detail, where) for detail in error.errors()) from None


def _fault(schema: type[BaseModel], detail: ErrorDetails, where: str) -> Fault:
    """One pydantic error in plain words."""
    keys = [part for part in detail["loc"] if isinstance(part, int) or _is_key(part)]
    path = f"{where}: {_dotted(keys)}" if keys else where
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(schema, keys, path)
    if kind == "missing":
        return Fault(path=path, reason="is required and missing")
    if kind in ("literal_error", "enum"):
        return Fault(path=path, reason=f"is {short(given)}", legal=str(context.get("expected", "")).replace("'", ""))
    bounds = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", ">="), "less_than": ("lt", "<")}
    bounds["less_than_equal"] = ("le", "<=")
    if kind in bounds:
        key, sign = bounds[kind]
        return Fault(path=path, reason=f"is {short(given)}", legal=f"{sign} {context[key]}")
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "value_error":
        return Fault(path=path, reason=message)
    return Fault(path=path, reason=f"is {describe(given)}", legal=_wanted(kind, message))


def _wanted(kind: str, message: str) -> str:
    """Say what a type error wanted, in plain words."""
    words = {
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "tuple_type": "a list",
        "model_type": "a mapping",
        "dict_type": "a mapping",
    }
    return words.get(kind, message.removeprefix("should be "))


def _is_key(part: object) -> bool:
    """Whether a location part is a key of the file and not pydantic's name of a union member."""
    return isinstance(part, str) and re.fullmatch(r"int|float|str|bool|[A-Z]\w*|.*[\[(].*", part) is None


def _dotted(keys: list[Any]) -> str:
    """`a.b[2].c` for the parts of a location."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def _unknown_key(schema: type[BaseModel], keys: list[Any], path: str) -> Fault:
    """Make a fault for a key that the schema lacks, with the nearest legal keys (or all of a short list)."""
    owner = _owner(schema, keys[:-1])
    known = sorted(field.alias or name for name, field in owner.model_fields.items()) if owner else []
    close = nearest(str(keys[-1]), known)
    return Fault(path=path, reason="is not a known key", legal=", ".join(close or known))


def _owner(schema: type[BaseModel], keys: list[Any]) -> type[BaseModel] | None:
    """Find the schema that describes the mapping at `keys` below `schema`."""
    here: type[BaseModel] | None = schema
    for key in keys:
        if isinstance(key, int):
            continue
        if here is None:
            return None
        fields = {field.alias or name: field for name, field in here.model_fields.items()}
        here = _schema_in(fields[key].annotation) if key in fields else None
    return here


def _schema_in(annotation: Any) -> type[BaseModel] | None:
    """Find the first pydantic schema inside a type annotation."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    if get_origin(annotation) in (Union, types.UnionType, list, tuple, dict):
        return next((found for part in get_args(annotation) if (found := _schema_in(part))), None)
    return None
