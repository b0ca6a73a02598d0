"""Reading how tokens fall on experts: `balanced`, `zipf:A`, or a histogram from a YAML, JSON, CSV or NPY file."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ap_search.errors import Fault, SpecError
from ap_search.spec.job import Load
from ap_search.spec.reader import MAX_FILE_BYTES, describe, read_bytes, read_document, read_text, short, validate
from ap_search.units import MIB

MAX_HISTOGRAM_BYTES = 64 * MIB

_LEGAL = "balanced, zipf:A with A at least 0, or a YAML, JSON, CSV or NPY file"
_MAX_FAULTS = 20


class LoadFile(BaseModel):
    """A histogram of routed tokens, as a user writes it; one of the first two keys is needed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens_per_expert: list[Any] | None = Field(
        default=None,
        description="Token copies (or shares) per expert, summed over the expert-parallel group: one list for all MoE "
        "layers, or a list per MoE layer, bottom to top.",
    )
    source_expert_loads: list[Any] | None = Field(
        default=None,
        description="The same per source rank, as HyperParallel's dry run takes it: ranks x experts, or layers x ranks "
        "x experts. Experts receive the sum over source ranks; each rank sends its own total.",
    )
    layers: list[int] | None = Field(
        default=None, description="The decoder layer that each row was counted on; one number per row, for the reader."
    )
    source: str = Field(default="", description="Where the counts come from: run, step, tokens.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Numbers as they stand in the file, not yet checked, and the path to them; `sources` per source rank, checked."""

    path: str
    values: Sequence[object]
    sources: NDArray[np.float64] | None = None


def load_load(text: str | Path, *, num_experts: int, num_moe_layers: int) -> Load:
    """Read how routed tokens fall on experts; shares have no unit and sum to 1 per row.

    Parameters
    ----------
    text : str or Path
        `balanced`; `zipf:A`, where expert i receives a share in proportion to `1/(i+1)^A`, A finite and at least 0; or
        the path of a histogram: counts or shares per expert, or per MoE layer and expert.
    num_experts : int
        Routed experts of one MoE layer, 0 for a dense model, which takes `balanced` only.
    num_moe_layers : int
        MoE layers of the model.

    Returns
    -------
    Load
        With one row of shares for all MoE layers, or one per MoE layer; no shares for `balanced`. Counts per source
        rank are kept beside their sum.

    Raises
    ------
    SpecError
        For a form that is not known, a file that cannot be read or is too large, a wrong number of rows or numbers, and
        what is not a number, is not finite, is negative or all zero; 20 faults at most.

    Notes
    -----
    A1. A histogram is summed over the expert-parallel group: the same one serves dispatch and expert compute.
    A2. Experts are placed in the order of the file, E/ep consecutive ones per rank: `zipf:A` puts the busiest together.
    """
    if not isinstance(text, str | Path):
        raise SpecError("--load", f"is {describe(text)}", _LEGAL)
    name = str(text)
    if name == "balanced":
        return Load()
    if num_experts == 0:
        raise SpecError("--load", f"is {short(name)}, but the model has no routed experts", "balanced")
    if name.startswith("zipf:"):
        return Load(name=name, shares=_frozen(_zipf_shares(name, num_experts)))
    if not os.path.exists(name):
        raise SpecError("--load", f"there is no file {short(name)}", _LEGAL)
    path = Path(name)
    rows = _rows(path, num_experts, num_moe_layers)
    if len(rows) not in (1, num_moe_layers):
        wanted = f"one row of {num_experts} numbers, or {num_moe_layers} rows, one per MoE layer"
        raise SpecError(path.name, f"has {len(rows)} rows", wanted)
    return Load(name=path.name, shares=_frozen(_shares(rows, num_experts)), source_shares=_source_shares(rows))


def _frozen(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Make an array read-only: a load is a value."""
    shares.setflags(write=False)
    return shares


def _zipf_shares(name: str, num_experts: int) -> NDArray[np.float64]:
    """Shares of `zipf:A`, one row."""
    try:
        exponent = float(name.removeprefix("zipf:"))
    except ValueError:
        exponent = math.nan
    if not (math.isfinite(exponent) and exponent >= 0):
        raise SpecError("--load", f"is {short(name)}", "zipf:A with A a finite number of at least 0, such as zipf:1.2")
    weights = np.arange(1, num_experts + 1, dtype=np.float64)[None] ** -exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _rows(path: Path, num_experts: int, num_moe_layers: int) -> list[_Row]:
    """Rows of a histogram file, by its suffix; what is not NPY or CSV is read as YAML or JSON."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _npy_rows(path, num_experts, num_moe_layers)
    if suffix == ".csv":
        return _csv_rows(path, num_experts)
    content = read_document(path, limit_bytes=MAX_HISTOGRAM_BYTES if suffix == ".json" else MAX_FILE_BYTES)
    if isinstance(content, list):
        return _nested_rows(content, f"{path.name}: ")
    if not isinstance(content, dict):
        raise SpecError(path.name, f"is {describe(content)}", "a list, or a mapping with the key tokens_per_expert")
    return _mapping_rows({str(key): value for key, value in content.items()}, path.name, num_experts)


def _mapping_rows(content: dict[str, object], where: str, num_experts: int) -> list[_Row]:
    """Rows of a mapping with `tokens_per_expert` or `source_expert_loads`."""
    file = validate(LoadFile, content, where)
    if (file.tokens_per_expert is None) == (file.source_expert_loads is None):
        raise SpecError(where, "needs one of two keys", "tokens_per_expert or source_expert_loads")
    if file.source_expert_loads is not None:
        rows = _source_rows(file.source_expert_loads, f"{where}: source_expert_loads", num_experts)
    else:
        rows = _nested_rows(file.tokens_per_expert or [], f"{where}: tokens_per_expert")
    if file.layers is not None and len(file.layers) != len(rows):
        raise SpecError(f"{where}: layers", f"names {len(file.layers)} layers", f"one per row, {len(rows)}")
    return rows


def _nested_rows(values: list[Any], path: str) -> list[_Row]:
    """One row of a list of numbers, a row per list of a list of lists."""
    if not any(isinstance(value, list) for value in values):
        return [_Row(path=path.removesuffix(": "), values=values)]
    return [
        _Row(path=f"{path}[{index}]", values=value if isinstance(value, list) else [value])
        for index, value in enumerate(values)
    ]


def _source_rows(values: list[Any], path: str, num_experts: int) -> list[_Row]:
    """Sum loads per source rank: ranks x experts to one row, layers x ranks x experts to a row per layer."""
    per_layer = any(isinstance(rank, list) for layer in values if isinstance(layer, list) for rank in layer)
    blocks = [(f"{path}[{index}]", block) for index, block in enumerate(values)] if per_layer else [(path, values)]
    rows = []
    for place, block in blocks:
        ranks = _nested_rows(block if isinstance(block, list) else [block], place)
        table = _numbers(ranks, num_experts)
        with np.errstate(over="ignore"):
            # A sum beyond floats is infinite, and is refused with the row's other numbers.
            total = table.sum(axis=0)
        rows.append(_Row(path=place, values=total.tolist(), sources=table))
    return rows


def _csv_rows(path: Path, num_experts: int) -> list[_Row]:
    """Rows of a CSV file without a header; blank lines and lines that begin with # are skipped.

    Numbers are separated by commas, or by blanks where a line has no comma; one number per line is one row.
    """
    lines = read_text(path, limit_bytes=MAX_HISTOGRAM_BYTES).splitlines()
    rows = [
        _Row(path=f"{path.name}: line {number}", values=[_parsed(cell) for cell in _cells(line)])
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not rows:
        raise SpecError(path.name, "has no numbers")
    if len(rows) == num_experts > 1 and all(len(row.values) == 1 for row in rows):
        return [_Row(path=path.name, values=[row.values[0] for row in rows])]
    return rows


def _cells(line: str) -> list[str]:
    """Cells of one line."""
    return line.split(",") if "," in line else line.split()


def _parsed(cell: str) -> object:
    """Parse a cell as a number, or leave it as the text it is."""
    try:
        return float(cell)
    except ValueError:
        return cell.strip()


def _npy_rows(path: Path, num_experts: int, num_moe_layers: int) -> list[_Row]:
    """Rows of a NumPy array file; arrays of objects are refused unread, since unpickling them would run code."""
    read_bytes(path, limit_bytes=MAX_HISTOGRAM_BYTES)
    try:
        # A memory map checks the shape that the header claims against the file's size before anything is allocated.
        table = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError) as error:
        raise SpecError(path.name, f"is not an NPY file of numbers: {error}") from None
    if table.dtype.kind not in "iuf":
        raise SpecError(path.name, f"holds {table.dtype.name}", "an array of integers or floats")
    legal = [(num_experts,), (1, num_experts), (num_moe_layers, num_experts)]
    per_source = table.ndim == 3 and (len(table), table.shape[2]) in legal[1:] and table.shape[1] > 0
    if table.shape not in legal and not per_source:
        wanted = f"{legal[0]}, {legal[2]}, or ({num_moe_layers}, source ranks, {num_experts})"
        raise SpecError(path.name, f"has the shape {table.shape}", wanted)
    if per_source:
        return _source_rows(table.tolist(), f"{path.name}: ", num_experts)
    rows = np.atleast_2d(table).tolist()
    return [_Row(path=f"{path.name}: [{index}]", values=row) for index, row in enumerate(rows)]


def _numbers(rows: Sequence[_Row], num_experts: int) -> NDArray[np.float64]:
    """Check that each row holds a finite number of at least 0 for each expert, and make a table of them."""
    _raise_any(fault for row in rows if (fault := _row_fault(row, num_experts)))
    return np.array([row.values for row in rows], dtype=np.float64)


def _row_fault(row: _Row, num_experts: int) -> Fault | None:
    """Find the first fault of a row."""
    if len(row.values) != num_experts:
        count = f"{len(row.values)} number{'' if len(row.values) == 1 else 's'}"
        return Fault(path=row.path, reason=f"has {count}", legal=f"{num_experts}, one per expert")
    for expert, value in enumerate(row.values):
        path = f"{row.path}, expert {expert}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return Fault(path=path, reason=f"is {describe(value)}", legal="a number of at least 0")
        if not _is_load(value):
            return Fault(path=path, reason=f"is {short(value)}", legal="a finite number of at least 0")
    return None


def _is_load(value: float) -> bool:
    """Whether a number is finite (integers beyond floats are not) and at least 0."""
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:
        return False


def _shares(rows: Sequence[_Row], num_experts: int) -> NDArray[np.float64]:
    """Divide each row by its sum."""
    table = _numbers(rows, num_experts)
    most = table.max(axis=1, keepdims=True)
    _raise_any(
        Fault(path=row.path, reason="is all zero", legal="at least one expert with tokens")
        for row, top in zip(rows, most, strict=True)
        if top == 0
    )
    # Divided by the largest first: the sum of counts near the largest float would overflow.
    table = table / most
    shares: NDArray[np.float64] = table / table.sum(axis=1, keepdims=True)
    return shares


def _source_shares(rows: Sequence[_Row]) -> NDArray[np.float64] | None:
    """Shares per source rank and expert, each row summing to 1, where the file has them."""
    tables = [row.sources for row in rows if row.sources is not None]
    if not tables:
        return None
    ranks = len(tables[0])
    _raise_any(
        Fault(path=row.path, reason=f"has {len(table)} source ranks", legal=f"{ranks}, as the first layer")
        for row, table in zip(rows, tables, strict=True)
        if len(table) != ranks
    )
    every = np.stack(tables)
    every = every / every.max(axis=(1, 2), keepdims=True)
    return _frozen(every / every.sum(axis=(1, 2), keepdims=True))


def _raise_any(faults: Iterable[Fault]) -> None:
    """Raise all faults at once, the first ones where there are many."""
    every = list(faults)
    if len(every) > _MAX_FAULTS:
        rest = len(every) - _MAX_FAULTS
        every = [*every[:_MAX_FAULTS], Fault(path=every[_MAX_FAULTS].path, reason=f"and {rest - 1} more rows alike")]
    if every:
        raise SpecError.of(every)
