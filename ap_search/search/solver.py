"""What the integer solver is asked: which meshes are legal."""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from ap_search.plan.table import IntArray
from ap_search.search.degrees import DegreeModel
from ap_search.search.domains import SearchDomains, divisors
from ap_search.search.rules import MESH_AXES, RULES, Rule, RuleContext, applicable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeshTable:
    """Legal meshes, one row each, sorted by the columns in this order; arrays of shape (meshes,)."""

    tp: IntArray
    cp: IntArray
    pp: IntArray
    dp: IntArray
    ep: IntArray
    etp: IntArray
    edp: IntArray

    def __len__(self) -> int:
        """Count the meshes."""
        return len(self.tp)


def enumerate_meshes(context: RuleContext, domains: SearchDomains, rules: tuple[Rule, ...] = RULES) -> MeshTable:
    """List every mesh that obeys all rules on mesh axes, by CP-SAT.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    domains : SearchDomains
        Candidates per axis.
    rules : tuple of Rule
        Those that read anything but mesh axes are left out.

    Returns
    -------
    MeshTable

    Notes
    -----
    A1. Axes that no rule joins, but for pp, are solved apart and joined on pp: exact, since a rule is posted whole in
    one part, and pp has the same candidates in each. The dense and the expert mesh are such parts, unless a target's
    rule joins them.
    """
    posted = tuple(rule for rule in applicable(rules, context) if rule.stage == 0)
    candidates = mesh_candidates(context, domains)
    parts = [_solve_part(context, candidates, axes=axes, rules=posted) for axes in _parts(posted)]
    whole = reduce(_join, parts)
    table = np.array([whole[axis] for axis in MESH_AXES])
    order = np.lexsort(table[::-1])
    return MeshTable(**dict(zip(MESH_AXES, table[:, order], strict=True)))


def mesh_candidates(context: RuleContext, domains: SearchDomains) -> dict[str, tuple[int, ...]]:
    """List candidates of every mesh axis; dp, where nobody set it, and edp are any divisors of the devices."""
    whole = divisors(context.job.devices, limit=context.job.devices)
    given = {axis: tuple(getattr(domains, axis)) for axis in MESH_AXES if axis != "edp"}
    return {axis: given.get(axis) or whole for axis in MESH_AXES}


def _parts(rules: tuple[Rule, ...]) -> list[tuple[str, ...]]:
    """Group the mesh axes so that no rule joins two groups but through pp, which is in each."""
    # dp and edp are the quotients of their meshes, so each belongs with its mesh.
    joined = [{"tp", "cp", "dp"}, {"ep", "etp", "edp"}]
    for rule in rules:
        axes = set(rule.reads) - {"pp"}
        touched = [part for part in joined if part & axes]
        if len(touched) > 1:
            joined = [set.union(*touched), *(part for part in joined if not part & axes)]
    return [tuple(axis for axis in MESH_AXES if axis in part or axis == "pp") for part in joined]


def _solve_part(
    context: RuleContext, candidates: dict[str, tuple[int, ...]], *, axes: tuple[str, ...], rules: tuple[Rule, ...]
) -> dict[str, IntArray]:
    """Enumerate the legal degrees of some axes, a column each."""
    model = DegreeModel({axis: candidates[axis] for axis in axes}, devices=context.job.devices)
    for rule in rules:
        if set(rule.reads) <= set(axes):
            model.post(context, rule)
    return dict(zip(axes, model.enumerate().T, strict=True))


def _join(left: dict[str, IntArray], right: dict[str, IntArray]) -> dict[str, IntArray]:
    """Pair the rows of two parts that agree in pp."""
    one, two = np.nonzero(left["pp"][:, None] == right["pp"][None, :])
    return {axis: column[two] for axis, column in right.items()} | {axis: column[one] for axis, column in left.items()}
