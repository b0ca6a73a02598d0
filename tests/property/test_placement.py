"""Laws of imbalance and placement: whatever the load, balancers do no harm, and even loads cost exactly nothing."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ap_search.cost.imbalance import placed_ratio, worst_rank_ratio
from ap_search.cost.placement import eplb_placement, lplb_edges
from ap_search.search.lplb import lplb_min_max
from ap_search.spec.job import Job, PlacementPolicy
from ap_search.spec.load import load_load
from tests.cost_cases import context, price_all, small_model

few = settings(max_examples=60, deadline=None)
EXPERTS = 16


@st.composite
def loads(draw: st.DrawFn, *, rows: int = 2) -> NDArray[np.float64]:
    """Token counts of 16 experts in some layers, none without tokens."""
    counts = st.lists(st.integers(0, 1000), min_size=EXPERTS, max_size=EXPERTS).filter(any)
    table = np.array([draw(counts) for _ in range(rows)], dtype=np.float64)
    return table / table.sum(axis=1, keepdims=True)


degrees = st.sampled_from([1, 2, 4, 8, 16])
groups = st.sampled_from([1, 2, 4, 8])
domains = st.sampled_from([1, 2, 3, 4])
policies = st.sampled_from(list(PlacementPolicy))


def ratios(
    shares: NDArray[np.float64],
    placement: PlacementPolicy,
    *,
    ep: int,
    copies: int = 0,
    groups: int = 1,
    domains: int = 1,
) -> NDArray[np.float64]:
    job = Job(devices=8, memory_limit_bytes=1, reserve_bytes=0, placement=placement, redundant_experts=copies)
    return placed_ratio(shares[None], job=job, num_groups=groups, ep=ep, domains=domains, min_max_load=lplb_min_max)


@few
@given(loads(), policies, degrees, groups, domains, st.integers(0, 2))
def test_the_busiest_rank_bears_its_share_at_least(
    shares: NDArray[np.float64], placement: PlacementPolicy, ep: int, groups: int, domains: int, each: int
) -> None:
    found = ratios(shares, placement, ep=ep, copies=each * ep, groups=groups, domains=domains)
    assert (found >= 1.0).all()
    assert (found <= ep * (1 + 1e-12)).all()


@few
@given(policies, degrees, groups, domains, st.integers(0, 2), st.integers(1, 10**9))
def test_equal_shares_are_balanced_to_the_last_bit(
    placement: PlacementPolicy, ep: int, groups: int, domains: int, each: int, count: int
) -> None:
    shares = np.full((1, EXPERTS), float(count)) / (count * EXPERTS)
    assert ratios(shares, placement, ep=ep, copies=each * ep, groups=groups, domains=domains).tolist() == [1.0]


@few
@given(loads(), degrees, groups, domains, st.integers(0, 2))
def test_balancers_are_never_worse_than_order(
    shares: NDArray[np.float64], ep: int, groups: int, domains: int, each: int
) -> None:
    """With as many experts per rank, or more."""
    ordered = ratios(shares, PlacementPolicy.CONTIGUOUS, ep=ep)
    for placement in (PlacementPolicy.EPLB, PlacementPolicy.LPLB, PlacementPolicy.IDEAL):
        found = ratios(shares, placement, ep=ep, copies=each * ep, groups=groups, domains=domains)
        assert (found <= ordered).all()


@few
@given(loads(), degrees, st.permutations(range(EXPERTS)))
def test_sorting_experts_does_not_change_an_ideal_placement(
    shares: NDArray[np.float64], ep: int, order: list[int]
) -> None:
    found = ratios(shares, PlacementPolicy.IDEAL, ep=ep)
    assert found.tolist() == ratios(shares[:, order], PlacementPolicy.IDEAL, ep=ep).tolist() == [1.0, 1.0]


@few
@given(loads(), degrees, groups, st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_every_expert_is_placed_and_every_rank_is_full(
    shares: NDArray[np.float64], ep: int, groups: int, nodes: int, each: int
) -> None:
    nodes = min(nodes, ep)
    placed = eplb_placement(shares, physical=EXPERTS + each * ep, groups=groups, nodes=nodes, ranks=ep)
    for experts, replicas, copies in zip(placed.experts, placed.replicas, placed.copies, strict=True):
        assert np.bincount(experts, minlength=EXPERTS).tolist() == copies.tolist()
        assert len(set(zip(experts.tolist(), replicas.tolist(), strict=True))) == len(experts)
    assert copies.min() >= 1
    np.testing.assert_allclose(placed.rank_shares(shares).sum(axis=1), 1.0)


@few
@given(loads(rows=1), degrees, groups, st.sampled_from([2, 4]))
def test_the_hierarchical_policy_keeps_groups_on_a_node(
    shares: NDArray[np.float64], ep: int, groups: int, nodes: int
) -> None:
    """All copies of a group's experts lie on the ranks of one node."""
    if ep % nodes or groups % nodes:
        return
    placed = eplb_placement(shares, physical=EXPERTS + ep, groups=groups, nodes=nodes, ranks=ep)
    node = np.arange(EXPERTS + ep) // ((EXPERTS + ep) // nodes)
    for group in range(groups):
        assert len(set(node[placed.experts[0] // (EXPERTS // groups) == group].tolist())) == 1


@few
@given(st.lists(st.integers(0, 100), min_size=8, max_size=8), st.integers(1, 4), st.integers(0, 100))
def test_moving_tokens_lies_between_the_mean_and_what_was(counts: list[int], degree: int, capacity: int) -> None:
    loads = np.array(counts, dtype=np.float64)
    targets = lplb_edges(8, degree)
    edges = np.stack([np.broadcast_to(np.arange(8), targets.shape), targets], axis=-1).reshape(-1, 2)
    found = lplb_min_max(loads, edges, np.full(len(edges), float(capacity)))
    assert loads.mean() * (1 - 1e-6) <= found <= loads.max() * (1 + 1e-6)
    wider = lplb_min_max(loads, edges, np.full(len(edges), 2.0 * capacity))
    assert wider <= found * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0.0, 3.0), min_size=2, max_size=4, unique=True),
    st.sampled_from(["ep=8", "ep=4,tp=2", "ep=8,dispatcher=deepep", "ep=4,pp=2,recompute=full", "ep=2,etp=2"]),
)
def test_less_skew_is_never_slower(exponents: list[float], text: str) -> None:
    """`zipf:A` with a smaller A: the busiest rank receives less, and no figure grows."""
    model = small_model()
    found = []
    for exponent in sorted(exponents):
        shares = load_load(f"zipf:{exponent}", num_experts=8, num_moe_layers=7).shares
        assert shares is not None
        price = price_all(context(model, 8, shares=shares.tolist()), [text])
        found.append((float(price.step_s[0]), float(price.peak_bytes[0])))
        assert (worst_rank_ratio(shares, 4) >= 1.0).all()
    for (step_s, peak_bytes), (next_s, next_bytes) in pairwise(found):
        assert step_s <= next_s * (1 + 1e-12)
        assert peak_bytes <= next_bytes * (1 + 1e-12)
