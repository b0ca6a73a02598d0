"""Data-parallel communication and the optimizer of one stage: seconds and bytes per micro-batch and per step."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.context import CostContext, exposed_s
from ap_search.cost.replicas import ReplicaGroup
from ap_search.plan.plan import Sharding
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaComm:
    """Seconds alone and bytes sent of one class of parameters on one rank.

    `forward_s`, `backward_s` per micro-batch (gathers and reductions of ZeRO-2, ZeRO-3 and HSDP), `reduce_s` and
    `gather_s` once per step; `sent_each_bytes` per micro-batch, `sent_once_bytes` per step.
    """

    forward_s: Quantity
    backward_s: Quantity
    reduce_s: Quantity
    gather_s: Quantity
    sent_each_bytes: Quantity
    sent_once_bytes: Quantity

    def seen_by(self, share: float) -> "ReplicaComm":
        """Scale what each micro-batch costs to the share of micro-batches that reach a parameter (DualPipe: half)."""
        return replace(
            self,
            forward_s=self.forward_s * share,
            backward_s=self.backward_s * share,
            sent_each_bytes=self.sent_each_bytes * share,
        )

    def plus(self, other: "ReplicaComm") -> "ReplicaComm":
        """Add another class of parameters, communicated one after the other."""
        return ReplicaComm(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            reduce_s=self.reduce_s + other.reduce_s,
            gather_s=self.gather_s + other.gather_s,
            sent_each_bytes=self.sent_each_bytes + other.sent_each_bytes,
            sent_once_bytes=self.sent_once_bytes + other.sent_once_bytes,
        )


def replica_comm(context: CostContext, *, params: Quantity, sharding: Quantity, group: ReplicaGroup) -> ReplicaComm:
    """Data-parallel communication of `params` parameters of one rank, seconds and bytes.

    Parameters
    ----------
    context : CostContext
        Collective constants; bytes per gradient and weight.
    params : Quantity
        Parameters of this rank before sharding, a count.
    sharding : Quantity
        Sharding codes.
    group : ReplicaGroup
        Ranks that hold copies or shards of the same parameters.

    Returns
    -------
    ReplicaComm
        none: one all-reduce of gradients per step. ZeRO-1: reduce-scatter of gradients and all-gather of weights per
        step. ZeRO-2: the reduce-scatter per micro-batch. ZeRO-3: gathers in forward and backward and a reduce-scatter
        per micro-batch. HSDP: as ZeRO-3 inside a replica, and an all-reduce of the shard between replicas per step.

    Notes
    -----
    A1. Ring bytes: (d-1)/d of the buffer per reduce-scatter or all-gather, twice that per all-reduce.
    A2. Weights are gathered in 16 bits whatever they are kept in.
    A3. Gradients travel in buckets, one after the other, each with its latency; weights in as many.

    Source: Megatron-LM `distributed_data_parallel.py`, `docs/user-guide/features/megatron_fsdp.md`; TorchTitan FSDP2.
    """
    gradient, weight = params * context.software.gradient_bytes, params * 2.0
    hybrid, full = sharding == Sharding.HSDP, sharding == Sharding.ZERO3
    replicas = group.size // group.inner
    away = (group.shard - 1.0) / group.shard
    buckets = _buckets(context, gradient)
    gather = np.where(group.shard > 1, group.lines.gather.time_s(weight * away, messages=buckets), 0.0)
    scatter = np.where(group.shard > 1, group.lines.scatter.time_s(gradient * away, messages=buckets), 0.0)
    everywhere = 2.0 * gradient * (group.size - 1.0) / group.size
    reduce_all = np.where(group.size > 1, group.lines.reduce.time_s(everywhere, messages=buckets), 0.0)
    outside = 2.0 * gradient / group.inner * (replicas - 1.0) / replicas
    between = np.where(replicas > 1, group.lines.between.time_s(outside), 0.0)
    each = full | hybrid
    scattered_each = each | (sharding == Sharding.ZERO2)
    once = np.where(
        hybrid, between, np.where(sharding == Sharding.NONE, reduce_all, np.where(scattered_each, 0.0, scatter))
    )
    sharded_once = np.where(sharding == Sharding.NONE, 2.0 * gradient, weight + np.where(scattered_each, 0.0, gradient))
    return ReplicaComm(
        forward_s=np.where(each, gather, 0.0),
        backward_s=np.where(each, gather, 0.0) + np.where(scattered_each, scatter, 0.0),
        reduce_s=once,
        gather_s=np.where(each | (sharding == Sharding.NONE), 0.0, gather),
        sent_each_bytes=away * (np.where(each, 2.0 * weight, 0.0) + np.where(scattered_each, gradient, 0.0)),
        sent_once_bytes=np.where(hybrid, outside, np.where(full, 0.0, away * sharded_once)),
    )


def _buckets(context: CostContext, size_bytes: Quantity) -> Quantity:
    """Messages that gradients of this size are reduced in, at least one."""
    bucket = context.software.gradient_bucket_bytes
    return np.maximum(np.ceil(size_bytes / bucket), 1.0) if bucket else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExposedReplicaComm:
    """Exposed seconds of data-parallel communication on one stage: per micro-batch and once per step."""

    each_s: Quantity
    once_s: Quantity


def exposed_replica_comm(
    context: CostContext, comm: ReplicaComm, *, forward_s: Quantity, backward_s: Quantity
) -> ExposedReplicaComm:
    """Data-parallel seconds that the compute of a micro-batch does not hide.

    Parameters
    ----------
    context : CostContext
        Overlap ratios of the software.
    comm : ReplicaComm
        Communication alone.
    forward_s, backward_s : Quantity
        Forward and backward of one micro-batch on the stage.

    Returns
    -------
    ExposedReplicaComm
        Gathers and reductions of each micro-batch beside that micro-batch; the step's reduction beside the last
        backward, its gather beside the first forward.

    Notes
    -----
    A1. The last micro-batch's backward is the only one whose gradients can be reduced under ZeRO-1.

    Source: Megatron-LM --overlap-grad-reduce, --overlap-param-gather; FSDP prefetch.
    """
    software = context.software
    forward = exposed_s(comm.forward_s, compute_s=forward_s, overlap_ratio=software.fsdp_overlap_ratio)
    backward = exposed_s(comm.backward_s, compute_s=backward_s, overlap_ratio=software.fsdp_overlap_ratio)
    reduce = exposed_s(comm.reduce_s, compute_s=backward_s, overlap_ratio=software.dp_reduce_overlap_ratio)
    gather = exposed_s(comm.gather_s, compute_s=forward_s, overlap_ratio=software.dp_gather_overlap_ratio)
    return ExposedReplicaComm(each_s=forward + backward, once_s=reduce + gather)


def optimizer_time_s(context: CostContext, params: Quantity) -> Quantity:
    """Time of the optimizer step with the gradient norm on one rank, seconds.

    Parameters
    ----------
    context : CostContext
        Memory bandwidth and bytes per parameter.
    params : Quantity
        Parameters whose optimizer state this rank keeps, a count.

    Returns
    -------
    Quantity
        Gradients read twice, master weights and moments read and written, weights written.

    Notes
    -----
    A1. Fused Adam: one pass over all tensors.

    Source: traffic counted by hand; Megatron-LM `optimizer/distrib_optimizer.py`.
    """
    software = context.software
    state = software.master_bytes + software.moment_bytes
    return context.memory_bound_s(params * (2 * software.gradient_bytes + 2 * state + software.weight_bytes))


def gradient_addition_s(context: CostContext, params: Quantity) -> Quantity:
    """Time of adding a micro-batch's 16-bit gradients to the main ones on one rank, seconds.

    Parameters
    ----------
    context : CostContext
        Memory bandwidth, bytes of gradients and of their 16-bit copy.
    params : Quantity
        Parameters of this rank, a count.

    Returns
    -------
    Quantity
        0 where products add to the main gradients themselves (no copy is kept); otherwise the copy is read, the main
        gradients are read and written.

    Source: huggingface/nanotron `optim/gradient_accumulator.py`; DeepSpeed `runtime/bf16_optimizer.py`;
    Megatron-LM fuses the addition into the products (gradient_accumulation_fusion).
    """
    software = context.software
    moved = software.gradient_copy_bytes + 2 * software.gradient_bytes if software.gradient_copy_bytes else 0
    return context.memory_bound_s(params * moved)
