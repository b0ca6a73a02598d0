"""Stages of a layout: which blocks each pipeline stage holds, equal neighbours written once."""

from dataclasses import dataclass, replace

import numpy as np

from ap_search.plan.layout import block_counts
from ap_search.plan.plan import Layout, Schedule
from ap_search.plan.table import IntArray
from ap_search.spec.blocks import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRun:
    """Consecutive stages that hold the same blocks.

    `depth` is the stage whose micro-batches in flight it keeps (its mirror's in the second half of DualPipe).
    `chunk_counts` has shape (chunks, blocks): blocks of each chunk of one such stage; under DualPipe the two "chunks"
    are the two stages that a device holds, each of which sees half of the micro-batches (`share`).
    """

    stage: int
    depth: int
    length: int
    chunk_counts: IntArray
    share: float

    @property
    def counts(self) -> IntArray:
        """Blocks of the whole stage, shape (blocks,)."""
        total: IntArray = self.chunk_counts.sum(axis=0)
        return total


def stage_runs(model: Model, layout: Layout, *, schedule: Schedule, every: bool) -> tuple[StageRun, ...]:
    """List the stages of a layout, runs of equal neighbours as one entry.

    Parameters
    ----------
    model : Model
        Layers and their kinds.
    layout : Layout
        Layers per virtual stage.
    schedule : Schedule
        Interleaved keeps chunks apart; under DualPipe device r holds stages r and pp-1-r.
    every : bool
        Whether each stage is wanted as an entry of its own.

    Returns
    -------
    tuple of StageRun
        In stage order; lengths sum to pp. The first stage of a run keeps the most micro-batches in flight.
    """
    counts = block_counts(model, layout)
    if schedule != Schedule.INTERLEAVED:
        counts = counts.sum(axis=0, keepdims=True)
    runs: list[StageRun] = []
    for stage in range(layout.pp):
        depth = min(stage, layout.pp - 1 - stage) if schedule == Schedule.DUALPIPE else stage
        content = counts[0, [depth, layout.pp - 1 - depth]] if schedule == Schedule.DUALPIPE else counts[:, stage]
        share = 0.5 if schedule == Schedule.DUALPIPE else 1.0
        last = runs[-1] if runs else None
        # Further devices keep more of one stage's micro-batches and fewer of the other's: alike if both hold the same.
        alike = schedule != Schedule.DUALPIPE or np.array_equal(content[0], content[1])
        if last is not None and not every and alike and np.array_equal(last.chunk_counts, content):
            runs[-1] = replace(last, length=last.length + 1)
        else:
            runs.append(StageRun(stage=stage, depth=depth, length=1, chunk_counts=content, share=share))
    return tuple(runs)
