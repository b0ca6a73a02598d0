"""Placement of experts: which rank holds which copies of which experts, as EPLB and LPLB choose it from loads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPlacement:
    """Physical experts of each layer, rank by rank, each rank the same number of them.

    `experts` and `replicas` have shape (rows, physical): the logical expert of each physical one, and which of that
    expert's copies it is; `copies` has shape (rows, logical).
    """

    ranks: int
    experts: IntArray
    replicas: IntArray
    copies: IntArray

    def rank_shares(self, shares: FloatArray) -> FloatArray:
        """Load of each rank where the copies of an expert share its load evenly.

        Parameters
        ----------
        shares : FloatArray
            Loads, shape (..., rows, logical): those that the placement was made for, or others.

        Returns
        -------
        FloatArray
            Shape (..., rows, ranks), in the unit of `shares`.
        """
        each = shares / self.copies
        here = np.take_along_axis(each, np.broadcast_to(self.experts, (*each.shape[:-1], self.experts.shape[-1])), -1)
        loads: FloatArray = here.reshape(*here.shape[:-1], self.ranks, -1).sum(axis=-1)
        return loads


def balanced_packing(weights: FloatArray, packs: int) -> tuple[IntArray, IntArray]:
    """Pack items into packs of equal count: the heaviest first, each to the lightest pack that has room.

    Parameters
    ----------
    weights : FloatArray
        Shape (rows, items); each row is packed by itself.
    packs : int
        Packs, a divisor of the items.

    Returns
    -------
    tuple of IntArray
        For each item its pack, and its place in the pack, both of shape (rows, items).

    Notes
    -----
    A1. Equal items keep their order, equal packs are filled from the first. One item per pack is left as it is.

    Source: deepseek-ai/EPLB `eplb.py`, `balanced_packing`.
    """
    rows, items = weights.shape
    pack, place = np.zeros((2, rows, items), dtype=np.int64)
    if items == packs:
        pack[:] = np.arange(items)
        return pack, place
    row = np.arange(rows)
    total, filled = np.zeros((rows, packs)), np.zeros((rows, packs), dtype=np.int64)
    for item in np.argsort(-weights, axis=1, kind="stable").T:
        lightest = np.where(filled < items // packs, total, np.inf).argmin(axis=1)
        pack[row, item], place[row, item] = lightest, filled[row, lightest]
        total[row, lightest] += weights[row, item]
        filled[row, lightest] += 1
    return pack, place


def replicated_experts(weights: FloatArray, physical: int) -> tuple[IntArray, IntArray, IntArray]:
    """Give each redundant expert in turn to the logical expert whose copies carry the most.

    Parameters
    ----------
    weights : FloatArray
        Loads of the logical experts, shape (rows, logical).
    physical : int
        Physical experts, at least the logical ones.

    Returns
    -------
    tuple of IntArray
        The logical expert of each physical one and which of its copies that is, shape (rows, physical); copies of each
        logical expert, shape (rows, logical).

    Source: deepseek-ai/EPLB `eplb.py`, `replicate_experts`.
    """
    rows, logical = weights.shape
    row = np.arange(rows)
    experts = np.tile(np.arange(physical), (rows, 1))
    replicas, copies = np.zeros((rows, physical), dtype=np.int64), np.ones((rows, logical), dtype=np.int64)
    for redundant in range(logical, physical):
        heaviest = (weights / copies).argmax(axis=1)
        experts[:, redundant], replicas[:, redundant] = heaviest, copies[row, heaviest]
        copies[row, heaviest] += 1
    return experts, replicas, copies


def eplb_placement(weights: FloatArray, *, physical: int, groups: int, nodes: int, ranks: int) -> ExpertPlacement:
    """Place experts as DeepSeek's expert-parallel load balancer does.

    Parameters
    ----------
    weights : FloatArray
        Loads of the logical experts, shape (rows, logical).
    physical : int
        Physical experts: logical and redundant ones; a multiple of `ranks`.
    groups : int
        Groups of the router's group-limited choice, a divisor of the logical experts; 1 for none.
    nodes : int
        Nodes (scale-up domains) that the ranks fill evenly.
    ranks : int
        Ranks of the expert-parallel group, a multiple of `nodes`.

    Returns
    -------
    ExpertPlacement
        Hierarchical where `nodes` divides `groups`: groups to nodes, copies within each node, then copies to ranks.
        Global otherwise: the same with one group and one node.

    Raises
    ------
    ValueError
        Where the sizes do not divide as said.

    Source: deepseek-ai/EPLB `eplb.py`, `rebalance_experts`, `rebalance_experts_hierarchical`.
    """
    rows, logical = weights.shape
    if physical % ranks or ranks % nodes or logical % groups or physical < logical:
        raise ValueError(f"{physical} copies of {logical} experts in {groups} groups on {ranks} ranks, {nodes} nodes")
    if groups % nodes:
        groups = nodes = 1
    ordered = _experts_by_node(weights, groups=groups, nodes=nodes)
    per_node = np.take_along_axis(weights, ordered, 1).reshape(rows * nodes, logical // nodes)
    local, replicas, copies = replicated_experts(per_node, physical // nodes)
    rank, place = balanced_packing(np.take_along_axis(per_node / copies, local, 1), ranks // nodes)
    at = np.argsort(rank * (physical // ranks) + place, axis=1)
    first = np.arange(0, logical, logical // nodes)[None, :, None]
    positions = np.take_along_axis(local, at, 1).reshape(rows, nodes, -1) + first
    return ExpertPlacement(
        ranks=ranks,
        experts=np.take_along_axis(ordered, positions.reshape(rows, physical), 1),
        replicas=np.take_along_axis(replicas, at, 1).reshape(rows, physical),
        copies=np.take_along_axis(copies.reshape(rows, logical), np.argsort(ordered, axis=1), 1),
    )


def _experts_by_node(weights: FloatArray, *, groups: int, nodes: int) -> IntArray:
    """Pack whole groups to nodes and list the experts node by node, shape (rows, logical)."""
    rows, logical = weights.shape
    size = logical // groups
    node, place = balanced_packing(weights.reshape(rows, groups, size).sum(axis=2), nodes)
    ordered = np.argsort(node * (groups // nodes) + place, axis=1)
    experts: IntArray = (ordered[:, :, None] * size + np.arange(size)).reshape(rows, logical)
    return experts


def lplb_edges(ranks: int, degree: int) -> IntArray:
    """Choose the fixed graph of LPLB: from each rank an edge to every rank that holds a copy of one of its experts.

    Parameters
    ----------
    ranks : int
        Ranks of the expert-parallel group.
    degree : int
        Redundant experts per rank: edges that leave, and edges that reach, each rank.

    Returns
    -------
    IntArray
        Shape (degree, ranks), entry [k, i] the rank that rank i's k-th edge leads to: a hypercube where ranks =
        2^degree, otherwise a ring with neighbours at distance 1, -1, 2, -2 ...; no more than ranks - 1 edges per rank.

    Notes
    -----
    A1. The k-th redundant expert of every rank copies the k-th expert of another rank, as LPLB's solver wants it.

    Source: deepseek-ai/LPLB `README.md` (cube, hypercube, torus), `lplb/planner.py` (redundant_to_original).
    """
    rank = np.arange(ranks)
    if ranks == 2**degree:
        return rank ^ (1 << np.arange(degree))[:, None]
    step = np.arange(min(degree, ranks - 1))
    distance = (step // 2 + 1) * np.where(step % 2, -1, 1)
    edges: IntArray = (rank + distance[:, None]) % ranks
    return edges
