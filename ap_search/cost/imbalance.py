"""Imbalance: how much more than its share the busiest rank of an expert-parallel group receives, and sends."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.placement import eplb_placement, lplb_edges
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Job, Load, PlacementPolicy

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
MinMaxLoad = Callable[[FloatArray, IntArray, FloatArray], float]
"""Solves LPLB's linear program: loads of ranks, edges between them, capacities of the edges -> the least maximum."""

# Domains that a group spans fit below it, so that a degree and its domains make one number.
_DOMAIN_LIMIT = 2**24


def worst_rank_ratio(shares: FloatArray, ep: int) -> FloatArray:
    """Load of the busiest expert-parallel rank over the mean of all, per row of shares; 1 is balanced.

    Parameters
    ----------
    shares : FloatArray
        Shares of routed token copies per expert, shape (rows, num_experts), at least 0, no row all zero; or
        (groups, rows, num_experts) for expert-parallel groups that differ, of which the worst counts.
    ep : int
        Expert-parallel degree, 1 to num_experts.

    Returns
    -------
    FloatArray
        Shape (rows,), 1 to ep; exactly 1 for equal shares and, in one group, for ep = 1.

    Notes
    -----
    A1. Rank j holds the consecutive experts `j*E/ep ... (j+1)*E/ep - 1`. An ep that does not divide the experts, which
    a rule refuses, is cut at the whole experts below.
    A2. One histogram, summed over the group, stands for every micro-batch; layers are not averaged here, since a layer
    waits for its own busiest rank.

    Source: docs/cost-model/imbalance.md; Megatron-LM `transformer/moe/moe_layer.py` (consecutive local
    experts).
    """
    starts = np.arange(ep) * shares.shape[-1] // ep
    return _most_over_mean(np.add.reduceat(shares, starts, axis=-1))


def _most_over_mean(loads: FloatArray) -> FloatArray:
    """Largest load of any group and rank over the mean, per row; loads of shape (..., rows, ranks)."""
    groups = tuple(range(loads.ndim - 2))
    most, least = loads.max(axis=(*groups, -1)), loads.min(axis=(*groups, -1))
    count = loads.size // most.size
    # The mean of equal loads may differ from them by rounding; balanced must cost exactly nothing.
    ratios: FloatArray = np.where(most == least, 1.0, np.maximum(most * count / loads.sum(axis=(*groups, -1)), 1.0))
    return ratios


def group_shares(load: Load, ep: int) -> FloatArray:
    """Split a load by expert-parallel group where its source ranks are known to form several.

    Parameters
    ----------
    load : Load
        Shares, not balanced.
    ep : int
        Expert-parallel degree.

    Returns
    -------
    FloatArray
        Shape (groups, rows, num_experts): what the experts of each group receive; one group where loads per source rank
        are not known, or ep does not divide their number.

    Notes
    -----
    A1. Source ranks are listed group by group, ep consecutive ones each.

    Source: Megatron-LM `parallel_state.py` (expert-parallel ranks are consecutive where etp = 1).
    """
    assert load.shares is not None
    if load.source_shares is None or load.source_shares.shape[1] % ep:
        return load.shares[None]
    rows, sources, experts = load.source_shares.shape
    if sources == ep:
        return load.shares[None]
    shares: FloatArray = load.source_shares.reshape(rows, sources // ep, ep, experts).sum(axis=2).swapaxes(0, 1)
    return shares


def placed_ratio(
    shares: FloatArray,
    *,
    job: Job,
    num_groups: int,
    ep: int,
    domains: int,
    min_max_load: MinMaxLoad | None = None,
) -> FloatArray:
    """Load of the busiest rank over the mean, under the job's placement of experts; 1 is balanced.

    Parameters
    ----------
    shares : FloatArray
        From `group_shares`, shape (groups, rows, num_experts).
    job : Job
        Placement and redundant experts.
    num_groups : int
        Groups of the router's group-limited choice, 1 for none.
    ep, domains : int
        Expert-parallel degree, and scale-up domains that one group spans.
    min_max_load : callable, optional
        Solver of LPLB's linear program; needed for that placement.

    Returns
    -------
    FloatArray
        Shape (rows,), 1 to ep.

    Notes
    -----
    A1. A balancer is not used where it makes a layer worse: EPLB packs greedily and may miss an order that is balanced.
    A2. Copies of an expert share its load evenly under EPLB, and as the linear program says under LPLB.
    A3. Experts are placed by the load that is priced: placements are as fresh as the histogram.
    A4. Where ep does not divide the physical experts, which a rule refuses, they stay in order.

    Source: deepseek-ai/EPLB, deepseek-ai/LPLB (README); docs/cost-model/imbalance.md.
    """
    ordered = worst_rank_ratio(shares, ep)
    experts = shares.shape[-1]
    if job.placement is PlacementPolicy.IDEAL:
        return np.ones_like(ordered)
    if job.placement is PlacementPolicy.CONTIGUOUS or experts % ep or (experts + job.redundant_experts) % ep:
        return ordered
    even = ep % domains == 0 and experts % num_groups == 0
    sizes = {"groups": num_groups if even else 1, "nodes": domains if even else 1, "ranks": ep}
    if job.placement is PlacementPolicy.EPLB:
        placed = eplb_placement(shares.sum(axis=0), physical=experts + job.redundant_experts, **sizes)
        return np.minimum(ordered, _most_over_mean(placed.rank_shares(shares)))
    packed = eplb_placement(shares.sum(axis=0), physical=experts, **sizes)
    better = _most_over_mean(packed.rank_shares(shares)) < ordered
    held = np.where(better[:, None], packed.experts, np.arange(experts))
    return _lplb_ratio(shares, held.reshape(len(held), ep, -1), job.redundant_experts // ep, min_max_load)


def _lplb_ratio(shares: FloatArray, held: IntArray, degree: int, min_max_load: MinMaxLoad | None) -> FloatArray:
    """Busiest rank over the mean where tokens move along LPLB's graph; `held` (rows, ranks, experts of each)."""
    if min_max_load is None:
        raise ValueError("LPLB needs a solver of its linear program")
    groups, ranks = len(shares), held.shape[1]
    heaviest_first = np.argsort(-shares.sum(axis=0)[np.arange(len(held))[:, None, None], held], axis=2, kind="stable")
    held = np.take_along_axis(held, heaviest_first, axis=2)
    targets = lplb_edges(ranks, min(degree, held.shape[2]))
    edges = np.stack([np.broadcast_to(np.arange(ranks), targets.shape), targets], axis=-1).reshape(-1, 2)
    loads = np.stack([group[np.arange(len(held))[:, None, None], held] for group in shares])
    before = _most_over_mean(loads.sum(axis=-1))
    after = np.empty((groups, len(held)))
    for group, row in np.ndindex(after.shape):
        each = loads[group, row]
        after[group, row] = min_max_load(each.sum(axis=1), edges, each[:, : len(targets)].T.ravel())
    mean = loads.sum(axis=(0, 2, 3)) / (groups * ranks)
    ratios: FloatArray = np.clip(after.max(axis=0) / mean, 1.0, before)
    return ratios


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankLoads:
    """Load of the busiest rank over the mean for every expert-parallel group of a table, worked out once.

    `codes` are the distinct pairs of degree and domains, sorted; `received_ratio` has shape (rows of the load, pairs);
    `sent_ratio` (rows,) is what the busiest source rank sends over the mean.
    """

    codes: IntArray
    received_ratio: FloatArray
    sent_ratio: FloatArray

    def received_by(self, row: int, *, ep: IntArray, domains: IntArray) -> FloatArray:
        """Load of the busiest rank over the mean for one row of the load, per plan."""
        ratios: FloatArray = self.received_ratio[row, np.searchsorted(self.codes, ep * _DOMAIN_LIMIT + domains)]
        return ratios


def rank_loads(
    job: Job, moe: MoeFfn | None, *, ep: IntArray, domains: IntArray, min_max_load: MinMaxLoad | None = None
) -> RankLoads:
    """Work out the busiest rank of every distinct expert-parallel group of a table of plans.

    Parameters
    ----------
    job : Job
        Load, placement, redundant experts.
    moe : MoeFfn or None
        Routed experts, None for a dense model.
    ep, domains : IntArray
        Expert-parallel degree, and scale-up domains that one group spans, per plan.
    min_max_load : callable, optional
        As for `placed_ratio`.

    Returns
    -------
    RankLoads
        All ratios 1 for a balanced load; a histogram has a row per layer, or one.

    Source: docs/cost-model/imbalance.md.
    """
    codes = np.unique(ep * _DOMAIN_LIMIT + domains)
    if job.load.shares is None or moe is None:
        return RankLoads(codes=codes, received_ratio=np.ones((1, len(codes))), sent_ratio=np.ones(1))
    columns = [
        placed_ratio(
            group_shares(job.load, code // _DOMAIN_LIMIT),
            job=job,
            num_groups=moe.num_groups,
            ep=code // _DOMAIN_LIMIT,
            domains=code % _DOMAIN_LIMIT,
            min_max_load=min_max_load,
        )
        for code in codes.tolist()
    ]
    sources = job.load.source_shares
    sent = np.ones(len(job.load.shares)) if sources is None else _most_over_mean(sources.sum(axis=2))
    return RankLoads(codes=codes, received_ratio=np.stack(columns, axis=1), sent_ratio=sent)
