"""EPLB's own example, and the toy of LPLB: published placements and the loads that follow from them."""

from time import perf_counter

import numpy as np
import pytest

from ap_search.cost.placement import ExpertPlacement, eplb_placement
from ap_search.search.lplb import lplb_min_max

# deepseek-ai/EPLB README.md, "Interface and Example": loads of 2 layers, 12 experts in 4 groups; 16 replicas on 2 nodes
# of 4 GPUs, and the placement that it prints.
WEIGHTS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=np.float64,
)
PRINTED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def most_over_mean(placed: ExpertPlacement) -> list[float]:
    loads = placed.rank_shares(WEIGHTS)
    assert loads.sum(axis=1) == pytest.approx(WEIGHTS.sum(axis=1))
    return (loads.max(axis=1) / loads.mean(axis=1)).tolist()


def test_the_hierarchical_policy_places_as_the_readme_prints() -> None:
    placed = eplb_placement(WEIGHTS, physical=16, groups=4, nodes=2, ranks=8)
    assert placed.experts.tolist() == PRINTED
    assert most_over_mean(placed) == pytest.approx([1.208132, 1.242215], abs=5e-7)


def test_copies_are_numbered_and_counted() -> None:
    """Experts 1, 4, 5 and 10 of the first layer stand twice in the README's placement, 1, 5, 6 and 8 of the second."""
    placed = eplb_placement(WEIGHTS, physical=16, groups=4, nodes=2, ranks=8)
    assert [np.flatnonzero(copies == 2).tolist() for copies in placed.copies] == [[1, 4, 5, 10], [1, 5, 6, 8]]
    for experts, replicas, copies in zip(placed.experts, placed.replicas, placed.copies, strict=True):
        for expert, count in enumerate(copies):
            assert sorted(replicas[experts == expert].tolist()) == list(range(count))


def test_the_global_policy_balances_better_over_more_of_the_network() -> None:
    """Run of EPLB's own program with one group and one node (reference facts, oracle O27)."""
    placed = eplb_placement(WEIGHTS, physical=16, groups=1, nodes=1, ranks=8)
    assert most_over_mean(placed) == pytest.approx([1.072604, 1.190311], abs=5e-7)


def test_groups_that_do_not_divide_over_nodes_fall_back_to_the_global_policy() -> None:
    one = eplb_placement(WEIGHTS, physical=16, groups=1, nodes=2, ranks=8)
    other = eplb_placement(WEIGHTS, physical=16, groups=1, nodes=1, ranks=8)
    assert one.experts.tolist() == other.experts.tolist()


def test_a_large_model_is_placed_at_once() -> None:
    """256 experts and 32 copies of 58 layers on 64 ranks: well below a second, also on a busy machine."""
    weights = np.random.default_rng(0).pareto(1.5, (58, 256)) + 0.1
    started = perf_counter()
    placed = eplb_placement(weights, physical=320, groups=8, nodes=8, ranks=64)
    assert perf_counter() - started < 1.0
    assert placed.experts.shape == (58, 320)


def test_lplb_moves_what_its_edge_holds() -> None:
    """deepseek-ai/LPLB: rank loads 10 and 2, an edge that holds 4: 6 on each (oracle O28)."""
    loads, edge = np.array([10.0, 2.0]), np.array([[0, 1]])
    assert lplb_min_max(loads, edge, np.array([4.0])) == pytest.approx(6.0)
