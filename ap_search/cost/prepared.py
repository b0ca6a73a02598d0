"""What all stages of all plans are priced from: block costs per distinct shape, parameters and groups per plan."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.blocks import BlockCosts, block_costs, groups_loads, kinds_by_load
from ap_search.cost.context import CostContext
from ap_search.cost.replicas import ReplicaGroup, replica_groups
from ap_search.cost.shapes import BLOCK_COLUMNS, block_shapes, distinct_rows
from ap_search.cost.state import BlockParams, block_params
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Model
from ap_search.spec.job import PlacementPolicy

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BALANCERS = (PlacementPolicy.EPLB, PlacementPolicy.LPLB)
PARAM_COLUMNS = ("tp", "ep", "etp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Costs that do not depend on stages.

    Block arrays, of one micro-batch, have shape (blocks, shapes); `shape_of` maps a plan to its shape, `params_of` to
    its row of `params`.
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
    saved_bytes: FloatArray
    state_bytes: FloatArray
    recomputed_bytes: FloatArray
    transient_bytes: FloatArray
    exchange_bytes: FloatArray
    forward_s: FloatArray
    backward_s: FloatArray
    weight_grad_s: FloatArray
    paired_s: FloatArray


def with_rank_loads(context: CostContext, table: PlanTable) -> CostContext:
    """Place experts once for all groups of a table that is then priced in parts, where placing them takes long.

    Parameters
    ----------
    context : CostContext
        Model, machine, software, job.
    table : PlanTable
        Plans.

    Returns
    -------
    CostContext
        With the loads of all ranks for a balancer's placement, unchanged for others.
    """
    if context.job.load.shares is None or context.job.placement not in BALANCERS or not len(table):
        return context
    first, _ = distinct_rows([getattr(table, name) for name in BLOCK_COLUMNS])
    shapes = block_shapes(context.machine, context.job, table.take(first))
    return replace(context, rank_loads=groups_loads(context, shapes))


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
    context = replace(context, model=model)
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
        params=block_params(
            model, context.software, table.take(alike), redundant_experts=context.job.redundant_experts
        ),
        params_of=params_of,
        dense=dense,
        expert=expert,
        saved_bytes=blocks.bytes_of("saved"),
        state_bytes=blocks.bytes_of("dispatch_state"),
        recomputed_bytes=blocks.bytes_of("recomputed"),
        transient_bytes=blocks.bytes_of("transient"),
        exchange_bytes=blocks.bytes_of("dispatch_transient"),
        forward_s=blocks.seconds("forward"),
        backward_s=blocks.seconds("backward"),
        weight_grad_s=blocks.seconds("weight_grad"),
        paired_s=np.stack([time.paired for time in blocks.times]),
    )
