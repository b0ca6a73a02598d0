"""Micro-batches through one chunk or through a pipeline of them, on torch.distributed.pipelining's schedules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ap_search.plan.plan import Plan, Schedule
from ap_search.runtime.state import ModelState
from ap_search.runtime.transformer import Chunk

LossFunction = Callable[[Tensor, Tensor], Tensor]


class Flights:
    """Micro-batches of each chunk between the end of their forward and the end of their backward on a rank.

    Parameters
    ----------
    num_microbatches : int
        Of a step.
    state : ModelState
        Told of each backward.
    chunks : int
        Of the rank.
    """

    def __init__(self, *, num_microbatches: int, state: ModelState, chunks: int) -> None:
        self.num_microbatches, self.state = num_microbatches, state
        self.alive, self.done = [0] * chunks, [0] * chunks
        self.seen: set[tuple[int, ...]] = set()

    def start(self) -> None:
        """Begin a step."""
        self.alive, self.done = [0] * len(self.alive), [0] * len(self.done)
        self.seen.clear()

    def forward_done(self, chunk: int) -> None:
        """Note one more alive."""
        self.alive[chunk] += 1
        self.seen.add(tuple(self.alive))

    def backward_starts(self, chunk: int) -> None:
        """Tell the model's state, and whether it is the chunk's last of the step."""
        self.state.before_backward(chunk, last=self.done[chunk] == self.num_microbatches - 1)

    def backward_done(self, chunk: int) -> None:
        """Hand the gradients of one micro-batch on."""
        self.alive[chunk] -= 1
        self.done[chunk] += 1
        self.state.after_backward(chunk)

    def worst(self) -> tuple[tuple[int, ...], ...]:
        """List the moments that no other moment exceeds in every chunk."""
        return tuple(sorted(one for one in self.seen if not any(_above(other, one) for other in self.seen)))


def _above(other: tuple[int, ...], one: tuple[int, ...]) -> bool:
    """Whether a moment holds at least as many of each chunk as another, and is not the same."""
    return other != one and all(a >= b for a, b in zip(other, one, strict=True))


class _Held(nn.Module):
    """Hides from the pipeline that a chunk is FSDP's.

    The pipeline would keep weights gathered and gradients unreduced over all micro-batches, where ZeRO-3 as it is
    priced gathers and reduces for each.
    """

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        """Run the chunk."""
        out: Tensor = self.chunk(x)
        return out


class ReportingStage(PipelineStage):
    """A stage that reports its passes."""

    def report_to(self, flights: Flights, chunk: int) -> "ReportingStage":
        """Say whom to tell, and the chunk's number on this rank."""
        self.flights, self.chunk = flights, chunk
        return self

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward and count it."""
        out = super().forward_one_chunk(*args, **kwargs)
        self.flights.forward_done(self.chunk)
        return out

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward between its two reports."""
        self.flights.backward_starts(self.chunk)
        out = super().backward_one_chunk(*args, **kwargs)
        self.flights.backward_done(self.chunk)
        return out


def run_alone(chunk: Chunk, inputs: Tensor, labels: Tensor, *, loss: LossFunction, flights: Flights) -> None:
    """Run the micro-batches one after another through the only chunk.

    Parameters
    ----------
    chunk : Chunk
        The whole model.
    inputs, labels : Tensor
        Shape (micro-batches * mbs, seq).
    loss : callable
        Of logits and labels of one micro-batch.
    flights : Flights
        What is told.
    """
    count = flights.num_microbatches
    for tokens, wanted in zip(inputs.chunk(count), labels.chunk(count), strict=True):
        value = loss(chunk(tokens), wanted)
        flights.forward_done(0)
        flights.backward_starts(0)
        value.backward()
        flights.backward_done(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Tensors between the stages: hidden states (seq on this rank, mbs, hidden), and what goes in and comes out."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    logits: tuple[int, ...]
    dtype: torch.dtype


def build_stages(
    chunks: list[Chunk], *, plan: Plan, stage: int, group: ProcessGroup, device: torch.device, shape: StageShape
) -> list[ReportingStage]:
    """Make this rank's virtual stages; chunk c of stage s is number `c*pp + s`.

    Parameters
    ----------
    chunks : list of Chunk
        Of this rank.
    plan : Plan
        Its pp and vpp.
    stage : int
        This rank's pipeline stage.
    group : ProcessGroup
        The pipeline group.
    device : torch.device
        Where tensors live.
    shape : StageShape
        Known beforehand, so that no message is sent to find it out.

    Returns
    -------
    list of ReportingStage
    """
    total = plan.pp * plan.vpp
    found = []
    for c, chunk in enumerate(chunks):
        number = c * plan.pp + stage
        hidden = torch.empty(shape.hidden, dtype=shape.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(shape.tokens, dtype=torch.int64, device="meta")
        logits = torch.empty(shape.logits, dtype=shape.dtype, device="meta", requires_grad=True)
        found.append(
            ReportingStage(
                _Held(chunk), number, total, device, group=group,
                input_args=tokens if number == 0 else hidden,
                output_args=logits if number == total - 1 else hidden,
            )
        )  # fmt: skip
    return found


class Pipeline:
    """Stages of a rank and their schedule, made once: before its first step torch's stages exchange votes of 4 bytes.

    Parameters
    ----------
    stages : list of ReportingStage
        Of this rank.
    plan : Plan
        Its schedule and number of micro-batches.
    """

    def __init__(self, stages: list[ReportingStage], plan: Plan) -> None:
        self.stages = stages
        self.loss: LossFunction | None = None
        self.schedule = _schedule(stages, plan, self._loss)

    def run(self, inputs: Tensor, labels: Tensor, *, loss: LossFunction, flights: Flights) -> None:
        """Run the micro-batches of one step by the schedule.

        Parameters
        ----------
        inputs, labels : Tensor
            Shape (micro-batches * mbs, seq); used on the first and the last stage.
        loss : callable
            Of logits and labels of one micro-batch, called on the last stage.
        flights : Flights
            What is told.
        """
        self.loss = loss
        for c, stage in enumerate(self.stages):
            stage.report_to(flights, c)
        given = (inputs,) if self.stages[0].is_first else ()
        self.schedule.step(*given, target=labels if self.stages[-1].is_last else None, return_outputs=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Ask this step's loss."""
        assert self.loss is not None
        return self.loss(logits, labels)


def _schedule(
    stages: list[ReportingStage], plan: Plan, loss: LossFunction
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """Make the schedule; the loss already divides by the tokens of the global batch, so it must not divide again."""
    count = plan.num_microbatches
    if plan.schedule == Schedule.INTERLEAVED:
        return ScheduleInterleaved1F1B([*stages], count, loss_fn=loss, scale_grads=False)
    kind = ScheduleGPipe if plan.schedule == Schedule.GPIPE else Schedule1F1B
    return kind(stages[0], count, loss_fn=loss, scale_grads=False)
