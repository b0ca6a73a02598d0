"""Expected distinct destinations of a token's experts: ranks and scale-up domains, uniform or group-limited routing."""

from functools import lru_cache
from itertools import permutations
from math import comb

import numpy as np
from numpy.typing import NDArray

from ap_search.spec.blocks import MoeFfn
from ap_search.units import Quantity

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
QUADRATURE_POINTS = 4096


def distinct_destinations(num_experts: int, top_k: int, groups: Quantity) -> Quantity:
    """Expected number of expert groups (ranks, nodes) that one token's top-k experts fall into; a count.

    Parameters
    ----------
    num_experts, top_k : int
        Experts of the layer and experts per token, 1 <= top_k <= num_experts.
    groups : Quantity
        Groups of consecutive experts, 1 to num_experts, as equal as whole experts allow.

    Returns
    -------
    Quantity
        `G (1 - C(E - E/G, k) / C(E, k))` where G divides E; between 1 and min(G, k).

    Notes
    -----
    A1. Every set of k experts is equally likely.

    Source: hypergeometric count; DeepEP sends a token once per destination (`tests/legacy/test_internode.py`).
    """
    return _over_distinct((num_experts, top_k, 1, 1), groups)


def destinations(moe: MoeFfn, groups: Quantity) -> Quantity:
    """Expected distinct destinations per token where routing may be limited to some groups of experts; a count.

    Parameters
    ----------
    moe : MoeFfn
        Experts, top-k and the routing groups (`num_groups` of which `topk_groups` are kept).
    groups : Quantity
        Destinations (ranks, or scale-up domains), each a run of consecutive experts as equal as whole experts allow;
        more or fewer than the routing groups, whether or not one number divides the other.

    Returns
    -------
    Quantity
        Between 1 and min(groups, top_k).

    Notes
    -----
    A1. A group's score is the sum of the scores of its best `top_k // topk_groups` experts (at least one); the best
        `topk_groups` groups are kept, then the best top_k experts of theirs.
    A2. Scores are independent and uniform. Normal, sigmoid or exponential ones change the count by 0.5 % at most.
    A3. Which groups are kept, and which experts of a group are the best, is equally likely for all.
    A4. How many of the k experts each kept group holds is integrated over fixed points; the error is below 0.3 %.

    Source: DeepSeek-V3 report section 2.1.2; Megatron-LM `moe_utils.py` (group_limited_topk);
    docs/cost-model/dispatch.md.
    """
    limited = 1 <= moe.topk_groups < moe.num_groups
    rule = (moe.num_groups, moe.topk_groups) if limited else (1, 1)
    return _over_distinct((moe.num_experts, moe.top_k, *rule), groups)


def _over_distinct(routing: tuple[int, int, int, int], groups: Quantity) -> Quantity:
    """Work out each distinct number of destinations once."""
    wanted = np.minimum(np.asarray(groups, dtype=np.int64), routing[0])
    distinct, inverse = np.unique(wanted, return_inverse=True)
    values = np.array([_expected(*routing, int(count)) for count in distinct])
    return values[inverse].reshape(wanted.shape)


@lru_cache(maxsize=1024)
def _expected(num_experts: int, top_k: int, num_groups: int, kept: int, count: int) -> float:
    """Expected destinations used, out of `count` runs of consecutive experts."""
    size = num_experts // num_groups
    held, weights = _group_counts(size, top_k, num_groups, kept)
    edges = np.arange(count + 1) * num_experts // count
    kinds: dict[tuple[int, ...], int] = {}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        kind = _overlaps(start, end, size)
        kinds[kind] = kinds.get(kind, 0) + 1
    return sum(number * (1.0 - float(weights @ _missed(held, size, kind))) for kind, number in kinds.items())


def _overlaps(start: int, end: int, size: int) -> tuple[int, ...]:
    """Experts of each routing group between two positions, whole groups first."""
    groups = range(start // size, -(-end // size))
    return tuple(sorted((min(end, (g + 1) * size) - max(start, g * size) for g in groups), reverse=True))


def _missed(held: IntArray, size: int, overlaps: tuple[int, ...]) -> FloatArray:
    """Probability that a destination gets nothing, per pattern of experts held by the groups, shape (patterns,).

    Parameters
    ----------
    held : array of int, shape (patterns, groups)
        How many of a token's experts lie in each group; which group is which is equally likely.
    size : int
        Experts of a group.
    overlaps : tuple of int
        Experts of the destination in each group that it touches; at most the last two are not whole.
    """
    whole = sum(part == size for part in overlaps)
    parts = overlaps[whole:]
    idle = (held == 0).sum(axis=1)
    chances = np.zeros(len(held))
    orders = list(permutations(range(held.shape[1]), len(parts)))
    for order in orders:
        columns = held[:, list(order)]
        free = idle - (columns == 0).sum(axis=1)
        chance = _all_idle(free, whole, held.shape[1] - len(parts))
        for part, column in zip(parts, columns.T, strict=True):
            chance = chance * _none_of(column, size, part)
        chances += chance
    missed: FloatArray = chances / len(orders)
    return missed


def _all_idle(idle: IntArray, wanted: int, groups: int) -> FloatArray:
    """Probability that `wanted` groups chosen at random among `groups` are all among the `idle` ones."""
    table = np.array([comb(count, wanted) / comb(groups, wanted) for count in range(groups + 1)])
    chance: FloatArray = table[idle]
    return chance


def _none_of(held: IntArray, size: int, part: int) -> FloatArray:
    """Probability that `held` experts, chosen at random among `size`, are none of `part` given ones."""
    table = np.array([comb(size - part, count) / comb(size, count) for count in range(int(held.max()) + 1)])
    chance: FloatArray = table[held]
    return chance


@lru_cache(maxsize=64)
def _group_counts(size: int, top_k: int, num_groups: int, kept: int) -> tuple[IntArray, FloatArray]:
    """How many of a token's experts each routing group holds: patterns in descending order, and their probabilities."""
    if num_groups == 1:
        return np.array([[top_k]]), np.ones(1)
    best = _order_statistics(size, min(top_k, size), num_groups)
    scores = best[:, :, : max(top_k // kept, 1)].sum(axis=2)
    chosen = scores >= np.sort(scores, axis=1)[:, num_groups - kept, None]
    eligible = np.where(chosen[:, :, None], best, -1.0)
    ranked = np.sort(eligible.reshape(len(best), -1), axis=1)
    counts = (eligible >= ranked[:, -top_k, None, None]).sum(axis=2)
    patterns, found = np.unique(np.sort(counts, axis=1)[:, ::-1], axis=0, return_counts=True)
    return patterns.astype(np.int64), found / len(best)


def _order_statistics(size: int, best: int, num_groups: int) -> FloatArray:
    """The `best` largest of `size` uniform scores, in descending order, for each group at each quadrature point.

    Shape (points, groups, best). The points are multiples of the fractional parts of roots of primes: evenly spread,
    and the same in every run.
    """
    steps = np.sqrt(_primes(num_groups * best)) % 1.0
    points = np.arange(1, QUADRATURE_POINTS + 1)[:, None] * steps % 1.0
    exponents = 1.0 / np.arange(size, size - best, -1)
    return np.asarray(np.cumprod(points.reshape(-1, num_groups, best) ** exponents, axis=2), dtype=np.float64)


def _primes(count: int) -> FloatArray:
    """The first `count` primes."""
    found: list[int] = []
    number = 2
    while len(found) < count:
        if all(number % prime for prime in found if prime * prime <= number):
            found.append(number)
        number += 1
    return np.array(found, dtype=np.float64)
