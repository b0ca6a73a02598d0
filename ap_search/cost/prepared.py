"""What all stages of all plans are priced from: block costs per distinct shape, parameters and groups per plan."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.blocks import BlockCosts, block_costs, kinds_by_load
from ap_search.cost.context import CostContext
from ap_search.cost.replicas import ReplicaGroup, replica_groups
from ap_search.cost.shapes import BLOCK_COLUMNS, distinct_rows
from ap_search.cost.state import BlockParams, block_params
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Model

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
PARAM_COLUMNS = ("tp", "ep", "etp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Costs that do not depend on stages.

    Block arrays have shape (blocks, shapes); `shape_of` maps a plan to its shape, `params_of` to its row of `params`.
    `saved`, `state`, `recomputed`, `transient`, `exchange` are bytes, `forward`, `backward`, `weight_grad` seconds of
    one micro-batch.
    """

    context: CostContext
    model: Model
    table: PlanTable
    blocks: BlockCosts
    shape_of: IntArray
    params: BlockParams
    params_of: IntArray
    dense: ReplicaGroup
    expert: ReplicaGroup
    saved: FloatArray
    state: FloatArray
    recomputed: FloatArray
    transient: FloatArray
    exchange: FloatArray
    forward: FloatArray
    backward: FloatArray
    weight_grad: FloatArray
    paired: FloatArray


def prepare(context: CostContext, table: PlanTable) -> Prepared:
    """Price all block kinds of a table of plans, once per distinct shape.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    table : PlanTable
        Plans.

    Returns
    -------
    Prepared
        What `plan_group` reads.
    """
    model, load_rows = kinds_by_load(context.model, context.job.load)
    context = CostContext(model=model, machine=context.machine, software=context.software, job=context.job)
    first, shape_of = distinct_rows([getattr(table, name) for name in BLOCK_COLUMNS])
    blocks = block_costs(context, table.take(first), load_rows)
    alike, params_of = distinct_rows([getattr(table, name) for name in PARAM_COLUMNS])
    dense, expert = replica_groups(context, table)
    return Prepared(
        context=context,
        model=model,
        table=table,
        blocks=blocks,
        shape_of=shape_of,
        params=block_params(model, context.software, table.take(alike)),
        params_of=params_of,
        dense=dense,
        expert=expert,
        saved=blocks.bytes_of("saved"),
        state=blocks.bytes_of("dispatch_state"),
        recomputed=blocks.bytes_of("recomputed"),
        transient=blocks.bytes_of("transient"),
        exchange=blocks.bytes_of("dispatch_transient"),
        forward=blocks.seconds("forward"),
        backward=blocks.seconds("backward"),
        weight_grad=blocks.seconds("weight_grad"),
        paired=np.stack([time.paired for time in blocks.times]),
    )
