"""Reading one published row: from its own words to a `Run`, every value that it does not state named."""

from collections.abc import Mapping

from ap_search.errors import SpecError
from ap_search.spec.hardware import Hardware, machine_for
from ap_search.spec.published_file import PublishedRun, known_fields
from ap_search.spec.published_measured import published_measured
from ap_search.spec.published_model import published_model
from ap_search.spec.published_plan import capacity_factor, load, published_plan, switches
from ap_search.spec.reader import validate
from ap_search.spec.run import Run, RunLabel, Unusable, UnusableError, UnusableRun


def read_published(data: Mapping[str, object], where: str) -> Run | UnusableRun:
    """Read a published row.

    Parameters
    ----------
    data : mapping
        The row, its fields as they are.
    where : str
        File and line, for what cannot be read.

    Returns
    -------
    Run or UnusableRun
        The latter with the field that is missing, or the word that is not modelled.
    """
    kept, unread = known_fields(PublishedRun, data)
    try:
        row = validate(PublishedRun, kept, where)
    except SpecError as error:
        label = RunLabel(id=str(data.get("id", where)), source=str(data.get("source", "")))
        return UnusableRun(label=label, why=Unusable.REFUSED, reason=str(error.faults[0]))
    try:
        return _run(row, unread)
    except UnusableError as error:
        return UnusableRun(label=_label(row, row.hardware.gpu), why=error.why, reason=error.reason)


def _label(row: PublishedRun, hardware: str) -> RunLabel:
    """What the row is called and filed under."""
    return RunLabel(
        id=row.id,
        source=row.source,
        group=row.group,
        quality=row.quality,
        hardware=hardware,
        device=row.hardware.gpu,
        moe=bool(row.model.num_experts) or "moe" in row.model.kind,
        notes=row.notes,
    )


def _run(row: PublishedRun, unread: tuple[str, ...]) -> Run:
    """Make a run, or raise what keeps it from being one."""
    hardware = row.hardware
    machine, from_hardware = machine_for(
        Hardware(
            device=hardware.gpu,
            memory_gb=hardware.mem_gb,
            devices_per_domain=hardware.gpus_per_nvlink_domain,
            interconnect=hardware.interconnect,
        )
    )
    model, from_model = published_model(row.model)
    assumed = [*from_hardware, *from_model, *(f"not modelled: {field}" for field in unread)]
    devices = _devices(row, assumed)
    if row.seq_len is None:
        raise UnusableError(Unusable.SKIPPED, "seq_len is missing")
    plan, unknown = published_plan(row, num_layers=model.num_layers, moe=model.moe is not None, assumed=assumed)
    pp = row.parallel.pp or 1
    measured = published_measured(row, devices=devices, pp=pp, assumed=assumed)
    return Run(
        label=_label(row, machine.name),
        model=model,
        machine=machine,
        devices=devices,
        plan=plan,
        unknown=unknown,
        global_batch=_global_batch(row, devices, needs_time=measured.has_time, assumed=assumed),
        seq_len=row.seq_len,
        precision=_precision(row, assumed),
        capacity_factor=capacity_factor(row, assumed) if model.moe else None,
        load=load(row, model.moe, assumed) if model.moe else "balanced",
        switches=switches(row, assumed),
        measured=measured,
        assumed=tuple(assumed),
    )


def _devices(row: PublishedRun, assumed: list[str]) -> int:
    """Devices of the job: stated, the product of the stated axes, or inferred by the collector."""
    if row.hardware.count:
        return row.hardware.count
    axes = row.parallel
    if axes.dp and axes.tp and axes.pp:
        devices = axes.dp * axes.tp * axes.pp * (axes.cp or 1)
        assumed.append(f"devices: not stated, {devices} by the axes")
        return devices
    if row.derived.gpu_count_inferred:
        assumed.append(f"devices: not stated, {row.derived.gpu_count_inferred} inferred by the collector")
        return row.derived.gpu_count_inferred
    raise UnusableError(Unusable.SKIPPED, "hardware.count is missing")


def _global_batch(row: PublishedRun, devices: int, *, needs_time: bool, assumed: list[str]) -> int:
    """Sequences per step; memory alone needs no more of them than fill the pipeline."""
    if row.global_batch:
        return row.global_batch
    if needs_time:
        raise UnusableError(Unusable.SKIPPED, "global_batch is missing")
    axes = row.parallel
    pp = axes.pp or 1
    replicas = max(1, devices // ((axes.tp or 1) * pp * (axes.cp or 1)))
    filled = (row.micro_batch or 1) * replicas * pp
    assumed.append(f"global_batch: not stated, {filled} fill the pipeline")
    return filled


def _precision(row: PublishedRun, assumed: list[str]) -> str:
    """Word of the precision."""
    words = row.precision.lower()
    if "fp4" in words:
        raise UnusableError(Unusable.REFUSED, f"precision: {row.precision} is not modelled")
    if "mxfp8" in words:
        return "mxfp8"
    if "fp8" in words or "float8" in words:
        return "fp8"
    if "16" not in words:
        assumed.append(f"precision: {row.precision or 'not stated'}, bf16")
    return "bf16"
