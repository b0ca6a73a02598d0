"""Runs a module's functions on four processes, and compares a plan with one process."""

import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ap_search.errors import RunFailed
from ap_search.plan.plan import Plan
from ap_search.runtime.batch import Batch, make_batch
from ap_search.runtime.execute import Execution, build_execution
from ap_search.runtime.launch import Place, launch
from ap_search.runtime.reference import ReferenceStep, run_reference
from ap_search.runtime.settings import RunSettings
from ap_search.spec.blocks import Model
from tests.runtime.small import RANKS

TIMEOUT_S = 240.0
PREFIX = "rank_"


def run_module(name: str) -> dict[str, list[Any]]:
    """Run every function `rank_...` of a module on all ranks: what each rank returned, by the function's name."""
    module = importlib.import_module(name)
    found = [function for function, _ in inspect.getmembers(module, inspect.isfunction) if function.startswith(PREFIX)]
    try:
        answer = launch(_main, (name, found), devices=RANKS, timeout_s=TIMEOUT_S, progress=lambda what, share: None)
    except RunFailed as error:
        raise AssertionError(f"{error}\n{error.trace}") from None
    results: dict[str, list[Any]] = json.loads(answer)
    return results


def _main(place: Place, payload: tuple[str, list[str]]) -> str:
    """Be one rank: run the functions in order and gather what they return."""
    name, functions = payload
    module = importlib.import_module(name)
    results = {}
    for function in functions:
        place.report(function, 0.0)
        run: Callable[[], Any] = getattr(module, function)
        gathered: list[Any] = [None] * place.world_size
        dist.all_gather_object(gathered, run())
        results[function.removeprefix(PREFIX)] = gathered
    return json.dumps(results)


@dataclass(kw_only=True)
class Comparison:
    """Largest distances of a run from one process, each over the largest value of the whole tensor."""

    losses: list[float] = field(default_factory=list)
    logits: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest of all."""
        return max([*self.logits.values(), *self.gradients.values(), *self.weights.values()])


def distance(actual: torch.Tensor, whole: torch.Tensor, part: tuple[slice, ...] | None = None) -> float:
    """Largest difference between a tensor and (part of) a whole one, over the whole one's largest value."""
    wanted = whole if part is None else whole[part]
    assert actual.shape == wanted.shape
    assert bool(torch.isfinite(actual).all())
    return float((actual - wanted).abs().max() / whole.abs().max())


def shared_reference(model: Model, plan: Plan, settings: RunSettings, batches: Sequence[Batch]) -> list[ReferenceStep]:
    """Run one process on rank 0 and hand its results to all."""
    steps = run_reference(model, plan, settings, batches=batches) if dist.get_rank() == 0 else None
    box = [steps]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def compare(model: Model, plan: Plan, settings: RunSettings, *, steps: int = 2) -> tuple[Comparison, Execution]:
    """Train a few steps under a plan and compare every step with one process."""
    batches = [make_batch(model.vocab_size, plan, settings, step=step) for step in range(steps)]
    reference = shared_reference(model, plan, settings, batches)
    execution = build_execution(model, plan, settings)
    found = Comparison()
    for batch, wanted in zip(batches, reference, strict=True):
        _compare_step(execution, batch, wanted, found)
    return found, execution


def _compare_step(execution: Execution, batch: Batch, wanted: ReferenceStep, found: Comparison) -> None:
    """Run one step and keep the largest distances."""
    outcome = execution.forward_backward(batch)
    execution.finish_gradients()
    for name, actual in execution.gradients().items():
        part = execution.cuts[name].slices
        found.gradients[name] = max(found.gradients.get(name, 0.0), distance(actual, wanted.gradients[name], part))
    if outcome.logits:
        assert execution.meshes is not None
        rows = execution.shape.vocab_rows // execution.plan.tp
        first = execution.meshes.index("tp") * rows
        for i, logits in enumerate(outcome.logits):
            whole = wanted.logits[i][execution.meshes.index("dp-cp")]
            part = (slice(None), slice(None), slice(first, first + rows))
            found.logits[str(i)] = max(found.logits.get(str(i), 0.0), distance(logits, whole, part))
        found.losses.append(_total_loss(execution, outcome.loss) - wanted.loss)
    execution.optimizer_step()
    for name, actual in execution.weights().items():
        part = execution.cuts[name].slices
        found.weights[name] = max(found.weights.get(name, 0.0), distance(actual, wanted.weights[name], part))


def _total_loss(execution: Execution, share: float) -> float:
    """Sum the replicas' shares of the loss."""
    assert execution.meshes is not None
    value = torch.tensor(share, dtype=torch.float64)
    dist.all_reduce(value, group=execution.meshes.groups["dp-cp"])
    return float(value)
