"""Placement of experts by hand: packing, copies, rank loads, what copies cost, what imbalance costs a plan."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.alternatives import with_imbalance
from ap_search.cost.blocks import kinds_by_load
from ap_search.cost.imbalance import group_shares, placed_ratio, rank_loads, worst_rank_ratio
from ap_search.cost.placement import balanced_packing, eplb_placement, lplb_edges, replicated_experts
from ap_search.cost.redundant import redundant_shares, redundant_sync_bytes
from ap_search.search.lplb import lplb_min_max
from ap_search.spec.job import Job, Load, PlacementPolicy
from tests.cost_cases import context, deepseek_v3, mixtral_8x7b, plan, price, round_machine, small_model

ONE_EXPERT = 3 * 1024 * 512  # parameters of one expert of the small model


def job(placement: str, copies: int = 0, load: Load | None = None) -> Job:
    return Job(
        devices=8,
        memory_limit_bytes=1,
        reserve_bytes=0,
        load=load or Load(),
        placement=PlacementPolicy(placement),
        redundant_experts=copies,
    )


def ratio(shares: list[float], placement: str, *, ep: int, copies: int = 0, groups: int = 1, domains: int = 1) -> float:
    table = np.array([[shares]], dtype=np.float64)
    where = job(placement, copies)
    return float(
        placed_ratio(table, job=where, num_groups=groups, ep=ep, domains=domains, min_max_load=lplb_min_max)[0]
    )


# --- EPLB, step by step ---


def test_the_heaviest_goes_to_the_lightest_pack_with_room() -> None:
    """5 to pack 0, 4 and 3 to pack 1 (4 < 5), which is full at 7, so 2 to pack 0: 7 and 7."""
    pack, place = balanced_packing(np.array([[5.0, 4.0, 3.0, 2.0]]), 2)
    assert pack.tolist() == [[0, 1, 1, 0]]
    assert place.tolist() == [[0, 0, 1, 1]]


def test_one_item_per_pack_stays_where_it_is() -> None:
    assert balanced_packing(np.array([[1.0, 3.0, 2.0]]), 3)[0].tolist() == [[0, 1, 2]]


def test_copies_go_to_the_expert_whose_copies_carry_most() -> None:
    """6 becomes 3 and 3; then 3, 3 and 1 remain, the first of the equals is copied again: 2, 2, 2."""
    experts, replicas, copies = replicated_experts(np.array([[6.0, 3.0, 1.0]]), 5)
    assert experts.tolist() == [[0, 1, 2, 0, 0]]
    assert replicas.tolist() == [[0, 0, 0, 1, 2]]
    assert copies.tolist() == [[3, 1, 1]]


def test_groups_stay_on_one_node_under_the_hierarchical_policy() -> None:
    """Loads 8 7 | 2 1 in two groups on two nodes of two ranks: the heavy group stays together, 8 of 18 on one rank.

    With three groups, which two nodes do not divide, the policy is global, and a rank holds what fits best.
    """
    weights = np.array([[8.0, 7.0, 2.0, 1.0]])
    placed = eplb_placement(weights, physical=4, groups=2, nodes=2, ranks=2)
    assert placed.experts.tolist() == [[0, 1, 2, 3]]
    assert placed.rank_shares(weights).tolist() == [[15.0, 3.0]]
    everywhere = eplb_placement(weights, physical=4, groups=1, nodes=2, ranks=2)
    assert everywhere.rank_shares(weights).tolist() == [[9.0, 9.0]]


def test_other_loads_may_be_judged_under_a_placement() -> None:
    """Expert 0 has two copies on different ranks: a load of 4 on it is 2 and 2, 1 on expert 1 lies on one rank."""
    placed = eplb_placement(np.array([[6.0, 1.0, 1.0]]), physical=4, groups=1, nodes=1, ranks=2)
    assert placed.copies.tolist() == [[2, 1, 1]]
    assert sorted(placed.rank_shares(np.array([[4.0, 1.0, 0.0]]))[0].tolist()) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("physical", "groups", "nodes", "ranks"), [(5, 1, 1, 2), (4, 3, 1, 2), (4, 1, 4, 2), (2, 1, 1, 2)]
)
def test_sizes_that_do_not_divide_are_refused(physical: int, groups: int, nodes: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="4 experts"):
        eplb_placement(np.ones((1, 4)), physical=physical, groups=groups, nodes=nodes, ranks=ranks)


# --- LPLB's graph ---


def test_a_power_of_two_of_full_degree_is_a_hypercube() -> None:
    assert lplb_edges(4, 2).tolist() == [[1, 0, 3, 2], [2, 3, 0, 1]]


def test_other_sizes_are_a_ring() -> None:
    assert lplb_edges(3, 1).tolist() == [[1, 2, 0]]
    assert lplb_edges(8, 2).tolist()[1] == [7, 0, 1, 2, 3, 4, 5, 6]


def test_no_rank_copies_to_itself() -> None:
    for ranks, degree in ((2, 5), (3, 4), (6, 6), (8, 3), (16, 4)):
        edges = lplb_edges(ranks, degree)
        assert len(edges) <= ranks - 1
        assert (edges != np.arange(ranks)).all()
        assert all(sorted(row) == list(range(ranks)) for row in edges.tolist())
    assert lplb_edges(1, 2).size == 0


# --- the busiest rank under each placement ---


def test_eplb_joins_heavy_and_light_experts() -> None:
    """Shares 4 3 2 1 of 10 on 2 ranks: in order 7 of 10 (1.4), packed 5 and 5."""
    assert ratio([0.4, 0.3, 0.2, 0.1], "contiguous", ep=2) == pytest.approx(1.4)
    assert ratio([0.4, 0.3, 0.2, 0.1], "eplb", ep=2) == pytest.approx(1.0)


def test_a_single_hot_expert_needs_copies() -> None:
    """7 1 1 1 of 10, one expert a rank: 0.7 * 4 = 2.8. All 4 copies go to the first: five of 1.4 and three of 1, two
    on each rank: 1.4 + 1.4 on one, 2.8 over a mean of 2.5."""
    shares = [0.7, 0.1, 0.1, 0.1]
    assert ratio(shares, "eplb", ep=4) == pytest.approx(2.8)
    assert ratio(shares, "eplb", ep=4, copies=4) == pytest.approx(1.12)


def test_a_balancer_that_would_make_it_worse_is_not_used() -> None:
    """3 3 0 | 2 2 2 is balanced in order; greedy packing puts 3 + 2 + 2 on one rank and 3 + 2 + 0 on the other."""
    weights = np.array([[3.0, 3.0, 0.0, 2.0, 2.0, 2.0]])
    placed = eplb_placement(weights, physical=6, groups=1, nodes=1, ranks=2)
    assert placed.rank_shares(weights).max() == 7.0
    assert ratio((weights[0] / 12).tolist(), "eplb", ep=2) == 1.0


def test_lplb_moves_no_more_than_an_expert_along_an_edge() -> None:
    """Experts 6 4 1 1 of 12 are packed as 6 + 1 and 4 + 1, 7 over a mean of 6; the copy of the first moves 1 of its 6.

    Experts 2 2 2 2 2 2 | 8 0 of 20 on 4 ranks cannot be packed below 8: a copy takes half of it, 5 is the mean.
    """
    shares = (np.array([6.0, 4.0, 1.0, 1.0]) / 12).tolist()
    assert ratio(shares, "lplb", ep=2) == pytest.approx(7 / 6)
    assert ratio(shares, "lplb", ep=2, copies=2) == pytest.approx(1.0)
    hot = (np.array([2.0, 2, 2, 2, 2, 2, 8, 0]) / 20).tolist()
    assert ratio(hot, "lplb", ep=4) == pytest.approx(8 / 5)
    assert ratio(hot, "lplb", ep=4, copies=8) == pytest.approx(1.0)


def test_lplb_without_a_solver_is_refused() -> None:
    with pytest.raises(ValueError, match="solver"):
        placed_ratio(np.array([[[0.5, 0.3, 0.1, 0.1]]]), job=job("lplb", 2), num_groups=1, ep=2, domains=1)


def test_ideal_is_one_whatever_the_load() -> None:
    assert ratio([1.0, 0.0, 0.0, 0.0], "ideal", ep=4) == 1.0


@pytest.mark.parametrize(("ep", "copies"), [(3, 0), (4, 2), (4, 1)])
def test_sizes_that_a_rule_refuses_are_priced_in_order(ep: int, copies: int) -> None:
    shares = [0.4, 0.3, 0.2, 0.1]
    assert ratio(shares, "eplb", ep=ep, copies=copies) == ratio(shares, "contiguous", ep=ep)


def test_uneven_domains_and_groups_are_balanced_as_one() -> None:
    """3 domains for 4 ranks, 3 groups of 4 experts: neither divides, so the policy is global."""
    shares = [0.4, 0.3, 0.2, 0.1]
    assert ratio(shares, "eplb", ep=2, groups=3, domains=3) == ratio(shares, "eplb", ep=2)


# --- loads per source rank ---

# Two groups of two ranks: the first sends all its 4 + 4 to expert 0, the second spreads its 2 + 6.
SOURCES = np.array([[4.0, 0.0], [4.0, 0.0], [1.0, 1.0], [3.0, 3.0]])[None] / 16


def sourced() -> Load:
    return Load(name="given", shares=SOURCES.sum(axis=1), source_shares=SOURCES)


def test_groups_receive_what_their_own_ranks_send() -> None:
    """ep 4 of 4 sources: one group, 12 and 4 of 16; ep 2: expert 0 receives 8 of the first group, 4 of the second."""
    assert (group_shares(sourced(), 4) * 16).tolist() == [[[12.0, 4.0]]]
    assert (group_shares(sourced(), 2) * 16).tolist() == [[[8.0, 0.0]], [[4.0, 4.0]]]
    assert (group_shares(sourced(), 8) * 16).tolist() == [[[12.0, 4.0]]]
    assert worst_rank_ratio(group_shares(sourced(), 2), 2).tolist() == [2.0]


def test_the_busiest_sender_is_named() -> None:
    """Totals 4 4 2 6 of 16: 6 over a mean of 4. A rank that receives no more than its share may send more."""
    moe = small_model().moe
    two = np.array([2, 2])
    found = rank_loads(job("contiguous", load=sourced()), moe, ep=two, domains=np.array([1, 1]))
    assert found.sent_ratio.tolist() == [1.5]
    assert found.received_by(0, ep=two, domains=np.array([1, 1])).tolist() == [2.0, 2.0]


def test_a_rank_that_sends_more_slows_the_exchange_only() -> None:
    """Every expert receives the same; of 8 source ranks one sends twice the mean: dispatch and combine take longer.

    Out goes dispatch, and combine's backward: three times the mean over both passes of either, where two is even.
    """
    sent = np.array([2.0, 1, 1, 1, 1, 1, 1, 0])[:, None] * np.full(8, 1 / 64)
    where = context(small_model(), 8, machine=round_machine())
    load = Load(name="given", shares=sent.sum(axis=0)[None], source_shares=sent[None])
    uneven = price(replace(where, job=replace(where.job, load=load)), "ep=8,dispatcher=alltoall")
    even = price(where, "ep=8,dispatcher=alltoall")
    exchange = even.time.dispatch_s + even.time.combine_s
    assert uneven.time.expert_s == even.time.expert_s
    assert 0.5 * exchange < uneven.time.imbalance_s < exchange
    assert uneven.peak_memory_bytes == even.peak_memory_bytes
    assert uneven.traffic.combine_bytes == pytest.approx(1.5 * even.traffic.combine_bytes)
    assert uneven.traffic.dispatch_bytes == pytest.approx(1.5 * even.traffic.dispatch_bytes, rel=1e-3)


# --- layers ---


def test_equal_layers_stay_one_kind() -> None:
    """Rows a b a a of four MoE layers: two new kinds, the third and fourth layer as the first."""
    a, b = [0.5, 0.3, 0.1, 0.1], [0.25] * 4
    model, rows = kinds_by_load(mixtral_8x7b(4), Load(name="given", shares=np.array([a, b, a, a])))
    assert model.layers == (1, 2, 1, 1)
    assert rows == (0, 0, 1)


def test_a_uniform_histogram_per_layer_leaves_the_model_as_it_is() -> None:
    model = deepseek_v3()
    found, rows = kinds_by_load(model, Load(name="given", shares=np.full((58, 256), 1 / 256)))
    assert found is model
    assert rows == (-1, 0)


@pytest.mark.parametrize("placement", ["contiguous", "eplb", "ideal"])
def test_a_uniform_histogram_is_balanced_in_every_figure(placement: str) -> None:
    for rows in (1, 7):
        given = {"placement": PlacementPolicy(placement), "redundant_experts": 0 if placement == "contiguous" else 8}
        uniform = context(small_model(), 8, shares=np.full((rows, 8), 1 / 8).tolist(), **given)
        balanced = context(small_model(), 8, **given)
        for text in ("ep=8", "ep=4,pp=2,dispatcher=deepep,recompute=full", "tp=2,ep=4,sharding=zero3"):
            assert price(uniform, text) == price(balanced, text)


# --- what copies of experts cost ---


def copied(copies: int, **more: object) -> object:
    given = {"placement": PlacementPolicy.EPLB, "redundant_experts": copies, "machine": round_machine(), **more}
    return context(small_model(mtp_layers=0), 8, **given)  # type: ignore[arg-type]


def test_each_rank_holds_its_share_of_the_copies() -> None:
    """8 copies over ep = 8 are one expert more on each rank in each of 7 layers: weights 2, gradients 4, state 12."""
    before, after = price(copied(0), "ep=8"), price(copied(8), "ep=8")
    old, new = before.memory.stages[0].expert, after.memory.stages[0].expert
    assert new.weights_bytes - old.weights_bytes == 7 * ONE_EXPERT * 2
    assert new.gradients_bytes - old.gradients_bytes == 7 * ONE_EXPERT * 4
    assert new.optimizer_bytes - old.optimizer_bytes == 7 * ONE_EXPERT * 12
    assert before.memory.stages[0].shared == after.memory.stages[0].shared


def test_copies_are_kept_alike_once_per_step() -> None:
    """edp = 1: 7 experts' gradients of 4 bytes, reduced with the original and with another rank's copy of one's own."""
    before, after = price(copied(0), "ep=8"), price(copied(8), "ep=8")
    sent = 2 * 7 * ONE_EXPERT * 4
    assert after.traffic.dp_bytes - before.traffic.dp_bytes == sent
    assert after.time.dp_comm_s - before.time.dp_comm_s == pytest.approx(sent / 1e11)


def test_copies_in_other_domains_are_kept_alike_over_the_network() -> None:
    """4 ranks to a domain: ep = 8 spans two, and the network carries 1e10 bytes/s."""
    machine = round_machine(devices_per_domain=4)
    machine = replace(machine, levels=(replace(machine.levels[0], size=4), machine.levels[1]))
    with_copies, without = (price(copied(copies, machine=machine), "ep=8").time.dp_comm_s for copies in (8, 0))
    assert with_copies - without == pytest.approx(2 * 7 * ONE_EXPERT * 4 / 1e10)


def test_a_sharded_optimizer_synchronises_its_own_shard() -> None:
    """edp = 2: with ZeRO-1 each rank reduces half of the copies' gradients, without sharding all of them."""
    where = copied(4)
    assert redundant_sync_bytes(where, params=100.0, split=2) == 2 * 100 * 4 / 2  # type: ignore[arg-type]
    extra = {}
    for sharding in ("none", "zero1"):
        each = [price(copied(copies), f"ep=4,sharding={sharding}").traffic.dp_bytes for copies in (0, 4)]
        extra[sharding] = each[1] - each[0]
    params = 7 * ONE_EXPERT
    assert extra["none"] == 2 * params * 4 / 2 + 2 * params * 4  # all-reduce over edp, then between copies
    assert extra["zero1"] == params * (4 + 2) / 2 + 2 * params * 4 / 2  # scatter and gather over edp, then shards


def test_shares_of_copies_by_block() -> None:
    """Dense kind, MoE kind, embedding, MTP module (a MoE layer), head; 8 of 16 experts are copies."""
    assert redundant_shares(small_model(), 8).tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]


def test_lplb_solves_once_per_layer_and_micro_batch() -> None:
    """100 us for each of 7 layers and 8 micro-batches, beside the copies' cost, which is EPLB's: one domain."""
    eplb = price(copied(8), "ep=8").time.other_s
    lplb = price(copied(8, placement=PlacementPolicy.LPLB), "ep=8").time.other_s
    assert lplb - eplb == pytest.approx(7 * 8 * 1e-4)


# --- what imbalance costs a plan ---


def test_the_cost_of_imbalance_is_the_difference_to_a_balanced_load() -> None:
    """One expert per rank, half of the load on one: 4 x its share, and EPLB without copies cannot help."""
    shares = [[0.5, 0.5 / 7, 0.5 / 7, 0.5 / 7, 0.5 / 7, 0.5 / 7, 0.5 / 7, 0.5 / 7]]
    where = context(small_model(), 8, shares=shares)
    before = price(where, "ep=8")
    found = with_imbalance(where, before).imbalance
    balanced = price(context(small_model(), 8), "ep=8")
    assert found is not None
    assert (found.placement, found.redundant_experts) == ("contiguous", 0)
    assert found.worst_rank_ratio_max == pytest.approx(4.0)
    assert found.cost_s == before.step_time_s - balanced.step_time_s > 0
    assert found.cost_bytes == before.peak_memory_bytes - balanced.peak_memory_bytes > 0
    alone, copied_once = found.others
    assert (alone.placement, alone.redundant_experts, alone.gain_s, alone.gain_bytes) == ("eplb", 0, 0.0, 0)
    assert (copied_once.placement, copied_once.redundant_experts) == ("eplb", 8)
    assert 1.0 <= copied_once.worst_rank_ratio_max < 1.5
    assert found.eplb_gain_s == copied_once.gain_s > 0


def test_the_jobs_own_placement_is_not_an_alternative() -> None:
    given = {"placement": PlacementPolicy.EPLB, "redundant_experts": 8}
    where = context(small_model(), 8, shares=[[0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]], **given)
    found = with_imbalance(where, price(where, "ep=8")).imbalance
    assert found is not None
    assert [(other.placement, other.redundant_experts) for other in found.others] == [("contiguous", 0), ("eplb", 0)]
    assert found.others[0].gain_s < 0


def test_without_expert_parallelism_nothing_is_placed() -> None:
    where = context(small_model(), 8, shares=[[0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]])
    found = with_imbalance(where, price(where, "ep=1")).imbalance
    assert found is not None
    assert (found.cost_s, found.cost_bytes, found.others) == (0.0, 0, ())


def test_a_balanced_load_has_no_imbalance() -> None:
    where = context(small_model(), 8)
    priced = price(where, "ep=8")
    assert with_imbalance(where, priced) is priced
    assert plan(where, "ep=8").ep == 8
