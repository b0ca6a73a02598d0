"""`verify`: execute the plan on every rank, compare with one process on the same tokens and with the prediction."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ap_search.cost.context import CostContext
from ap_search.errors import SpecError
from ap_search.limits import MAX_STEPS
from ap_search.plan.plan import Plan, Sharding
from ap_search.plan.text import plan_name
from ap_search.result.verification import Check, Verification, read_verification
from ap_search.runtime.agreement import (
    Difference,
    figure_checks,
    guarded_dispatches,
    hook_order_checks,
    number_checks,
    state_table,
)
from ap_search.runtime.batch import Batch, make_batch
from ap_search.runtime.counters import SavedBytes, TrafficCounter
from ap_search.runtime.execute import Execution, StepOutcome, build_execution
from ap_search.runtime.hook_order import record_hook_order
from ap_search.runtime.launch import GIB, Place, Progress, launch, local_ranks, memory_bytes
from ap_search.runtime.prediction import RankFigures, Routed, predict
from ap_search.runtime.reference import ReferenceStep, run_reference
from ap_search.runtime.settings import DtypeName, RunSettings, state_widths
from ap_search.spec.parameters import params_total
from ap_search.units import FP32_BYTES

Found = TypeVar("Found")
COUNTED_DTYPE: DtypeName = "bfloat16"
KIND_NAMES = {"dense": "shared"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyJob:
    """What every rank is given."""

    context: CostContext
    plan: Plan
    settings: RunSettings
    steps: int


def run_verify(job: VerifyJob, *, timeout_s: float, progress: Progress) -> Verification:
    """Execute a plan on local processes or as a rank of torchrun, and compare.

    Parameters
    ----------
    job : VerifyJob
        Model, plan, settings.
    timeout_s : float
        Seconds that the run may take.
    progress : callable
        Called with what is being done and which share of it is done, 0..1.

    Returns
    -------
    Verification

    Raises
    ------
    SpecError
        The machine may not run so many processes or lacks the memory for the model; no number of steps.
    RunFailed
        A rank failed.
    """
    if not 1 <= job.steps <= MAX_STEPS:
        raise SpecError("--steps", f"got {job.steps!r}", f"an integer from 1 to {MAX_STEPS}")
    devices = job.context.job.devices
    _check_memory(job, local_ranks(devices))
    return read_verification(launch(verify_rank, job, devices=devices, timeout_s=timeout_s, progress=progress))


def _check_memory(job: VerifyJob, ranks: int) -> None:
    """Refuse a model of which the ranks of this machine cannot hold what they compare with.

    Each of them is given every step's gradients and weights of the single process, whole, and that one has both moments
    too. What a rank holds of the plan itself comes on top, so a run that passes may still be large.
    """
    copy_bytes = params_total(job.context.model) * (8 if job.settings.dtype == "float64" else 4)
    needed, there = copy_bytes * (2 * job.steps * ranks + 4), memory_bytes()
    if needed > there:
        reason = (
            f"{params_total(job.context.model):,} parameters need at least {needed / GIB:.3g} GiB on this "
            f"machine, for {ranks} ranks and {job.steps} steps"
        )
        raise SpecError(
            "--model", reason, f"at most {there / GIB:.3g} GiB: a small model of the same kind, fewer steps"
        )


def verify_rank(place: Place, job: VerifyJob) -> str:
    """Be one rank: execute, compare, and on rank 0 put all ranks' findings together as JSON."""
    reference = _shared_reference(place, job)
    differences = list(_differences(place, job, reference))
    place.report("counting bytes in bfloat16", 0.8)
    counting = counted_job(job)
    found = _gathered(place, (differences, _count(place, counting)))
    if place.rank:
        return ""
    counted = [rank for _, rank in found]
    predicted = predict(counting.context, job.plan, [rank.routed for rank in counted])
    checks = (
        *number_checks(
            (difference for part, _ in found for difference in part),
            dtype=job.settings.dtype,
            routed=job.context.model.moe is not None,
        ),
        *hook_order_checks([rank.dispatches for rank in counted]),
        *figure_checks(job.context.model, predicted, [rank.figures for rank in counted]),
    )
    return _verification(place, job, reference, checks).to_json_text()


def _verification(
    place: Place, job: VerifyJob, reference: Sequence[ReferenceStep], checks: tuple[Check, ...]
) -> Verification:
    """Put the record of a run together."""
    plan, settings = job.plan, job.settings
    return Verification(
        model=job.context.model.name,
        plan=plan_name(plan),
        world_size=place.world_size,
        backend=place.backend,
        torch_version=str(torch.__version__),
        dtype=settings.dtype,
        steps=job.steps,
        seq_len=settings.seq_len,
        global_batch=plan.num_microbatches * plan.mbs * plan.dp,
        losses=tuple(float(step.loss) for step in reference),
        checks=checks,
    )


def _shared_reference(place: Place, job: VerifyJob) -> list[ReferenceStep]:
    """Run the single process on rank 0, and give all ranks what it found."""
    place.report("one process on the same tokens", 0.1)
    held: list[list[ReferenceStep] | None] = [None]
    if place.rank == 0:
        batches = [_batch(job, number) for number in range(job.steps)]
        held[0] = run_reference(model=job.context.model, plan=job.plan, settings=job.settings, batches=batches)
    dist.broadcast_object_list(held, src=0)
    steps = held[0]
    assert steps is not None
    return steps


def _gathered(place: Place, mine: Found) -> list[Found]:
    """Bring what every rank found to rank 0."""
    found: list[Any] = [None] * place.world_size
    dist.gather_object(mine, found if place.rank == 0 else None, dst=0)
    return found


def _differences(place: Place, job: VerifyJob, reference: Sequence[ReferenceStep]) -> Iterator[Difference]:
    """Execute the steps, and tell how far each tensor is from the single process's."""
    execution = build_execution(job.context.model, job.plan, job.settings, device=place.device)
    for number, wanted in enumerate(reference):
        where = f"rank {place.rank}, step {number}"
        place.report(f"step {number} of the plan", 0.2 + 0.6 * number / len(reference))
        outcome = execution.forward_backward(_batch(job, number))
        execution.finish_gradients()
        yield from _outputs(job, execution, outcome, wanted, where)
        yield from _tensors("grad", execution, execution.gradients(), wanted.gradients, where)
        execution.optimizer_step()
        yield from _tensors("weights", execution, execution.weights(), wanted.weights, where)


def _batch(job: VerifyJob, number: int) -> Batch:
    """Tokens of one step."""
    return make_batch(vocab_size=job.context.model.vocab_size, plan=job.plan, settings=job.settings, step=number)


def _outputs(
    job: VerifyJob, execution: Execution, outcome: StepOutcome, wanted: ReferenceStep, where: str
) -> Iterator[Difference]:
    """Compare the loss and the logits of this rank's sequences and its part of the vocabulary."""
    meshes = execution.meshes
    place, rank = (meshes.index("dp-cp"), meshes.index("tp")) if meshes is not None else (0, 0)
    for number, logits in enumerate(outcome.logits):
        whole = wanted.logits[number][place]
        width = whole.shape[-1] // job.plan.tp
        part = whole[..., rank * width : (rank + 1) * width]
        yield Difference(name="forward", ratio=_ratio(logits, part, whole), where=f"{where}, micro-batch {number}")
    # Tensor-parallel ranks and stages before the last hold no loss of their own.
    mine = outcome.loss if rank == 0 else 0.0
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    loss = torch.tensor(float(wanted.loss), dtype=torch.float64)
    yield Difference(name="loss", ratio=_ratio(total, loss, loss), where=where)


def _tensors(
    what: str, execution: Execution, mine: Mapping[str, Tensor], whole: Mapping[str, Tensor], where: str
) -> Iterator[Difference]:
    """Compare this rank's slices of gradients or weights."""
    for name, values in mine.items():
        reference = whole[name]
        ratio = _ratio(values, reference[execution.cuts[name].slices], reference)
        yield Difference(name=f"{what}.{_short(name)}", ratio=ratio, where=f"{where}, {name}")


def _short(name: str) -> str:
    """Name a parameter without its layer: `layers.1.ffn.experts.w1` is `experts.w1`."""
    return re.sub(r"^layers\.\d+\.(ffn\.(?=experts|router|shared))?", "", name)


def _ratio(mine: Tensor, part: Tensor, whole: Tensor) -> float:
    """Largest difference over the largest value of the whole tensor; the difference itself where all of it is 0."""
    if not part.numel():
        return 0.0
    wanted, found = part.detach().to("cpu", torch.float64), mine.detach().to("cpu", torch.float64)
    if wanted.shape != found.shape:
        return float("inf")
    largest = float(whole.abs().max())
    return float((found - wanted).abs().max()) / (largest or 1.0)


def counted_job(job: VerifyJob) -> VerifyJob:
    """Describe the run whose bytes are counted: bfloat16, with the widths that the runtime has."""
    settings = replace(job.settings, dtype=COUNTED_DTYPE)
    weight, gradient, master, moment = state_widths(settings, gathered=_is_sharded(job.plan))
    software = replace(
        job.context.software,
        weight_bytes=weight,
        gradient_bytes=gradient,
        master_bytes=master,
        moment_bytes=moment,
        router_dtype_bytes=FP32_BYTES,
        vocab_divisor=settings.vocab_divisor,
    )
    context = replace(job.context, software=software)
    return replace(job, settings=settings, context=context)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """What one rank counted: bytes and micro-batches, what it routed, dispatches and those in the right order."""

    figures: RankFigures
    routed: list[Routed]
    dispatches: tuple[int, int]


def _count(place: Place, job: VerifyJob) -> _Counted:
    """Count what this rank sends, keeps and saves in one step; a first one sets everything up and shows the order."""
    execution = build_execution(job.context.model, job.plan, job.settings, device=place.device)
    with record_hook_order(execution.experts()) as events:
        execution.forward_backward(_batch(job, 0))
    execution.finish_gradients()
    execution.optimizer_step()
    dtype = getattr(torch, job.settings.dtype)
    saved, traffic = SavedBytes(execution.blocks(), dtype=dtype), TrafficCounter()
    with traffic:
        with saved.counting():
            execution.forward_backward(_batch(job, 1))
        execution.finish_gradients()
        state = execution.state()
        execution.optimizer_step()
    figures = RankFigures(
        rank=place.rank,
        sent=dict(traffic.sent_bytes),
        state=state_table(
            (KIND_NAMES.get(entry.kind, entry.kind), entry.role, entry.tensor.numel() * entry.tensor.element_size())
            for entry in state
        ),
        saved={name: tuple(sizes) for name, sizes in saved.by_block.items()},
        in_flight=execution.in_flight_peak,
    )
    routed = [
        Routed(layer=entry.layer, copies=entry.record.copies, tokens_per_rank=entry.record.tokens_per_rank)
        for entry in execution.routing
    ]
    dispatches = guarded_dispatches(events, sharded=_is_sharded(job.plan))
    return _Counted(figures=figures, routed=routed, dispatches=dispatches)


def _is_sharded(plan: Plan) -> bool:
    """Whether FSDP holds the weights."""
    return plan.sharding in (Sharding.ZERO3, Sharding.HSDP)
