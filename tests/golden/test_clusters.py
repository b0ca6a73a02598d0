"""Bus bandwidths that others measured and published, against what the presets predict."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from ap_search.cost.collective import collective_time_s, point_to_point_time_s, sent_bytes
from ap_search.spec.cluster import load_cluster
from ap_search.spec.machine import Collective
from ap_search.units import GIB, MIB

STAS = "stas00/ml-engineering 744d01e, network/README.md"
AWS = "aws-samples/awsome-distributed-training 7217859, micro-benchmarks/nccl-tests"
CW = "coreweave/nccl-tests cb86553"
OCI = "public OCI guide for GB300"
AR, AG, RS, A2A = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL


class Case(NamedTuple):
    """One published figure: GB/s of bus bandwidth, and the tolerance it is held to."""

    cluster: str
    collective: Collective
    size_bytes: float
    inside: int
    domains: int
    measured_gbyte_per_s: float
    tolerance: float
    source: str
    nic_bytes_per_s: float = 0.0


# Inside a domain the constants come from another host and from sizes up to 512 MiB: 10 %, and 12 % for the H200, whose
# NVLS fit overshoots at 16 GiB. Across domains: 10 %. Where the figure itself made a constant: 5 %, as a check.
CASES = {
    "a100 8 AR": Case("a100-80-sxm", AR, 16 * GIB, 8, 1, 234.9, 0.10, STAS),
    "h100 8 AR": Case("h100-sxm", AR, 16 * GIB, 8, 1, 482, 0.10, STAS),
    "h100 8 AG": Case("h100-sxm", AG, 16 * GIB, 8, 1, 361, 0.10, STAS),
    "h100 8 RS": Case("h100-sxm", RS, 16 * GIB, 8, 1, 363, 0.10, STAS),
    "h200 8 AR": Case("h200-sxm", AR, 16 * GIB, 8, 1, 482.26, 0.12, STAS),
    "b200 8 AR": Case("b200-sxm", AR, 16 * GIB, 8, 1, 838, 0.10, STAS),
    "h800 8 AR": Case("h800-sxm", AR, 16 * GIB, 8, 1, 215, 0.05, "NVIDIA/nccl issue 1374 (this one is fitted)"),
    "mi300x 8 AR": Case("mi300x", AR, 4 * GIB, 8, 1, 312.9, 0.05, STAS + " (this one is fitted)"),
    "mi300x 2 AR": Case("mi300x", AR, 4 * GIB, 2, 1, 47.67, 0.05, STAS + " (this one is fitted)"),
    "mi355x 8 A2A": Case("mi355x", A2A, 16 * GIB, 8, 1, 361.4, 0.05, "public OCI guide for MI355X (fitted)"),
    "gb300 4 AR": Case("gb300-nvl72", AR, 16 * GIB, 4, 1, 685.2, 0.10, OCI),
    "gb300 8 AR": Case("gb300-nvl72", AR, 16 * GIB, 8, 1, 841.6, 0.10, OCI),
    "gb300 64 AR": Case("gb300-nvl72", AR, 16 * GIB, 64, 1, 930.5, 0.10, OCI),
    "gb300 4 A2A": Case("gb300-nvl72", A2A, 16 * GIB, 4, 1, 627.7, 0.10, OCI),
    "gb300 8 A2A": Case("gb300-nvl72", A2A, 16 * GIB, 8, 1, 685.1, 0.10, OCI),
    "gb300 64 A2A": Case("gb300-nvl72", A2A, 16 * GIB, 64, 1, 666.9, 0.10, OCI),
    "gb200 72 AR": Case("gb200-nvl72", AR, 8 * GIB, 72, 1, 834.6, 0.05, CW + " (this one is fitted)"),
    "h100 2x8 AR": Case("h100-sxm", AR, 16 * GIB, 8, 2, 487.1, 0.10, AWS + ", p5"),
    "a100 2x8 AR": Case("a100-80-sxm", AR, 2 * GIB, 8, 2, 78.3, 0.10, AWS + ", p4de: 4 x 100 Gb/s", 6.25e9),
    "h100 2x2 AR": Case("h100-sxm", AR, 8 * GIB, 2, 2, 147.98, 0.10, "nccl-tests log of 2 x 2 H100 on InfiniBand"),
    "h200 4x8 AR": Case("h200-sxm", AR, 4 * GIB, 8, 4, 364.9, 0.10, STAS + ", p5en"),
    "h100 8x8 AR": Case("h100-sxm", AR, 8 * GIB, 8, 8, 386.6, 0.10, CW),
    "gb200 2x72 AR": Case("gb200-nvl72", AR, 16 * GIB, 72, 2, 810.4, 0.10, CW),
    "gb300 2x64 AR": Case("gb300-nvl72", AR, 16 * GIB, 64, 2, 738.4, 0.10, OCI),
    "gb200 20x72 AR": Case("gb200-nvl72", AR, 16 * GIB, 72, 20, 405.7, 0.10, CW),
    "gb200 20x72 AR 512 MiB": Case("gb200-nvl72", AR, 512 * MIB, 72, 20, 150.95, 0.10, CW),
    "gb300 2x64 A2A": Case("gb300-nvl72", A2A, 16 * GIB, 64, 2, 47.67, 0.05, OCI + " (this one is fitted)"),
}


def bus_gbyte_per_s(case: Case) -> float:
    machine = load_cluster(case.cluster)
    if case.nic_bytes_per_s:
        machine = replace(
            machine, levels=(machine.scale_up, replace(machine.network, bytes_per_s=case.nic_bytes_per_s))
        )
    ranks = case.inside * case.domains
    time = collective_time_s(
        machine,
        case.collective,
        size_bytes=case.size_bytes,
        ranks=ranks,
        ranks_per_domain=case.inside,
        domains=case.domains,
    )
    return float(sent_bytes(case.collective, size_bytes=case.size_bytes, ranks=ranks) / time) / 1e9


@pytest.mark.parametrize("name", CASES)
def test_published_bus_bandwidth(name: str) -> None:
    case = CASES[name]
    assert bus_gbyte_per_s(case) == pytest.approx(case.measured_gbyte_per_s, rel=case.tolerance), case.source


def test_leaving_the_rack_costs_an_all_to_all_far_more_than_an_all_reduce() -> None:
    """GB300, 64 devices in one rack against 128 in two: all-reduce 930 to 738 (20 %), all-to-all 667 to 47.7 (14 x)."""
    all_reduce = bus_gbyte_per_s(CASES["gb300 64 AR"]) / bus_gbyte_per_s(CASES["gb300 2x64 AR"])
    all_to_all = bus_gbyte_per_s(CASES["gb300 64 A2A"]) / bus_gbyte_per_s(CASES["gb300 2x64 A2A"])
    assert 1.1 < all_reduce < 1.4
    assert 12.0 < all_to_all < 16.0


def test_two_devices_of_a_full_mesh_reach_one_link() -> None:
    """MI300X: 47.7 GB/s over two GPUs, 312.9 over eight (stas00/ml-engineering): a seventh, near enough."""
    ratio = bus_gbyte_per_s(CASES["mi300x 8 AR"]) / bus_gbyte_per_s(CASES["mi300x 2 AR"])
    assert 6.0 < ratio < 7.0


def test_a_message_over_an_ndr_nic() -> None:
    """NCCL moves 46 to 48 GB/s over a 400 Gb/s NIC (nccl-tests issues 130, 267, 290)."""
    time = float(point_to_point_time_s(load_cluster("h100-sxm"), size_bytes=GIB, crosses_domain=1))
    assert 46.0 < GIB / time / 1e9 < 48.0
