"""Plans that share a layout and a schedule: what their stages are priced from, gathered once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext
from ap_search.cost.prepared import Prepared
from ap_search.cost.replicas import ReplicaGroup
from ap_search.cost.state import BlockParams
from ap_search.plan.plan import Layout, Schedule
from ap_search.plan.table import PlanTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanGroup:
    """Some plans of a table that share a layout and a schedule.

    Arrays named as in `Prepared` have shape (blocks, shapes) over the shapes that these plans have; `shape_of` and
    `params_of` map each plan to its column there and to its row of `params`. `tokens`, `local_tokens`, `tp`, `domains`
    (of the dispatch group) are arrays over shapes.
    """

    context: CostContext
    prepared: Prepared
    rows: IntArray
    table: PlanTable
    layout: Layout
    schedule: Schedule
    shape_of: IntArray
    params: BlockParams
    params_of: IntArray
    dense: ReplicaGroup
    expert: ReplicaGroup
    tokens: FloatArray
    local_tokens: FloatArray
    tp: IntArray
    domains: IntArray
    saved_bytes: FloatArray
    state_bytes: FloatArray
    recomputed_bytes: FloatArray
    transient_bytes: FloatArray
    exchange_bytes: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    weight_grad_s: FloatArray
    paired_s: FloatArray


def plan_group(prepared: Prepared, rows: IntArray) -> PlanGroup:
    """Gather what the stages of some plans are priced from.

    Parameters
    ----------
    prepared : Prepared
        Block costs and parameters of the whole table.
    rows : array of int
        Rows of the table that share a layout and a schedule, at least one.

    Returns
    -------
    PlanGroup
        Entries in the order of `rows`.
    """
    table = prepared.table.take(rows)
    used, shape_of = np.unique(prepared.shape_of[rows], return_inverse=True)
    alike, params_of = np.unique(prepared.params_of[rows], return_inverse=True)
    shapes, params = prepared.blocks.shapes, prepared.params
    return PlanGroup(
        context=prepared.context,
        prepared=prepared,
        rows=rows,
        table=table,
        layout=table.layouts[int(table.layout[0])],
        schedule=Schedule(int(table.schedule[0])),
        shape_of=shape_of,
        params=BlockParams(dense=params.dense[alike], router=params.router[alike], expert=params.expert[alike]),
        params_of=params_of,
        dense=prepared.dense.take(rows),
        expert=prepared.expert.take(rows),
        tokens=shapes.tokens[used],
        local_tokens=shapes.local_tokens[used],
        tp=shapes.tp[used],
        domains=np.asarray(shapes.group_place.domains)[used],
        saved_bytes=prepared.saved_bytes[:, used],
        state_bytes=prepared.state_bytes[:, used],
        recomputed_bytes=prepared.recomputed_bytes[:, used],
        transient_bytes=prepared.transient_bytes[:, used],
        exchange_bytes=prepared.exchange_bytes[:, used],
        forward_s=prepared.forward_s[:, used],
        backward_s=prepared.backward_s[:, used],
        weight_grad_s=prepared.weight_grad_s[:, used],
        paired_s=prepared.paired_s[:, :, used],
    )
