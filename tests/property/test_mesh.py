"""Laws of rank groups: they tile the world, and placements equal a count over the listed ranks."""

from collections import Counter
from itertools import pairwise, permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.errors import SpecError
from ap_search.plan.mesh import Group, group_placement, pipeline_hop_placement, plan_placement, rank_groups
from ap_search.plan.plan import Layout, Plan
from ap_search.plan.table import PlanTable

GROUPS: tuple[Group, ...] = ("tp", "cp", "dp", "dp-cp", "pp", "ep", "etp", "edp", "tp-ep")
ORDERS = tuple("-".join(order) for order in permutations(("tp", "cp", "ep", "dp", "pp")))
DEGREES = st.sampled_from([1, 1, 2, 3, 4, 6])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan whose two meshes factorise one world of at most some hundred ranks, odd ones included."""
    tp, cp, dp, pp = (draw(DEGREES) for _ in range(4))
    per_stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, per_stage // etp + 1) if (per_stage // etp) % n == 0]))
    layout = Layout(pp=pp, vpp=1, chunk_layers=(1,) * pp, even=True)
    return Plan(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=per_stage // (etp * ep), layout=layout)


def world_of(plan: Plan) -> int:
    return plan.tp * plan.cp * plan.dp * plan.pp


def count_worst(groups: tuple[tuple[int, ...], ...], domain_size: int) -> tuple[int, int]:
    """Count, over listed groups, the fewest members together and the most domains touched."""
    counts = [Counter(rank // domain_size for rank in group) for group in groups]
    return min(min(count.values()) for count in counts), max(len(count) for count in counts)


@settings(max_examples=100, deadline=None)
@given(plan=plans(), order=st.sampled_from(ORDERS))
def test_every_kind_of_group_tiles_the_world(plan: Plan, order: str) -> None:
    try:
        pipelines = rank_groups(plan, group="pp", order=order)
    except SpecError:
        assert plan.pp > 1  # only pipeline groups can disagree
        assert not order.endswith("pp")  # and never where pp is the outermost axis
        return
    for group in GROUPS:
        ranks = [rank for members in rank_groups(plan, group=group, order=order) for rank in members]
        assert sorted(ranks) == list(range(world_of(plan)))
    assert all(len(members) == plan.pp for members in pipelines)


@settings(max_examples=100, deadline=None)
@given(plan=plans())
def test_groups_of_different_axes_of_one_mesh_share_at_most_one_rank(plan: Plan) -> None:
    def group_of(kind: Group) -> dict[int, int]:
        return {rank: number for number, ranks in enumerate(rank_groups(plan, group=kind)) for rank in ranks}

    pairs: tuple[tuple[Group, Group], ...] = (
        ("tp", "dp-cp"),
        ("cp", "dp"),
        ("dp-cp", "pp"),
        ("etp", "ep"),
        ("tp-ep", "edp"),
    )
    for one, other in pairs:
        first, second = group_of(one), group_of(other)
        assert len({(first[rank], second[rank]) for rank in range(world_of(plan))}) == world_of(plan)


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(plans(), min_size=1, max_size=3), domain_size=st.sampled_from([1, 2, 3, 4, 8, 72]))
def test_placement_equals_the_count_over_listed_groups(batch: list[Plan], domain_size: int) -> None:
    world = world_of(batch[0])
    same = [plan for plan in batch if world_of(plan) == world]
    for group in GROUPS:
        found = plan_placement(PlanTable.from_plans(same), group=group, domain_size=domain_size, world=world)
        expected = [count_worst(rank_groups(plan, group=group), domain_size) for plan in same]
        assert list(zip(found.members_per_domain.tolist(), found.domains.tolist(), strict=True)) == expected


@settings(max_examples=100, deadline=None)
@given(plan=plans(), domain_size=st.integers(1, 40))
def test_a_pipeline_hop_crosses_iff_a_listed_pair_does(plan: Plan, domain_size: int) -> None:
    hops = [pair for ranks in rank_groups(plan, group="pp") for pair in pairwise(ranks)]
    expected = any(here // domain_size != there // domain_size for here, there in hops)
    assert bool(pipeline_hop_placement(plan.pp, world_of(plan), domain_size)) == expected


@settings(max_examples=100, deadline=None)
@given(stride=st.integers(1, 40), size=st.integers(1, 40), domain_size=st.integers(1, 80), world=st.integers(1, 100))
def test_placement_never_fails_and_stays_in_bounds(stride: int, size: int, domain_size: int, world: int) -> None:
    """Plans that no world can hold are still placed: together >= 1, and no more domains than members."""
    together, domains = group_placement(stride=stride, size=np.array([size]), domain_size=domain_size, world=world)
    assert 1 <= together[0] <= min(size, domain_size)
    assert 1 <= domains[0] <= size
