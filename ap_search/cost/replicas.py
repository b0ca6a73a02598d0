"""Data-parallel groups of dense parameters and of experts: sizes, splits, coefficients of their collectives."""

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.collective import CollectiveLine, collective_line
from ap_search.cost.context import CostContext
from ap_search.cost.shapes import distinct_rows
from ap_search.cost.state import ParamBytes, ShardDegrees, param_bytes, shard_degrees
from ap_search.plan.mesh import Placement, plan_placement
from ap_search.plan.plan import Sharding
from ap_search.plan.table import PlanTable
from ap_search.spec.machine import Collective, Machine

IntArray = NDArray[np.int64]


Columns = TypeVar("Columns", CollectiveLine, ShardDegrees, ParamBytes)


def _rows_of(columns: Columns, rows: IntArray) -> Columns:
    """Select some plans of a record whose fields are arrays over plans."""
    return type(columns)(**{part.name: np.asarray(getattr(columns, part.name))[rows] for part in fields(columns)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaLines:
    """Coefficients of the collectives of one data-parallel group, arrays over plans.

    `gather` and `scatter` run over the ranks that shard (one replica under HSDP, otherwise all), `reduce` over all
    ranks, `between` over the replicas of HSDP.
    """

    gather: CollectiveLine
    scatter: CollectiveLine
    reduce: CollectiveLine
    between: CollectiveLine

    def take(self, rows: IntArray) -> "ReplicaLines":
        """Select some plans."""
        return ReplicaLines(**{part.name: _rows_of(getattr(self, part.name), rows) for part in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaGroup:
    """The data-parallel group of one class of parameters (dense: dp x cp, experts: edp), arrays over plans.

    `size` ranks in all; HSDP cuts them into replicas of `inner`, each in one domain; `shard` ranks split what is split:
    `inner` under HSDP, otherwise `size`; `kept` are bytes per parameter, `degrees` how they are split.
    """

    size: IntArray
    inner: IntArray
    shard: IntArray
    degrees: ShardDegrees
    kept: ParamBytes
    lines: ReplicaLines

    def take(self, rows: IntArray) -> "ReplicaGroup":
        """Select some plans."""
        return ReplicaGroup(
            size=self.size[rows],
            inner=self.inner[rows],
            shard=self.shard[rows],
            degrees=_rows_of(self.degrees, rows),
            kept=_rows_of(self.kept, rows),
            lines=self.lines.take(rows),
        )


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


def replica_groups(context: CostContext, table: PlanTable) -> tuple[ReplicaGroup, ReplicaGroup]:
    """Describe the data-parallel groups of dense parameters and of experts.

    Parameters
    ----------
    context : CostContext
        Machine and job: which ranks share a scale-up domain.
    table : PlanTable
        Plans.

    Returns
    -------
    tuple of ReplicaGroup
        Over dp x cp, and over edp.
    """
    world, domain = context.job.devices, context.machine.domain_size(context.job.devices)
    dense = plan_placement(table, group="dp-cp", domain_size=domain, world=world)
    expert = plan_placement(table, group="edp", domain_size=domain, world=world)
    replicas = hsdp_replicas(table, dense)
    return (
        _group(context, table, size=table.dp * table.cp, place=dense, replicas=replicas),
        _group(context, table, size=table.edp, place=expert, replicas=replicas),
    )


def _group(
    context: CostContext, table: PlanTable, *, size: IntArray, place: Placement, replicas: IntArray
) -> ReplicaGroup:
    """One group; coefficients are worked out once per distinct size and placement."""
    inner = np.maximum(size // replicas, 1)
    hybrid = table.sharding == Sharding.HSDP
    columns = (size, inner, place.members_per_domain, place.domains, hybrid.astype(np.int64))
    first, position = distinct_rows(columns)
    degrees = shard_degrees(table.sharding, group=size, inner=inner)
    return ReplicaGroup(
        size=size,
        inner=inner,
        shard=np.where(hybrid, inner, size),
        degrees=degrees,
        kept=param_bytes(context.software, degrees),
        lines=_lines(context.machine, *(column[first] for column in columns)).take(position),
    )


def _lines(
    machine: Machine, size: IntArray, inner: IntArray, together: IntArray, domains: IntArray, hybrid: IntArray
) -> ReplicaLines:
    """Coefficients per distinct group."""
    shard = np.where(hybrid, inner, size)
    shard_together = np.minimum(shard, together)
    shard_domains = np.where(hybrid, -(-inner // np.maximum(shard_together, 1)), domains)
    replicas = size // inner

    def line(collective: Collective, ranks: IntArray, inside: IntArray, spanned: IntArray) -> CollectiveLine:
        return collective_line(machine, collective, ranks=ranks, ranks_per_domain=inside, domains=spanned)

    return ReplicaLines(
        gather=line(Collective.ALL_GATHER, shard, shard_together, shard_domains),
        scatter=line(Collective.REDUCE_SCATTER, shard, shard_together, shard_domains),
        reduce=line(Collective.ALL_REDUCE, size, together, domains),
        between=line(Collective.ALL_REDUCE, replicas, np.ones_like(replicas), replicas),
    )
