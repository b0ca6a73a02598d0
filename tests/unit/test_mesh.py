"""Rank groups and placements, by hand and against the groups Megatron-Core builds."""

from collections import Counter

import numpy as np
import pytest

from ap_search.errors import SpecError
from ap_search.plan.mesh import (
    ORDER_TP_PP_DP,
    Group,
    group_placement,
    pipeline_hop_placement,
    plan_placement,
    rank_groups,
)
from ap_search.plan.plan import Layout, Plan
from ap_search.plan.table import PlanTable

ONE_STAGE = Layout(pp=1, vpp=1, chunk_layers=(4,), even=True)
TWO_STAGES = Layout(pp=2, vpp=1, chunk_layers=(2, 2), even=True)

# Oracle O7: world 16, tp2 cp2 dp2 pp2, etp1 ep8 edp1.
WORLD_16 = Plan(tp=2, cp=2, dp=2, pp=2, ep=8, etp=1, edp=1, layout=TWO_STAGES)
# Oracle O7b: world 8, tp4 dp2, etp2 ep2 edp2.
WORLD_8 = Plan(tp=4, dp=2, ep=2, etp=2, edp=2, layout=ONE_STAGE)


@pytest.mark.parametrize(
    ("group", "groups"),
    [
        ("tp", ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15))),
        ("cp", ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))),
        ("dp", ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))),
        ("dp-cp", ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))),
        ("ep", (tuple(range(8)), tuple(range(8, 16)))),
        ("tp-ep", (tuple(range(8)), tuple(range(8, 16)))),
        ("etp", tuple((rank,) for rank in range(16))),
        ("edp", tuple((rank,) for rank in range(16))),
        ("pp", tuple((rank, rank + 8) for rank in range(8))),
    ],
)
def test_world_16_has_the_groups_of_oracle_o7(group: Group, groups: tuple[tuple[int, ...], ...]) -> None:
    """Strides of the dense mesh: tp 1, cp 2, dp 2*2 = 4, pp 16/2 = 8; of the expert mesh: etp 1, ep 1, edp 8, pp 8."""
    assert rank_groups(WORLD_16, group=group) == groups


@pytest.mark.parametrize(
    ("group", "groups"),
    [
        ("etp", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("ep", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("tp-ep", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("edp", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("tp", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("dp", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_world_8_has_the_groups_of_oracle_o7b(group: Group, groups: tuple[tuple[int, ...], ...]) -> None:
    """Expert tensor parallel 2 under tensor parallel 4: etp stride 1, ep stride 2, edp stride 2*2 = 4."""
    assert rank_groups(WORLD_8, group=group) == groups


def test_pipeline_before_data_parallel_swaps_their_strides() -> None:
    """World 8 in the order tp-cp-ep-pp-dp: tp stride 1, pp stride tp = 2, dp stride tp*pp = 4."""
    plan = Plan(tp=2, pp=2, dp=2, ep=2, edp=2, layout=TWO_STAGES)
    assert rank_groups(plan, group="pp", order=ORDER_TP_PP_DP) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert rank_groups(plan, group="dp", order=ORDER_TP_PP_DP) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_pipeline_groups_of_the_two_meshes_must_agree() -> None:
    """In tp-cp-ep-pp-dp with edp = 1 and dp = 4 the dense pp stride is tp = 1, the expert one etp*ep = 4."""
    plan = Plan(pp=2, dp=4, ep=4, edp=1, layout=TWO_STAGES)
    with pytest.raises(SpecError, match="pipeline groups differ: stride 1 on the dense mesh, 4 on the expert mesh"):
        rank_groups(plan, group="tp", order=ORDER_TP_PP_DP)
    assert rank_groups(plan, group="pp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    "order", ["", "tp-cp-ep-dp", "tp-cp-ep-dp-dp", "tp-cp-ep-dp-pp-pp", "TP-CP-EP-DP-PP", "tp,cp,ep,dp,pp"]
)
def test_an_order_that_is_no_permutation_is_refused(order: str) -> None:
    with pytest.raises(SpecError, match="no permutation"):
        rank_groups(WORLD_8, group="tp", order=order)


def test_two_worlds_of_different_size_are_refused() -> None:
    """tp*cp*dp*pp = 4*2 = 8, etp*ep*edp*pp = 3."""
    with pytest.raises(SpecError, match="8 ranks, but etp"):
        rank_groups(Plan(tp=4, dp=2, ep=3, layout=ONE_STAGE), group="tp")


@pytest.mark.parametrize(
    ("stride", "size", "domain_size", "world", "together", "domains"),
    [
        pytest.param(1, 8, 8, 16, 8, 1, id="a block of 8 fills one node of 8"),
        pytest.param(1, 16, 8, 64, 8, 2, id="a block of 16 is two whole nodes"),
        pytest.param(2, 8, 8, 64, 4, 2, id="every second rank: 4 of each node of 8"),
        pytest.param(8, 4, 8, 64, 1, 4, id="one rank per node"),
        pytest.param(1, 12, 8, 24, 4, 2, id="0..11 is 8+4, 12..23 is 4+8"),
        pytest.param(1, 3, 8, 24, 1, 2, id="6 7 8 is split 2+1"),
        pytest.param(1, 6, 4, 12, 2, 2, id="3 nodes x 4: 0..5 is 4+2, 6..11 is 2+4"),
        pytest.param(3, 4, 4, 12, 1, 3, id="3 nodes x 4: 0 3 6 9 is 2+1+1, 2 5 8 11 is 1+1+2"),
        pytest.param(6, 2, 4, 12, 1, 2, id="a pipeline of 2 on 3 nodes x 4"),
        pytest.param(1, 96, 8, 96, 8, 12, id="world 96: one group over 12 nodes"),
        pytest.param(1, 32, 64, 96, 32, 1, id="96 of NVL72 in 64s: 0..31, 32..63, 64..95"),
        pytest.param(1, 48, 64, 96, 16, 2, id="96 of NVL72 in 64s: 48..95 is 16+32"),
        pytest.param(1, 1, 8, 1, 1, 1, id="a world of one device"),
        pytest.param(1, 16, 8, 8, 8, 1, id="a group larger than the world is cut to it"),
        pytest.param(10**12, 10**6, 8, 8, 1, 1, id="degrees far beyond the world cost nothing"),
    ],
)
def test_the_worst_group_is_counted_from_the_ranks(
    stride: int, size: int, domain_size: int, world: int, together: int, domains: int
) -> None:
    placement = group_placement(stride=stride, size=size, domain_size=domain_size, world=world)
    assert (int(placement.members_per_domain), int(placement.domains)) == (together, domains)


def test_placements_keep_the_plan_axis() -> None:
    """Blocks of 4, 8, 16 ranks on nodes of 8; then the same plans at stride 4."""
    together, domains = group_placement(stride=np.array([[1], [4]]), size=np.array([4, 8, 16]), domain_size=8, world=64)
    assert together.tolist() == [[4, 8, 8], [2, 2, 2]]
    assert domains.tolist() == [[1, 1, 2], [2, 4, 8]]


def test_no_plans_give_no_placements() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert group_placement(stride=empty, size=empty, domain_size=8, world=8).domains.shape == (0,)


def test_plan_placement_reads_the_groups_of_each_plan() -> None:
    """Nodes of 4. Plan 1 (O7): dp-cp 0 2 4 6 is 2+2, ep 0..7 is 4+4. Plan 2: tp 2, dp 8: dp 0 2 .. 14 is 2 per node."""
    other = Plan(tp=2, dp=8, ep=4, edp=4, layout=ONE_STAGE)
    table = PlanTable.from_plans([WORLD_16, other])
    dp_cp = plan_placement(table, group="dp-cp", domain_size=4, world=16)
    assert (dp_cp.members_per_domain.tolist(), dp_cp.domains.tolist()) == ([2, 2], [2, 4])
    ep = plan_placement(table, group="ep", domain_size=4, world=16)
    assert (ep.members_per_domain.tolist(), ep.domains.tolist()) == ([4, 4], [2, 1])


@pytest.mark.parametrize("domain_size", [2, 4, 8, 9])
@pytest.mark.parametrize("group", ["tp", "cp", "dp", "dp-cp", "pp", "ep", "etp", "edp", "tp-ep"])
def test_every_kind_of_group_is_placed_as_its_listed_ranks_lie(group: Group, domain_size: int) -> None:
    """World 48 = 2*3*4*2 = etp 2 * ep 3 * edp 4 * pp 2: no degree is 1, so that no wrong stride can pass."""
    plan = Plan(tp=2, cp=3, dp=4, pp=2, etp=2, ep=3, edp=4, layout=TWO_STAGES)
    counts = [Counter(rank // domain_size for rank in ranks) for ranks in rank_groups(plan, group=group)]
    found = plan_placement(PlanTable.from_plans([plan]), group=group, domain_size=domain_size, world=48)
    assert int(found.members_per_domain[0]) == min(min(count.values()) for count in counts)
    assert int(found.domains[0]) == max(len(count) for count in counts)


def test_pipeline_hops_leave_the_domain_when_the_world_does() -> None:
    """One stage has no hop; 16 ranks on nodes of 8 cross at pp 2 (0 to 8) and pp 4 (4 to 8); on nodes of 16 none."""
    assert pipeline_hop_placement(np.array([1, 2, 4]), 16, 8).tolist() == [False, True, True]
    assert pipeline_hop_placement(np.array([1, 2, 4]), 16, 16).tolist() == [False, False, False]
