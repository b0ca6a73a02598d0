"""Redundant experts: the parameters that copies of experts add to each rank, and keeping the copies alike."""

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.collective import collective_line
from ap_search.cost.context import CostContext
from ap_search.cost.data_parallel import ReplicaComm
from ap_search.spec.blocks import Model, MoeFfn
from ap_search.spec.job import PlacementPolicy
from ap_search.spec.machine import Collective
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]


def redundant_shares(model: Model, redundant_experts: int) -> FloatArray:
    """Share of each block's routed experts that are copies of others.

    Parameters
    ----------
    model : Model
        Layer kinds.
    redundant_experts : int
        Copies that each MoE layer holds beside its own experts, over one expert-parallel group.

    Returns
    -------
    FloatArray
        Shape (blocks,) in block order (layer kinds, embedding, MTP module, head): R/(E + R), 0 without routed experts.
    """
    kinds = [
        redundant_experts / (kind.ffn.num_experts + redundant_experts) if isinstance(kind.ffn, MoeFfn) else 0.0
        for kind in model.kinds
    ]
    return np.array([*kinds, 0.0, kinds[model.mtp_index], 0.0])


def redundant_sync_bytes(context: CostContext, *, params: Quantity, split: Quantity) -> Quantity:
    """Bytes that one rank sends in one step to keep copies of experts alike.

    Parameters
    ----------
    context : CostContext
        Bytes per gradient.
    params : Quantity
        Parameters of the copies on this rank: R/ep experts per layer, a count.
    split : Quantity
        Ranks of the expert data-parallel group that share the work: those that split the optimizer state.

    Returns
    -------
    Quantity
        Twice the copies' gradients: the rank reduces with the originals of its R/ep copies, and as many of its own
        experts have copies elsewhere.

    Notes
    -----
    A1. An all-reduce among c copies sends 2(c-1)/c gradients each, 2(c-1) together: 2 R experts over all ranks,
        whichever experts are copied. The mean over ranks is taken.
    A2. After the reduction over edp, each rank reduces only its own shard.

    Source: counted by hand; EPLB itself serves inference and synchronises nothing.
    """
    return 2.0 * params * context.software.gradient_bytes / split


def redundant_comm(
    context: CostContext, *, params: Quantity, split: Quantity, ep: Quantity, domains: Quantity
) -> ReplicaComm:
    """Gradient synchronisation of copies of experts on one rank, seconds and bytes, once per step.

    Parameters
    ----------
    context : CostContext
        Collective constants, bytes per gradient, placement.
    params, split : Quantity
        As for `redundant_sync_bytes`.
    ep, domains : Quantity
        Expert-parallel degree; scale-up domains that one group spans.

    Returns
    -------
    ReplicaComm
        All-reduces between two ranks, in one domain or across.

    Notes
    -----
    A1. Copies lie in other domains than their originals where a group spans several, unless EPLB keeps them inside:
        where the router's groups divide over the domains.
    A2. Experts that are moved when a balancer changes its mind are not charged.

    Source: as `redundant_sync_bytes`; docs/cost-model/imbalance.md.
    """
    moe = context.model.moe
    kept_inside = context.job.placement is PlacementPolicy.EPLB and moe is not None
    groups = moe.num_groups if moe is not None else 1
    crosses = np.greater(domains, 1) & ~(kept_inside & (np.mod(groups, domains) == 0))
    line = collective_line(
        context.machine,
        Collective.ALL_REDUCE,
        ranks=2,
        ranks_per_domain=np.where(crosses, 1, 2),
        domains=np.where(crosses, 2, 1),
    )
    sent = np.where(np.greater(ep, 1), redundant_sync_bytes(context, params=params, split=split), 0.0)
    none = np.zeros_like(sent)
    return ReplicaComm(
        forward_s=none,
        backward_s=none,
        reduce_s=np.where(sent > 0, line.time_s(sent), 0.0),
        gather_s=none,
        sent_each_bytes=none,
        sent_once_bytes=sent,
    )
