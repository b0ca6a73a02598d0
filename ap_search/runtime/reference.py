"""The same step in one process: whole tensors, no groups, all replicas' micro-batches one after another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Dispatcher, Plan, Schedule, Sharding
from ap_search.runtime.batch import Batch
from ap_search.runtime.execute import Execution, build_single
from ap_search.runtime.settings import RunSettings
from ap_search.spec.blocks import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step of one process.

    Attributes
    ----------
    loss : float
        Mean over the labels of the global batch.
    logits : tuple of tuple of Tensor
        Per micro-batch and replica, shape (seq, mbs, vocabulary rows).
    gradients, weights : dict of str to Tensor
        Whole tensors by name; weights after the step.
    """

    loss: float
    logits: tuple[tuple[Tensor, ...], ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def single_plan(plan: Plan) -> Plan:
    """Give the plan of one device that does all the work of another plan: no axis, all its micro-batches.

    Parameters
    ----------
    plan : Plan
        Any plan.

    Returns
    -------
    Plan
    """
    layers = sum(plan.layout.chunk_layers)
    return replace(
        plan,
        tp=1,
        cp=1,
        pp=1,
        vpp=1,
        dp=1,
        ep=1,
        etp=1,
        edp=1,
        num_microbatches=plan.num_microbatches * plan.dp,
        sequence_parallel=False,
        sharding=Sharding.NONE,
        dispatcher=Dispatcher.ALLTOALL,
        schedule=Schedule.ONE_F_ONE_B,
        layout=layout_of((layers,), pp=1, vpp=1),
    )


def run_reference(model: Model, plan: Plan, settings: RunSettings, *, batches: Sequence[Batch]) -> list[ReferenceStep]:
    """Run training steps in this process, without any process group.

    Parameters
    ----------
    model : Model
        Sizes and kinds of layers.
    plan : Plan
        What is compared: its replicas, micro-batches, padded vocabulary and parts of the sequence.
    settings : RunSettings
        Seed, types, sequence length.
    batches : sequence of Batch
        One per step.

    Returns
    -------
    list of ReferenceStep
    """
    execution = build_single(model, plan, settings, single=single_plan(plan))
    return [_step(execution, batch, plan.dp) for batch in batches]


def _step(execution: Execution, batch: Batch, dp: int) -> ReferenceStep:
    """Run one step."""
    outcome = execution.forward_backward(batch.in_one_process())
    execution.finish_gradients()
    gradients = execution.gradients()
    execution.optimizer_step()
    logits = [outcome.logits[first : first + dp] for first in range(0, len(outcome.logits), dp)]
    return ReferenceStep(loss=outcome.loss, logits=tuple(logits), gradients=gradients, weights=execution.weights())
