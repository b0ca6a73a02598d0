"""Stages of a layout: which blocks each pipeline stage holds, equal neighbours written once."""

from dataclasses import dataclass

import numpy as np

from ap_search.plan.layout import block_counts
from ap_search.plan.plan import Layout
from ap_search.plan.table import IntArray
from ap_search.spec.blocks import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRun:
    """Consecutive stages that hold the same blocks.

    `chunk_counts` has shape (chunks, blocks): blocks of each chunk of one such stage; under DualPipe the two "chunks"
    are the two stages that a device holds, each of which sees half of the micro-batches (`share`).
    """

    stage: int
    length: int
    chunk_counts: IntArray
    share: float

    @property
    def counts(self) -> IntArray:
        """Blocks of the whole stage, shape (blocks,)."""
        total: IntArray = self.chunk_counts.sum(axis=0)
        return total


def stage_runs(model: Model, layout: Layout, *, dualpipe: bool, every: bool) -> tuple[StageRun, ...]:
    """List the stages of a layout, runs of equal neighbours as one entry.

    Parameters
    ----------
    model : Model
        Layers and their kinds.
    layout : Layout
        Layers per virtual stage.
    dualpipe : bool
        Whether device r holds stages r and pp-1-r.
    every : bool
        Whether each stage is wanted as an entry of its own.

    Returns
    -------
    tuple of StageRun
        In stage order; lengths sum to pp. The first stage of a run keeps the most micro-batches in flight.
    """
    counts = block_counts(model, layout)
    if dualpipe:
        paired = [np.stack([counts[0, stage], counts[0, layout.pp - 1 - stage]]) for stage in range(layout.pp)]
        half = layout.pp // 2
        # Mirror devices hold the same two stages: the first half's order stands for both.
        contents = [paired[min(stage, layout.pp - 1 - stage)] for stage in range(layout.pp)] if half else paired
    else:
        contents = [counts[:, stage] for stage in range(layout.pp)]
    runs: list[StageRun] = []
    for stage, content in enumerate(contents):
        last = runs[-1] if runs else None
        if last is not None and not every and np.array_equal(last.chunk_counts, content):
            runs[-1] = StageRun(stage=last.stage, length=last.length + 1, chunk_counts=content, share=last.share)
        else:
            runs.append(StageRun(stage=stage, length=1, chunk_counts=content, share=0.5 if dualpipe else 1.0))
    return tuple(runs)
