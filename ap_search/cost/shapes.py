"""What one rank sees of one micro-batch under each plan: tokens, splits and where its groups lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.mesh import Placement, plan_placement
from ap_search.plan.table import IntArray, PlanTable
from ap_search.spec.job import Job
from ap_search.spec.machine import Machine

FloatArray = NDArray[np.float64]
BLOCK_COLUMNS = ("tp", "cp", "ep", "etp", "mbs", "sequence_parallel", "dispatcher", "recompute")
CODE_LIMIT = 2**62


def distinct_rows(columns: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """Find one row per distinct combination of some columns: a kernel runs once for plans that look alike to it.

    Parameters
    ----------
    columns : sequence of array of int
        Columns that the kernel depends on, each of shape (plans,), values >= 0.

    Returns
    -------
    tuple of array
        Row numbers of the distinct combinations, and for each plan the position of its combination among them.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    reach = 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if reach * width > CODE_LIMIT:
            known, code = np.unique(code, return_inverse=True)
            reach = len(known)
        code = code * width + column
        reach *= width
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """Arrays of shape (plans,): degrees, tokens, and placements of the groups that one block talks over.

    `tokens` are those of one micro-batch on one context-parallel rank; `local_tokens` what one tensor-parallel rank
    holds of them between blocks (a share with sequence parallelism, all of them without).
    """

    tp: IntArray
    cp: IntArray
    ep: IntArray
    etp: IntArray
    mbs: IntArray
    sequence_parallel: IntArray
    dispatcher: IntArray
    recompute: IntArray
    seq_len: int
    tokens: FloatArray
    local_tokens: FloatArray
    tp_place: Placement
    cp_place: Placement
    ep_place: Placement
    etp_place: Placement
    group_place: Placement

    def recomputes(self, module: int) -> NDArray[np.bool_]:
        """Whether each plan recomputes a module (a `Recompute` bit)."""
        chosen: NDArray[np.bool_] = (self.recompute & module) != 0
        return chosen


def block_shapes(machine: Machine, job: Job, table: PlanTable) -> Shapes:
    """Read the shapes of one micro-batch out of a table of plans (tokens: counts).

    Parameters
    ----------
    machine : Machine
        Its scale-up domain decides which members of a group are neighbours.
    job : Job
        Devices and sequence length.
    table : PlanTable
        Plans.

    Returns
    -------
    Shapes
        One entry per plan.

    Notes
    -----
    A1. Context parallelism splits each sequence evenly; sequence parallelism splits tokens evenly over tp.
    """
    domain = machine.domain_size(job.devices)
    tokens = table.mbs * job.seq_len / table.cp
    split = np.where(table.sequence_parallel == 1, table.tp, 1)
    place = {
        group: plan_placement(table, group=group, domain_size=domain, world=job.devices)
        for group in ("tp", "cp", "ep", "etp", "tp-ep")
    }
    return Shapes(
        tp=table.tp,
        cp=table.cp,
        ep=table.ep,
        etp=table.etp,
        mbs=table.mbs,
        sequence_parallel=table.sequence_parallel,
        dispatcher=table.dispatcher,
        recompute=table.recompute,
        seq_len=job.seq_len,
        tokens=tokens,
        local_tokens=tokens / split,
        tp_place=place["tp"],
        cp_place=place["cp"],
        ep_place=place["ep"],
        etp_place=place["etp"],
        group_place=place["tp-ep"],
    )
