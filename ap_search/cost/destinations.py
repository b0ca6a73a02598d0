"""Expected distinct destinations of a token's experts: ranks and scale-up domains, uniform or group-limited routing."""

from math import comb

import numpy as np

from ap_search.spec.blocks import MoeFfn
from ap_search.units import Quantity


def distinct_destinations(num_experts: int, top_k: int, groups: Quantity) -> Quantity:
    """Expected number of expert groups (ranks, nodes) that one token's top-k experts fall into; a count.

    Parameters
    ----------
    num_experts, top_k : int
        Experts of the layer and experts per token, 1 <= top_k <= num_experts.
    groups : Quantity
        Equal groups that the experts are divided into; need not divide the experts (then interpolated).

    Returns
    -------
    Quantity
        `G (1 - C(E - E/G, k) / C(E, k))`, between 1 and min(G, k).

    Notes
    -----
    A1. Every set of k experts is equally likely.

    Source: hypergeometric count; DeepEP sends a token once per destination (`tests/legacy/test_internode.py`).
    """
    wanted = np.asarray(groups, dtype=np.float64)
    distinct, inverse = np.unique(wanted, return_inverse=True)
    values = np.array([_distinct_one(num_experts, top_k, group) for group in distinct])
    return values[inverse].reshape(wanted.shape)


def _distinct_one(num_experts: int, top_k: int, groups: float) -> float:
    """Expected distinct groups for one number of groups, which may be fractional where a domain cuts a group."""
    per_group = num_experts / groups
    low = int(per_group)
    weight = per_group - low
    miss = [comb(num_experts - size, top_k) / comb(num_experts, top_k) for size in (low, min(low + 1, num_experts))]
    return float(groups * (1.0 - (1.0 - weight) * miss[0] - weight * miss[1]))


def destinations(moe: MoeFfn, groups: Quantity) -> Quantity:
    """Expected distinct groups per token where routing may be limited to some groups of experts; a count.

    Parameters
    ----------
    moe : MoeFfn
        Experts, top-k and the routing groups (`num_groups` of which `topk_groups` are kept).
    groups : Quantity
        Equal groups of destinations (ranks, or scale-up domains).

    Returns
    -------
    Quantity
        The uniform expectation; with group-limited routing, the kept groups' experts are spread over their share of the
        destinations first.

    Notes
    -----
    A1. Group-limited routing keeps `topk_groups` groups by the sum of their best scores, so that every kept group is
        used by about top_k/topk_groups experts: with destinations no finer than routing groups the count is their kept
        number.
    A2. Within the kept groups the choice is uniform.

    Source: DeepSeek-V3 report section 2.1.2; 3.954 nodes and 7.485 ranks of 64 by simulation at E=256, k=8, 8 groups,
    4 kept.
    """
    uniform = distinct_destinations(moe.num_experts, moe.top_k, groups)
    if moe.num_groups <= 1 or moe.topk_groups >= moe.num_groups:
        return uniform
    kept = moe.topk_groups
    per_kept_group = moe.top_k / kept
    experts = moe.num_experts // moe.num_groups
    inside = np.maximum(np.asarray(groups, dtype=np.float64) / moe.num_groups, 1.0)
    chosen = max(1, round(per_kept_group))
    fine = kept * distinct_destinations(experts, min(chosen, experts), np.minimum(inside, experts))
    coarse = distinct_destinations(moe.num_groups, kept, np.minimum(groups, moe.num_groups))
    limited = np.where(np.asarray(groups) >= moe.num_groups, fine, coarse)
    return np.minimum(limited, uniform)
