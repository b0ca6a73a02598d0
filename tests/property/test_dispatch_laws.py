"""Laws of dispatch: what is sent is received, deduplication never sends more, more never takes less."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.cost.capacity import kept_ratio
from ap_search.cost.destinations import destinations
from ap_search.cost.dispatch import (
    DispatchShape,
    combine_received_bytes,
    combine_sent_bytes,
    dispatch_received_bytes,
    dispatch_sent_bytes,
    network_bytes,
)
from ap_search.cost.dispatch_time import combine_time_s, dispatch_time_s
from ap_search.cost.experts import expert_gemms
from ap_search.cost.grouped_gemm import grouped_gemm_flops
from ap_search.plan.plan import Dispatcher
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Job, Load
from tests.cost_cases import round_machine

law = settings(max_examples=60, deadline=None)
MACHINE = round_machine()
DEDUPLICATING = (Dispatcher.DEEPEP, Dispatcher.HYBRIDEP)
SIZES = (dispatch_sent_bytes, combine_sent_bytes, dispatch_received_bytes, combine_received_bytes)


@st.composite
def routings(draw: st.DrawFn) -> MoeFfn:
    """Up to 64 experts in up to 8 groups, of which enough are kept for the top-k."""
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.sampled_from([2, 4, 8]))
    kept = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(8, kept * size)))
    return MoeFfn(num_experts=groups * size, top_k=top_k, expert_width=256, num_groups=groups, topk_groups=kept)


@st.composite
def exchanges(draw: st.DrawFn, dispatchers: tuple[Dispatcher, ...] = tuple(Dispatcher)) -> DispatchShape:
    """One dispatch over ep and etp ranks, eight to a domain."""
    moe = draw(routings())
    ep = draw(st.sampled_from([ep for ep in (1, 2, 4, 8, 16) if moe.num_experts % ep == 0]))
    etp, one = draw(st.sampled_from([1, 2])), np.ones(1)
    inside, domains = min(ep * etp, 8), max(ep * etp // 8, 1)
    return DispatchShape(
        moe=moe,
        tokens=draw(st.integers(1, 8192)) * one,
        hidden=float(draw(st.sampled_from([128, 1024, 7168]))),
        ep=ep * one,
        etp=etp * one,
        dispatcher=int(draw(st.sampled_from(dispatchers))) * one,
        ep_per_domain=max(inside / etp, 1) * one,
        ep_domains=domains * one,
        etp_per_domain=etp * one,
        etp_domains=one,
        group_per_domain=inside * one,
        group_domains=domains * one,
        router_bytes=draw(st.sampled_from([2, 4])),
        load_ratio=one,
        kept_ratio=one,
        fp8_dispatch=draw(st.booleans()),
    )


@law
@given(exchanges(), st.lists(st.floats(0.5, 1.0), min_size=16, max_size=16), st.booleans())
def test_what_a_group_sends_it_receives(shape: DispatchShape, loads: list[float], backward: bool) -> None:
    """Summed over ranks with loads and tokens of their own, as long as no rank gets all tokens of the group."""
    ranks = int(shape.ep[0])
    received = np.array(loads[:ranks]) / np.mean(loads[:ranks])
    each = replace(shape, load_ratio=received, sent_ratio=received[::-1].copy())
    if float(shape.distinct_ranks()[0] * received.max()) > float(shape.group[0]):
        return
    for sent, got in ((dispatch_sent_bytes, dispatch_received_bytes), (combine_sent_bytes, combine_received_bytes)):
        out = np.broadcast_to(sent(each, backward=backward), ranks).sum()
        back = np.broadcast_to(got(each, backward=backward), ranks).sum()
        assert np.isclose(out, back, rtol=1e-12)


@law
@given(exchanges(DEDUPLICATING), st.booleans())
def test_a_copy_per_rank_is_never_more_than_a_copy_per_expert(shape: DispatchShape, backward: bool) -> None:
    """Of payload, which combine consists of; and over the network likewise, in whole messages."""
    alltoall = replace(shape, dispatcher=np.full(1, float(Dispatcher.ALLTOALL)))
    assert combine_sent_bytes(shape) <= combine_sent_bytes(alltoall) * (1 + 1e-12)
    over = float(network_bytes(shape, outward=False, forward=True)[0])
    share = 1.0 - 1.0 / float(shape.group_domains[0])
    message = shape.hidden * 2 + 16
    assert over <= float(shape.copies[0] * shape.etp[0]) * share * message * (1 + 1e-12)


@law
@given(exchanges(), st.booleans())
def test_more_experts_per_token_never_send_less(shape: DispatchShape, backward: bool) -> None:
    moe = replace(shape.moe, num_groups=1, topk_groups=1)
    if moe.top_k == moe.num_experts:
        return
    few, many = (replace(shape, moe=replace(moe, top_k=moe.top_k + more)) for more in (0, 1))
    for size in SIZES:
        assert size(many, backward=backward) >= size(few, backward=backward)
    for time_s in (dispatch_time_s, combine_time_s):
        assert time_s(MACHINE, many, backward=backward) >= time_s(MACHINE, few, backward=backward)


@law
@given(exchanges(), st.floats(1.0, 4.0), st.booleans())
def test_more_bandwidth_fewer_tokens_or_less_skew_are_never_slower(
    shape: DispatchShape, factor: float, backward: bool
) -> None:
    faster = round_machine(
        dispatch=replace(
            MACHINE.dispatch,
            scale_up_bytes_per_s=MACHINE.dispatch.scale_up_bytes_per_s * factor,
            network_bytes_per_s=MACHINE.dispatch.network_bytes_per_s * factor,
        )
    )
    more, skewed = replace(shape, tokens=shape.tokens * factor), replace(shape, load_ratio=np.full(1, factor))
    for time_s in (dispatch_time_s, combine_time_s):
        given_s = time_s(MACHINE, shape, backward=backward)
        assert time_s(faster, shape, backward=backward) <= given_s
        assert time_s(MACHINE, more, backward=backward) >= given_s
        assert time_s(MACHINE, skewed, backward=backward) >= given_s


@law
@given(exchanges(), st.floats(0.1, 4.0), st.floats(1.0, 2.0))
def test_more_capacity_never_sends_less(shape: DispatchShape, factor: float, more: float) -> None:
    """And never keeps less; with loads that fall on one expert as well as with balanced ones."""
    experts = shape.moe.num_experts
    skewed = np.array([[0.5] + [0.5 / (experts - 1)] * (experts - 1)])
    for load in (Load(), Load(shares=skewed)):
        tight, loose = (
            replace(shape, kept_ratio=kept_ratio(job(load, capacity), shape.moe, row=0, tokens=shape.tokens))
            for capacity in (factor, factor * more)
        )
        for size in SIZES:
            assert size(loose) >= size(tight)
        assert loose.rows >= tight.rows


def job(load: Load, factor: float) -> Job:
    return Job(devices=16, memory_limit_bytes=1, reserve_bytes=0, load=load, capacity_factor=factor)


@law
@given(exchanges())
def test_flops_of_a_group_do_not_depend_on_ep(shape: DispatchShape) -> None:
    """ep ranks with 1/ep of the experts and all of the group's copies do what ep ranks with all experts do alone."""
    alone = replace(shape, ep=np.ones(1))
    spread, gathered = (
        sum(float(np.asarray(grouped_gemm_flops(gemm))[0]) for gemm in expert_gemms(each.moe, each, each.rows))
        for each in (shape, alone)
    )
    assert np.isclose(spread, gathered, rtol=1e-12)


@law
@given(routings(), st.integers(1, 64))
def test_destinations_are_between_one_and_what_there_is(moe: MoeFfn, count: int) -> None:
    found = float(destinations(moe, count))
    assert 1.0 - 1e-9 <= found <= min(count, moe.top_k, moe.num_experts) * (1 + 1e-9)


@law
@given(routings(), st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]))
def test_finer_destinations_are_never_fewer(moe: MoeFfn, count: int, finer: int) -> None:
    if count * finer <= moe.num_experts:
        assert destinations(moe, count * finer) >= destinations(moe, count) - 1e-9


@law
@given(routings(), st.integers(1, 16))
def test_limited_routing_reaches_no_more_domains_than_groups_it_keeps(moe: MoeFfn, count: int) -> None:
    if moe.num_groups % count == 0 and moe.topk_groups < moe.num_groups:
        assert float(destinations(moe, count)) <= min(moe.topk_groups, count) + 1e-9
