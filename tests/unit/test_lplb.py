"""The linear program of LPLB by hand: tokens move along edges, no more than their capacity."""

import numpy as np
import pytest

from ap_search.search.lplb import lplb_min_max


def least(loads: list[float], edges: list[tuple[int, int]], capacities: list[float]) -> float:
    return lplb_min_max(np.array(loads), np.array(edges, dtype=np.int64).reshape(-1, 2), np.array(capacities))


def test_loads_meet_in_the_middle() -> None:
    """10 and 2 with room for 4: both become 6."""
    assert least([10, 2], [(0, 1)], [4]) == pytest.approx(6)


def test_a_narrow_edge_carries_what_it_holds() -> None:
    """10 and 2 with room for 3: 7 and 5."""
    assert least([10, 2], [(0, 1)], [3]) == pytest.approx(7)


def test_edges_lead_one_way() -> None:
    assert least([2, 10], [(0, 1)], [4]) == pytest.approx(10)


def test_tokens_pass_on_along_a_chain() -> None:
    """9 0 0: 6 move to rank 1 and 3 on to rank 2, 3 each; with room for 2 on the second edge 3.5, 3.5 and 2."""
    assert least([9, 0, 0], [(0, 1), (1, 2)], [6, 3]) == pytest.approx(3)
    assert least([9, 0, 0], [(0, 1), (1, 2)], [6, 2]) == pytest.approx(3.5)


def test_several_edges_of_one_rank_add_up() -> None:
    """12 0 0 with 5 to each: the rank keeps 4, the mean, or with 2 to each 8."""
    assert least([12, 0, 0], [(0, 1), (0, 2)], [5, 5]) == pytest.approx(4)
    assert least([12, 0, 0], [(0, 1), (0, 2)], [2, 2]) == pytest.approx(8)


def test_without_edges_nothing_moves() -> None:
    assert least([10, 2], [], []) == 10.0
    assert least([10, 2], [(0, 1)], [0]) == pytest.approx(10)


def test_nothing_weighs_nothing() -> None:
    assert least([0, 0], [(0, 1)], [0]) == 0.0


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_unit_does_not_matter(scale: float) -> None:
    """Shares and tokens alike: the solver's tolerances are not those of the caller's unit."""
    assert least([10 * scale, 2 * scale], [(0, 1)], [4 * scale]) == pytest.approx(6 * scale, rel=1e-6)
