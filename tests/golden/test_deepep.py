"""DeepEP's published figures: bytes of messages and buffers, and the time of its normal kernels.

Source: deepseek-ai/DeepEP dd758caf, `docs/legacy.md` (H800, NVLink and 400 Gb/s InfiniBand, 4096 tokens per rank,
hidden 7168, top-8 of 256 experts, fp8 dispatch, bf16 combine), `csrc/`, `tests/legacy/`.

Its bandwidths are logical: bytes of all tokens that a rank receives, its own included, over NVLink for 8 ranks of one
node; over RDMA one copy per token and node, the own node included, for more. Divided by them, these bytes give back the
time. Its test routes 8 ranks uniformly, and more by groups that are nodes: at most 4 of them.
"""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.destinations import destinations
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.dispatch_time import combine_time_s, dispatch_time_s
from ap_search.cost.message import (
    internode_message_bytes,
    low_latency_buffer_bytes,
    low_latency_combine_bytes,
    low_latency_dispatch_bytes,
    normal_buffer_bytes,
    token_payload_bytes,
)
from ap_search.plan.plan import Dispatcher
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.cluster import load_cluster

TOKENS, HIDDEN = 4096, 7168
V3 = MoeFfn(num_experts=256, top_k=8, expert_width=2048, num_groups=8, topk_groups=4)


def test_payload_of_a_token() -> None:
    """7168 + 7168/128 x 4 bytes in fp8; 7168 x 2 in bf16."""
    assert token_payload_bytes(HIDDEN, fp8=True) == 7_392
    assert token_payload_bytes(HIDDEN, fp8=False) == 14_336


def test_message_between_nodes() -> None:
    """Payload + 8 of source + 8 x (4 + 4) of routing, to whole 16 bytes; without routing where the layout is known."""
    assert internode_message_bytes(HIDDEN, top_k=8, fp8=False) == 14_416
    assert internode_message_bytes(HIDDEN, top_k=8, fp8=True) == 7_472
    assert internode_message_bytes(HIDDEN, top_k=0, fp8=False) == 14_352


def test_low_latency_bytes() -> None:
    """128 tokens x 8 x (7392 + 16) there, x 14,336 back; a buffer for 288 experts."""
    assert low_latency_dispatch_bytes(tokens=128, top_k=8, hidden=HIDDEN) == 7_585_792
    assert low_latency_combine_bytes(tokens=128, top_k=8, hidden=HIDDEN) == 14_680_064
    assert low_latency_buffer_bytes(max_tokens=128, hidden=HIDDEN, num_experts=288) == 2_146_961_792


def test_buffers_of_the_normal_kernels() -> None:
    """20 multiprocessors; 64 ranks need slots for 8 nodes over RDMA beside those over NVLink."""
    assert normal_buffer_bytes(hidden=HIDDEN, ranks=8, nodes=1, sms=20) == 335_709_824
    assert normal_buffer_bytes(hidden=HIDDEN, ranks=64, nodes=8, sms=20) == 377_677_824 + 336_047_360


@pytest.mark.parametrize(("count", "simulated"), [(8, 3.954), (64, 7.485)])
def test_group_limited_destinations(count: int, simulated: float) -> None:
    """E = 256, k = 8, 4 of 8 groups kept by the sum of their two best scores: nodes, and ranks of 64; Monte Carlo."""
    assert float(destinations(V3, count)) == pytest.approx(simulated, rel=0.005)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "kept", "counts", "simulated"),
    [
        (160, 6, 8, 3, (4, 5, 8, 16, 32), (2.5605, 3.0288, 2.9827, 4.3887, 5.2389)),
        (32, 8, 8, 4, (4, 8, 16), (3.1381, 3.9910, 6.3764)),
        (96, 4, 6, 2, (8, 12, 24), (2.7257, 2.9738, 3.5403)),
        (60, 4, 4, 2, (3, 5, 10), (2.1065, 2.5967, 3.2287)),
    ],
)
def test_destinations_coarser_finer_and_across_routing_groups(
    experts: int, top_k: int, groups: int, kept: int, counts: tuple[int, ...], simulated: tuple[float, ...]
) -> None:
    """Against our Monte Carlo of the same rule, 10^6 tokens with uniform scores."""
    moe = MoeFfn(num_experts=experts, top_k=top_k, expert_width=1, num_groups=groups, topk_groups=kept)
    assert destinations(moe, np.array(counts)) == pytest.approx(np.array(simulated), rel=0.005)


def bench(ep: int) -> DispatchShape:
    """The published case on one rank of `ep`, nodes of 8."""
    nodes, one = max(ep // 8, 1), np.ones(1)
    moe = MoeFfn(num_experts=256, top_k=8, expert_width=1, num_groups=nodes, topk_groups=min(nodes, 4))
    return DispatchShape(
        moe=moe,
        tokens=TOKENS * one,
        hidden=float(HIDDEN),
        ep=ep * one,
        etp=one,
        dispatcher=int(Dispatcher.DEEPEP) * one,
        ep_per_domain=8 * one,
        ep_domains=nodes * one,
        etp_per_domain=one,
        etp_domains=one,
        group_per_domain=8 * one,
        group_domains=nodes * one,
        router_bytes=4,
        load_ratio=one,
        kept_ratio=one,
        fp8_dispatch=True,
    )


@pytest.mark.parametrize(
    ("dispatcher", "factor"), [(Dispatcher.ALLTOALL, 10), (Dispatcher.DEEPEP, 2), (Dispatcher.HYBRIDEP, 2)]
)
@pytest.mark.parametrize("name", ["gb200-nvl72", "gb300-nvl72"])
def test_leaving_an_nvl72_rack_costs_an_order_of_magnitude(name: str, dispatcher: Dispatcher, factor: float) -> None:
    """64 ranks of one rack against 64 of each of two: NCCL's all-to-all falls from 667 to 48 GB/s there.

    Source: public OCI guide for GB300 (nccl-tests, 64 and 128 GPUs, 16 GiB). No deduplicating dispatcher was measured
    across racks; the presets give them no more than that, but they send a token over the edge once, not 4 times.
    """
    machine, one = load_cluster(name), np.ones(1)
    inside, across = (
        replace(
            bench(8),
            moe=MoeFfn(num_experts=256, top_k=8, expert_width=1),
            dispatcher=int(dispatcher) * one,
            ep=64 * racks * one,
            ep_per_domain=64 * one,
            ep_domains=racks * one,
            group_per_domain=64 * one,
            group_domains=racks * one,
            fp8_dispatch=False,
        )
        for racks in (1, 2)
    )
    assert float((combine_time_s(machine, across) / combine_time_s(machine, inside))[0]) > factor


def published_s(ep: int, bandwidth: float, *, fp8: bool) -> float:
    """Time behind a published bandwidth in GB/s."""
    shape = bench(ep)
    copies = shape.distinct_ranks() if ep <= 8 else shape.distinct_domains()
    return float(TOKENS * copies[0] * token_payload_bytes(HIDDEN, fp8=fp8) / (bandwidth * 1e9))


@pytest.mark.parametrize(("ep", "dispatch", "combine"), [(8, 153, 158), (16, 43, 43), (32, 58, 57), (64, 51, 50)])
def test_normal_kernels_on_h800(ep: int, dispatch: float, combine: float) -> None:
    """All eight figures within 10 % with the constants of the preset."""
    machine, shape = load_cluster("h800-sxm"), bench(ep)
    there, back = published_s(ep, dispatch, fp8=True), published_s(ep, combine, fp8=False)
    assert float(dispatch_time_s(machine, shape)[0]) == pytest.approx(there, rel=0.10)
    assert float(combine_time_s(machine, shape)[0]) == pytest.approx(back, rel=0.10)
