"""Rank meshes: which ranks form a group, and how many members of a group share a scale-up domain."""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ap_search.errors import SpecError
from ap_search.plan.plan import Plan
from ap_search.plan.table import IntArray, PlanTable

Group = Literal["tp", "cp", "dp", "dp-cp", "pp", "ep", "etp", "edp", "tp-ep"]

ORDER_DEFAULT = "tp-cp-ep-dp-pp"
ORDER_TP_PP_DP = "tp-cp-ep-pp-dp"

_AXES = ("tp", "cp", "ep", "dp", "pp")

# Megatron names the axes of both meshes alike: etp is the expert mesh's "tp", edp its "dp".
_DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp-cp": ("dp", "cp"),
    "pp": ("pp",),
}
_EXPERT_GROUPS: dict[str, tuple[str, ...]] = {"etp": ("tp",), "ep": ("ep",), "edp": ("dp",), "tp-ep": ("tp", "ep")}

# In the default order each group is an arithmetic progression: axes whose product is its stride, and its size.
_PROGRESSIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tp": ((), ("tp",)),
    "cp": (("tp",), ("cp",)),
    "dp": (("tp", "cp"), ("dp",)),
    "dp-cp": (("tp",), ("dp", "cp")),
    "etp": ((), ("etp",)),
    "ep": (("etp",), ("ep",)),
    "edp": (("etp", "ep"), ("edp",)),
    "tp-ep": ((), ("etp", "ep")),
}


class Placement(NamedTuple):
    """How the worst group of one kind lies on scale-up domains, arrays over plans.

    Attributes
    ----------
    members_per_domain : IntArray
        The fewest members of a group that lie together in one domain, at least 1.
    domains : IntArray
        The most distinct domains that one group touches.
    """

    members_per_domain: IntArray
    domains: IntArray


def group_ranks(plan: Plan, *, group: Group, order: str = ORDER_DEFAULT) -> IntArray:
    """List the ranks of every group of one kind, as Megatron-Core builds them.

    Parameters
    ----------
    plan : Plan
        Only its degrees are read; both products `tp*cp*dp*pp` and `etp*ep*edp*pp` must give the same world.
    group : Group
        `tp cp dp dp-cp pp` lie on the dense mesh, `etp ep edp tp-ep` on the expert mesh.
    order : str
        The five axes from the smallest stride to the largest, joined by dashes.

    Returns
    -------
    IntArray
        Shape (groups, members), in Megatron's order of groups and of members.

    Raises
    ------
    SpecError
        The order is no permutation of the five axes, or the worlds or the pipeline groups of the two meshes differ.

    Notes
    -----
    A1. A rank is the sum of index times stride over the axes; strides are the prefix products of the order.
    A2. The dense mesh has `ep = 1`; the expert mesh has `cp = 1`, etp in the place of tp and edp in the place of dp.

    Source: Megatron-Core `parallel_state.py` (`RankGenerator`, `generate_masked_orthogonal_rank_groups`).
    """
    axes = _parse_order(order)
    dense = {"tp": plan.tp, "cp": plan.cp, "ep": 1, "dp": plan.dp, "pp": plan.pp}
    expert = {"tp": plan.etp, "cp": 1, "ep": plan.ep, "dp": plan.edp, "pp": plan.pp}
    _check_meshes(axes, dense, expert)
    if group in _DENSE_GROUPS:
        return _mesh_groups(axes, dense, _DENSE_GROUPS[group])
    return _mesh_groups(axes, expert, _EXPERT_GROUPS[group])


def rank_groups(plan: Plan, *, group: Group, order: str = ORDER_DEFAULT) -> tuple[tuple[int, ...], ...]:
    """List the ranks of every group of one kind as plain tuples, for few ranks.

    Parameters
    ----------
    plan, group, order
        As for `group_ranks`.

    Returns
    -------
    tuple of tuple of int
        One tuple per group.

    Source: as `group_ranks`.
    """
    return tuple(map(tuple, group_ranks(plan, group=group, order=order).tolist()))


def _parse_order(order: str) -> tuple[str, ...]:
    """Split an order string, which must hold each of the five axes once."""
    axes = tuple(order.split("-"))
    if sorted(axes) != sorted(_AXES):
        raise SpecError("order", f"{order[:60]!r} is no permutation of the axes tp cp ep dp pp", ORDER_DEFAULT)
    return axes


def _check_meshes(axes: tuple[str, ...], dense: dict[str, int], expert: dict[str, int]) -> None:
    """Refuse two meshes that are not two factorisations of one world with the same pipeline groups."""
    dense_world, expert_world = int(np.prod(list(dense.values()))), int(np.prod(list(expert.values())))
    if dense_world != expert_world:
        raise SpecError("plan", f"tp*cp*dp*pp = {dense_world} ranks, but etp*ep*edp*pp = {expert_world}")
    inner = axes[: axes.index("pp")]
    strides = [int(np.prod([mesh[axis] for axis in inner], initial=1)) for mesh in (dense, expert)]
    if dense["pp"] > 1 and strides[0] != strides[1]:
        reason = f"pipeline groups differ: stride {strides[0]} on the dense mesh, {strides[1]} on the expert mesh"
        raise SpecError("order", reason, ORDER_DEFAULT)


def _mesh_groups(axes: tuple[str, ...], sizes: dict[str, int], members: tuple[str, ...]) -> IntArray:
    """Cut a mesh into the groups that vary over `members`; the first axis of the order varies fastest in both."""
    slowest_first = axes[::-1]
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[axis] for axis in slowest_first])
    outer = [i for i, axis in enumerate(slowest_first) if axis not in members]
    inner = [i for i, axis in enumerate(slowest_first) if axis in members]
    width = int(np.prod([sizes[axis] for axis in members]))
    return ranks.transpose(outer + inner).reshape(-1, width)


def group_placement(*, stride: IntArray | int, size: IntArray | int, domain_size: int, world: int) -> Placement:
    """Count how groups that are arithmetic progressions of ranks lie on scale-up domains.

    Parameters
    ----------
    stride : array of int or int
        Ranks from one member to the next, shape (plans,), at least 1.
    size : array of int or int
        Members of a group, shape (plans,), at least 1.
    domain_size : int
        Devices of one scale-up domain that the job takes; rank r lies in domain `r // domain_size`.
    world : int
        Ranks of the job.

    Returns
    -------
    Placement
        Counts for the worst group, of the shape that stride and size broadcast to.

    Notes
    -----
    A1. Ranks fill domains in order; the last domain may be filled in part.
    A2. Groups of `size` members at `stride` tile the ranks in blocks of `stride*size`; all of them are looked at.
    A3. A group that the world cannot hold (a plan that a rule refuses) is cut to the ranks there are.

    Source: Megatron-Core `parallel_state.py` (RankGenerator); counted from the ranks, not assumed from divisibility.
    """
    strides, sizes = np.broadcast_arrays(np.minimum(stride, world), np.minimum(size, world))
    stride_values, stride_code = _codes(strides, bound=world)
    size_values, size_code = _codes(sizes, bound=world)
    width = len(size_values)
    pair_values, pair_code = _codes(stride_code * width + size_code, bound=len(stride_values) * width)
    pairs = zip(stride_values[pair_values // width], size_values[pair_values % width], strict=True)
    counts = [_worst_group(int(one), int(many), domain_size, world) for one, many in pairs]
    worst = np.array(counts, dtype=np.int64).reshape(-1, 2)
    return Placement(members_per_domain=worst[pair_code, 0], domains=worst[pair_code, 1])


def _codes(values: IntArray, *, bound: int) -> tuple[IntArray, IntArray]:
    """Find the distinct values and each value's index among them, without sorting (values lie in 0..bound)."""
    present: NDArray[np.bool_] = np.zeros(bound + 1, dtype=np.bool_)
    present[values] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[values]


@lru_cache(maxsize=65536)
def _worst_group(stride: int, size: int, domain_size: int, world: int) -> tuple[int, int]:
    """Count the fewest members together in a domain and the most domains touched, over all groups of the world."""
    size = min(size, -(-world // stride))
    blocks = max(1, world // (stride * size))
    ranks = np.arange(blocks * size * stride).reshape(blocks, size, stride).swapaxes(1, 2).reshape(-1, size)
    domain = ranks // domain_size
    # Members ascend, so those in one domain stand side by side: a run starts at the first and where the domain changes.
    starts = np.ones(domain.shape, dtype=np.bool_)
    starts[:, 1:] = domain[:, 1:] != domain[:, :-1]
    run_lengths = np.diff(np.append(np.flatnonzero(starts), starts.size))
    return int(run_lengths.min()), int(starts.sum(axis=1).max())


def group_progression(table: PlanTable, *, group: Group, world: int) -> tuple[IntArray, IntArray]:
    """Give stride and size of the groups of one kind in the default rank order, per plan.

    Parameters
    ----------
    table : PlanTable
        Plans, each column of shape (plans,).
    group : Group
        Kind of group.
    world : int
        Ranks of the job.

    Returns
    -------
    tuple of two IntArray
        Stride in ranks and size in members, shape (plans,).

    Notes
    -----
    A1. The order is `tp-cp-ep-dp-pp`, in which every one of the nine kinds is an arithmetic progression.
    A2. A pipeline stride of a world that pp does not divide is rounded down (a rule refuses such a plan).

    Source: Megatron-Core `parallel_state.py` (RankGenerator).
    """
    if group == "pp":
        return np.maximum(world // table.pp, 1), table.pp
    stride_axes, size_axes = _PROGRESSIONS[group]
    return _column_product(table, stride_axes), _column_product(table, size_axes)


def _column_product(table: PlanTable, axes: tuple[str, ...]) -> IntArray:
    """Multiply some columns of a table; none of them gives ones."""
    product = np.ones_like(table.tp)
    for axis in axes:
        product = product * getattr(table, axis)
    return product


def plan_placement(table: PlanTable, *, group: Group, domain_size: int, world: int) -> Placement:
    """Count how the groups of one kind lie on scale-up domains, per plan, in the default rank order.

    Parameters
    ----------
    table : PlanTable
        Plans, each column of shape (plans,).
    group : Group
        Kind of group.
    domain_size, world : int
        As for `group_placement`.

    Returns
    -------
    Placement
        Counts for each plan's worst group, shape (plans,).

    Notes
    -----
    As for `group_placement` and `group_progression`.
    """
    stride, size = group_progression(table, group=group, world=world)
    return group_placement(stride=stride, size=size, domain_size=domain_size, world=world)


def pipeline_hop_placement(pp: IntArray | int, world: int, domain_size: int) -> NDArray[np.bool_]:
    """Tell per plan whether any hop from a pipeline stage to the next leaves its scale-up domain.

    Parameters
    ----------
    pp : array of int or int
        Pipeline stages, shape (plans,), at least 1.
    world, domain_size : int
        Ranks of the job, and devices of one scale-up domain.

    Returns
    -------
    array of bool
        Of the shape of `pp`.

    Notes
    -----
    A1. In the default order a hop goes `p = world/pp` ranks ahead. Where the world is larger than one domain of D
    ranks, a hop crosses: with `p <= D` the one from rank `D - p` to rank D, otherwise the one from rank 0 to rank p.
    Where it is not, none can.

    Source: Megatron-Core `parallel_state.py` (RankGenerator): the stride of pp is world/pp.
    """
    return (np.asarray(pp) > 1) & (world > domain_size)
