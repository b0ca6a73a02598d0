import math
from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.collective import collective_time_s, point_to_point_time_s, sent_bytes
from ap_search.spec.cluster import load_cluster
from ap_search.spec.machine import Collective, CollectiveFit, Machine


def machine_with(*, nic_bytes_per_s: float = 50e9, domain_bytes_per_s: float = math.inf) -> Machine:
    """Round constants: 1 us and 100 GB/s over 2 ranks, 4 us and 400 GB/s over 8, no third term; NIC reaches all."""
    base = load_cluster("h100-sxm")
    fits = tuple(
        CollectiveFit(collective=collective, ranks=ranks, latency_s=latency, bytes_per_s=rate, sqrt_s=0.0)
        for collective in Collective
        for ranks, latency, rate in ((2, 1e-6, 100e9), (8, 4e-6, 400e9))
    )
    network = replace(
        base.network,
        bytes_per_s=nic_bytes_per_s,
        efficiency_ratio=1.0,
        alltoall_efficiency_ratio=1.0,
        latency_s=10e-6,
        domain_bytes_per_s=domain_bytes_per_s,
    )
    return replace(base, collectives=fits, levels=(base.scale_up, network))


def time_s(machine: Machine, collective: Collective, size: float, ranks: int, inside: int, domains: int) -> float:
    return float(
        collective_time_s(machine, collective, size_bytes=size, ranks=ranks, ranks_per_domain=inside, domains=domains)
    )


@pytest.mark.parametrize(
    ("params", "width", "ranks", "expected"),
    [(233_635_840, 4, 8, 817_725_440), (233_635_840, 2, 8, 408_862_720), (1_409_286_144, 4, 2, 2_818_572_288)],
)
def test_ring_bytes_of_a_gradient_reduction(params: int, width: int, ranks: int, expected: int) -> None:
    """233,635,840 parameters x 4 B x 7/8 = 817,725,440 B; x 2 B x 7/8; 1,409,286,144 x 4 B x 1/2."""
    assert sent_bytes(Collective.REDUCE_SCATTER, size_bytes=params * width, ranks=ranks) == expected


def test_all_reduce_sends_twice_what_all_gather_sends() -> None:
    """2 x 3/4 x 1000 = 1500 against 3/4 x 1000 = 750."""
    assert sent_bytes(Collective.ALL_REDUCE, size_bytes=1000, ranks=4) == 1500
    assert sent_bytes(Collective.ALL_GATHER, size_bytes=1000, ranks=4) == 750


def test_inside_a_domain_at_a_fitted_number_of_ranks() -> None:
    """w = 7/8 x 8e9 = 7e9 B; 4 us + 7e9/400e9 s = 17.504 ms."""
    assert time_s(machine_with(), Collective.ALL_GATHER, 8e9, 8, 8, 1) == pytest.approx(17.504e-3)


def test_constants_between_fitted_numbers_lie_on_a_line() -> None:
    """4 ranks are a third of the way from 2 to 8: 2 us, 200 GB/s; w = 3/4 x 4e9 = 3e9 B; 15.002 ms."""
    assert time_s(machine_with(), Collective.ALL_GATHER, 4e9, 4, 4, 1) == pytest.approx(15.002e-3)


def test_beyond_the_largest_fit_latency_grows_and_bandwidth_stays() -> None:
    """0.5 us per rank from 2 to 8, so 64 ranks: 4 + 56 x 0.5 = 32 us; w = 63/64 x 64e9 = 63e9 B at 400 GB/s."""
    assert time_s(machine_with(), Collective.ALL_GATHER, 64e9, 64, 64, 1) == pytest.approx(32e-6 + 63 / 400)


def test_third_term() -> None:
    """1 ns per root byte: S = 8/7 x 1e6 B over 8 ranks makes w = 1e6 B, whose root is 1000: 1 us more."""
    base = machine_with()
    rooted = replace(base, collectives=tuple(replace(fit, sqrt_s=1e-9) for fit in base.collectives))
    size = 1e6 * 8 / 7
    more = time_s(rooted, Collective.ALL_GATHER, size, 8, 8, 1) - time_s(base, Collective.ALL_GATHER, size, 8, 8, 1)
    assert more == pytest.approx(1e-6)


@pytest.mark.parametrize("collective", list(Collective))
def test_one_rank_or_no_bytes_take_no_time(collective: Collective) -> None:
    assert time_s(machine_with(), collective, 1e9, 1, 1, 1) == 0.0
    assert time_s(machine_with(), collective, 0.0, 16, 8, 2) == 0.0


def test_ring_across_domains_runs_at_the_members_nics() -> None:
    """8 NICs x 50 GB/s = 400 GB/s meet 400 GB/s inside: w = 31/32 x 32e9 = 31e9 B takes 77.5 ms.

    Latency as of 32 - 3 = 29 ranks in one domain, 4 + 21 x 0.5 = 14.5 us, plus 3 hops of 10 us.
    """
    assert time_s(machine_with(), Collective.REDUCE_SCATTER, 32e9, 32, 8, 4) == pytest.approx(77.5e-3 + 44.5e-6)


def test_ring_with_one_member_per_domain_has_one_nic_and_no_scale_up() -> None:
    """4 ranks in 4 domains: w = 3e9 B at 50 GB/s = 60 ms; latency 1 us (smallest fit) + 3 x 10 us."""
    assert time_s(machine_with(), Collective.ALL_GATHER, 4e9, 4, 1, 4) == pytest.approx(60e-3 + 31e-6)


def test_tree_over_two_domains_sends_each_buffer_once() -> None:
    """16 ranks, 8 per domain, 10 GB/s NICs: 80 GB/s per domain; the domain sends S = 16e9 B, w = 30e9 B.

    t = 16e9/80e9 = 0.2 s, latency a = 4 + 2 x 10 = 24 us, and 2 sqrt(24e-6 x 0.2) s.
    """
    expected = 0.2 + 24e-6 + 2 * math.sqrt(24e-6 * 0.2)
    assert time_s(machine_with(nic_bytes_per_s=10e9), Collective.ALL_REDUCE, 16e9, 16, 8, 2) == pytest.approx(expected)


def test_ring_all_reduce_over_three_domains_sends_twice() -> None:
    """24 ranks, 10 GB/s NICs: w = 2 x 23/24 x 24e9 = 46e9 B at 80 GB/s; latency 4 + 14 x 0.5 + 2 x 10 = 31 us."""
    machine = machine_with(nic_bytes_per_s=10e9)
    assert time_s(machine, Collective.ALL_REDUCE, 24e9, 24, 8, 3) == pytest.approx(46 / 80 + 31e-6)


def test_a_rack_edge_bounds_a_ring() -> None:
    """The members' NICs would allow 400 GB/s, the edge 31: w = 31e9 B takes 1 s."""
    machine = machine_with(domain_bytes_per_s=31e9)
    assert time_s(machine, Collective.REDUCE_SCATTER, 32e9, 32, 8, 4) == pytest.approx(1 + 44.5e-6)


def test_all_to_all_across_domains_waits_for_its_own_nic() -> None:
    """32 ranks, S = 32e9: 24e9 B leave at 50 GB/s = 480 ms; 7e9 B inside at 400 GB/s = 17.5 ms run beside.

    Latency 4 + 24 x 0.5 = 16 us and one hop of 10 us.
    """
    assert time_s(machine_with(), Collective.ALL_TO_ALL, 32e9, 32, 8, 4) == pytest.approx(0.48 + 26e-6)


def test_all_to_all_may_wait_for_the_domain_instead() -> None:
    """9 ranks, 8 here and one elsewhere (S = 9e9): 1e9 B leave at 1000 GB/s, 7e9 B inside at 400 GB/s = 17.5 ms."""
    machine = machine_with(nic_bytes_per_s=1000e9)
    assert time_s(machine, Collective.ALL_TO_ALL, 9e9, 9, 8, 2) == pytest.approx(17.5e-3 + 14.5e-6)


def test_message_inside_and_across() -> None:
    """1e9 B: 1 us + 1e9/100e9 s = 10.001 ms inside; 1 us + 10 us + 1e9/50e9 s = 20.011 ms across."""
    machine = machine_with()
    assert float(point_to_point_time_s(machine, size_bytes=1e9, crosses_domain=0)) == pytest.approx(10.001e-3)
    assert float(point_to_point_time_s(machine, size_bytes=1e9, crosses_domain=1)) == pytest.approx(20.011e-3)
    assert float(point_to_point_time_s(machine, size_bytes=0.0, crosses_domain=1)) == 0.0


def test_one_call_prices_many_plans() -> None:
    machine = load_cluster("gb200-nvl72")
    size, ranks = np.array([1e6, 1e9, 1e9, 0.0]), np.array([8, 64, 128, 128])
    inside, domains = np.array([8, 64, 64, 64]), np.array([1, 1, 2, 2])
    for collective in Collective:
        together = collective_time_s(
            machine, collective, size_bytes=size, ranks=ranks, ranks_per_domain=inside, domains=domains
        )
        alone = [
            time_s(machine, collective, float(s), int(r), int(i), int(d))
            for s, r, i, d in zip(size, ranks, inside, domains, strict=True)
        ]
        assert list(together) == pytest.approx(alone)
