"""Reading files of recorded runs: our own form in YAML, JSON or JSONL, and the form of published runs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ap_search.errors import Fault, SpecError
from ap_search.spec.blocks import Model
from ap_search.spec.cluster import load_cluster
from ap_search.spec.hardware import with_network
from ap_search.spec.hf import is_hf, read_hf
from ap_search.spec.machine import Machine
from ap_search.spec.model import load_model, read_model_file
from ap_search.spec.presets import locate, preset_names, remembered
from ap_search.spec.published import read_published
from ap_search.spec.reader import describe, read_document, read_text, validate
from ap_search.spec.run import (
    Measured,
    MemoryReading,
    MemoryStage,
    Run,
    RunLabel,
    Switches,
    UnusableRun,
)
from ap_search.spec.run_file import MeasuredFile, MemoryFile, RunFile, RunsFile
from ap_search.units import MIB, gbit_to_bytes_per_s, gib_to_bytes, tflops_to_flops_per_s

MAX_RUNS_BYTES = 64 * MIB
_LINES = (".jsonl", ".ndjson")
_load_model = remembered("models", load_model)
_load_cluster = remembered("clusters", load_cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a row stands: its file, its number there, models that the file defines."""

    path: Path
    number: int
    models: Mapping[str, Model]

    @property
    def where(self) -> str:
        """Head of a fault's path."""
        return f"{self.path.name}: runs[{self.number}]"


def run_presets() -> tuple[Path, ...]:
    """Files of recorded runs that ship with the package, in alphabetical order."""
    return tuple(locate("runs", name) for name in preset_names("runs"))


def load_runs(source: str | Path) -> tuple[Run | UnusableRun, ...]:
    """Read a file of recorded runs.

    Parameters
    ----------
    source : str or Path
        YAML or JSON: a list of runs, or a mapping with `runs` and what they share; or JSONL, one run a line. A row
        with `parallel` is a published one, whose fields are taken as they are.

    Returns
    -------
    tuple of Run or UnusableRun
        In the order of the file. Published rows that cannot be priced say why.

    Raises
    ------
    SpecError
        When the file cannot be read, or rows in our own form have faults: all at once.
    """
    path = locate("runs", source) if isinstance(source, str) else source
    rows, models = _rows(path)
    found: list[Run | UnusableRun] = []
    faults: list[Fault] = []
    for number, row in enumerate(rows):
        try:
            found.append(_read(row, _Place(path=path, number=number, models=models)))
        except SpecError as error:
            faults.extend(error.faults)
    faults += _repeated(found, path)
    if faults:
        raise SpecError.of(faults)
    return tuple(found)


def _repeated(found: list[Run | UnusableRun], path: Path) -> list[Fault]:
    """Fault for each name that two runs of our own form have."""
    names = [run.label.id for run in found if isinstance(run, Run) and not run.label.device]
    return [
        Fault(path=f"{path.name}: runs", reason=f"two runs are called {name!r}")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]


def _rows(path: Path) -> tuple[list[Any], dict[str, Model]]:
    """Rows of a file with its defaults filled in, and the models that it defines."""
    if path.suffix.lower() in _LINES:
        return _json_lines(path), {}
    content = read_document(path, limit_bytes=MAX_RUNS_BYTES)
    if isinstance(content, list):
        return content, {}
    if not isinstance(content, dict):
        raise SpecError(path.name, f"must be a list of runs, or a mapping with `runs`, not {describe(content)}")
    file = validate(RunsFile, content, path.name)
    models = {name: _inline_model(data, name, f"{path.name}: models.{name}") for name, data in file.models.items()}
    return [{**file.defaults, **row} for row in file.runs], models


def _json_lines(path: Path) -> list[Any]:
    """One JSON value per line, blank lines left out."""
    rows = []
    for number, line in enumerate(read_text(path, limit_bytes=MAX_RUNS_BYTES).splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (json.JSONDecodeError, RecursionError) as error:
                raise SpecError(path.name, f"line {number} is not JSON: {error}") from None
    return rows


def _read(row: Any, place: _Place) -> Run | UnusableRun:
    """Read one row of either form."""
    if not isinstance(row, dict):
        raise SpecError(place.where, f"is {describe(row)}", "a mapping, one run")
    if "parallel" in row or "hardware" in row:
        return read_published(row, place.where)
    return _own_run(validate(RunFile, row, place.where), place)


def _own_run(file: RunFile, place: _Place) -> Run:
    """Make a run of a row in our own form."""
    machine = _machine(file, place)
    model = _model(file, place)
    return Run(
        label=RunLabel(
            id=file.id,
            source=file.source,
            group=file.group,
            quality=file.quality,
            hardware=machine.name,
            moe=model.moe is not None,
            notes=file.notes,
        ),
        model=model,
        machine=machine,
        devices=file.devices,
        plan=file.plan,
        unknown=file.unknown,
        global_batch=file.global_batch,
        seq_len=file.seq_len,
        precision=file.precision,
        capacity_factor=file.capacity_factor,
        load=_beside(file.load, place.path),
        software=_beside(file.software, place.path),
        switches=Switches(
            **{f"{name}_overlap": said for name, said in file.overlap.model_dump().items()},
            cuda_graphs=file.cuda_graphs,
            fused_attention=file.fused_attention,
            dropout=file.dropout,
            half_gradients=file.half_gradients,
            offloaded_layers=file.offloaded_layers,
            loss_chunks=file.loss_chunks,
        ),
        measured=_measured(file),
        assumed=(*file.assumed, *_left_to_defaults(file, moe=model.moe is not None)),
    )


def _left_to_defaults(file: RunFile, *, moe: bool) -> Iterator[str]:
    """One line for what a run does not state and a default stands for; `unknown` keys are tried, not assumed."""
    for name in ("cluster", "precision"):
        if name not in file.model_fields_set:
            yield f"{name}: not stated, {getattr(file, name)}"
    knobs = ("mbs", "sharding", "recompute", *(("dispatcher",) if moe else ()))
    silent = [knob for knob in knobs if f"{knob}=" not in file.plan and knob not in file.unknown]
    if silent and "=" in file.plan:  # A plan's name has them all.
        yield f"plan: {', '.join(silent)} not stated, the defaults of a plan"


def _machine(file: RunFile, place: _Place) -> Machine:
    """Load the cluster, a path beside the runs' file included, with what the run says of it."""
    machine = _load_cluster(_beside(file.cluster, place.path))
    if file.memory_limit_gib is not None:
        machine = replace(machine, device_memory_bytes=gib_to_bytes(file.memory_limit_gib))
    if file.network_gbit_per_s is not None:
        machine = with_network(machine, gbit_to_bytes_per_s(file.network_gbit_per_s))
    return machine


def _model(file: RunFile, place: _Place) -> Model:
    """Find the model: inline, named in the file, beside the file, or a preset."""
    if isinstance(file.model, dict):
        return _inline_model(file.model, file.id, f"{place.where}.model")
    return place.models.get(file.model) or _load_model(_beside(file.model, place.path))


def _inline_model(data: Mapping[str, Any], name: str, where: str) -> Model:
    """Read the content of a model file."""
    return read_hf(data, name=name, where=where) if is_hf(data) else read_model_file(data, name=name, where=where)


def _beside(name: str, path: Path) -> str:
    """Resolve a path as seen from the runs' file, where it is one."""
    beside = path.parent / name
    return str(beside) if beside.suffix and beside.is_file() else name


def _measured(file: RunFile) -> Measured:
    """Convert what was measured to SI units."""
    said: MeasuredFile = file.measured
    return Measured(
        step_time_s=said.step_time_s,
        tokens_per_s_per_device=said.tokens_per_s_per_device,
        flops_per_s_per_device=None
        if said.tflops_per_device is None
        else tflops_to_flops_per_s(said.tflops_per_device),
        mfu_ratio=said.mfu_ratio,
        flops_rule=said.flops_rule,
        flops_mtp=said.flops_mtp,
        memory=tuple(_reading(peak) for peak in file.memory),
        oom=file.oom,
        failed=file.failed,
    )


def _reading(peak: MemoryFile) -> MemoryReading:
    """Convert one peak to bytes."""
    peaks = tuple(gib_to_bytes(size) for size in peak.peak_gib)
    listed = peaks if peak.stage is MemoryStage.LIST else ()
    return MemoryReading(kind=peak.kind, stage=peak.stage, peak_bytes=max(peaks), stage_bytes=listed)
