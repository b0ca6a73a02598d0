"""What all stages of all plans are priced from: block costs per distinct shape, parameters and groups per plan."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.blocks import BlockCosts, block_costs, kinds_by_load
from ap_search.cost.context import CostContext
from ap_search.cost.shapes import BLOCK_COLUMNS, distinct_rows
from ap_search.cost.state import BlockParams, ShardDegrees, block_params, shard_degrees
from ap_search.plan.mesh import Placement, plan_placement
from ap_search.plan.plan import Sharding
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import Model

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaGroup:
    """The data-parallel group of one class of parameters (dense: dp x cp, experts: edp), arrays over plans.

    `size` ranks lie as `place` says; HSDP cuts them into `size / inner` replicas, each of which lies in one domain.
    """

    size: IntArray
    place: Placement
    inner: IntArray
    degrees: ShardDegrees

    def degrees_of(self, rows: IntArray) -> ShardDegrees:
        """Select the split of some plans."""
        degrees = self.degrees
        return ShardDegrees(
            weights=np.asarray(degrees.weights)[rows],
            gradients=np.asarray(degrees.gradients)[rows],
            optimizer=np.asarray(degrees.optimizer)[rows],
        )

    def take(self, rows: IntArray) -> "ReplicaGroup":
        """Select some plans."""
        place = Placement(self.place.members_per_domain[rows], self.place.domains[rows])
        return ReplicaGroup(size=self.size[rows], place=place, inner=self.inner[rows], degrees=self.degrees_of(rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Costs that do not depend on stages.

    Block arrays have shape (blocks, shapes); `shape_of` maps a plan to its shape. `saved`, `state`, `recomputed`,
    `transient`, `exchange` are bytes, `forward`, `backward`, `weight_grad` seconds of one micro-batch.
    """

    context: CostContext
    model: Model
    table: PlanTable
    blocks: BlockCosts
    shape_of: IntArray
    params: BlockParams
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


def hsdp_replicas(table: PlanTable, place: Placement) -> IntArray:
    """Replicas that HSDP keeps: one per scale-up domain that the dp-cp group spans, a count per plan.

    Parameters
    ----------
    table : PlanTable
        Plans.
    place : Placement
        Where their dp-cp groups lie.

    Returns
    -------
    IntArray
        1 for every other sharding.

    Notes
    -----
    A1. Weights are sharded inside a domain and replicated between domains, the usual choice of HSDP.

    Source: PyTorch FSDP HYBRID_SHARD; Megatron-LM `num_distributed_optimizer_instances`.
    """
    return np.where(table.sharding == Sharding.HSDP, place.domains, 1).astype(np.int64)


def _groups(context: CostContext, table: PlanTable) -> tuple[ReplicaGroup, ReplicaGroup]:
    """Data-parallel groups of dense parameters and of experts."""
    world, domain = context.job.devices, context.machine.domain_size(context.job.devices)
    dense_place = plan_placement(table, group="dp-cp", domain_size=domain, world=world)
    expert_place = plan_placement(table, group="edp", domain_size=domain, world=world)
    replicas = hsdp_replicas(table, dense_place)
    groups = []
    for size, place in ((table.dp * table.cp, dense_place), (table.edp, expert_place)):
        inner = np.maximum(size // replicas, 1)
        degrees = shard_degrees(table.sharding, group=size, inner=inner)
        groups.append(ReplicaGroup(size=size, place=place, inner=inner, degrees=degrees))
    return groups[0], groups[1]


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
        What `stage_bytes` and `stage_seconds` read.
    """
    model, load_rows = kinds_by_load(context.model, context.job.load)
    context = CostContext(model=model, machine=context.machine, software=context.software, job=context.job)
    first, shape_of = distinct_rows(table, BLOCK_COLUMNS)
    blocks = block_costs(context, table.take(first), load_rows)
    dense, expert = _groups(context, table)
    return Prepared(
        context=context,
        model=model,
        table=table,
        blocks=blocks,
        shape_of=shape_of,
        params=block_params(model, context.software, table),
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
    )
