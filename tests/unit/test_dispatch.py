"""Dispatch and combine by hand: bytes sent and received, seconds on a machine of round figures, memory.

T = 4096 tokens, top-2 of 8 experts, hidden 1024; bf16 payload, probabilities in fp32. The round machine moves 1e11
bytes/s per device in a domain of 8 and 1e10 across.
"""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.dispatch import (
    DispatchShape,
    combine_received_bytes,
    combine_sent_bytes,
    dispatch_received_bytes,
    dispatch_sent_bytes,
)
from ap_search.cost.dispatch_memory import dispatch_state_bytes, dispatch_transient_bytes
from ap_search.cost.dispatch_time import combine_time_s, dispatch_time_s, free_sm_ratio, permute_bytes
from ap_search.cost.moe import dispatch_shape, moe_time
from ap_search.cost.parts import Part
from ap_search.cost.shapes import block_shapes
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import MoeFfn
from tests.cost_cases import PLAIN, context, plan, round_machine, small_model

T, K, H, E = 4096, 2, 1024, 8
MOE = MoeFfn(num_experts=E, top_k=K, expert_width=512)
WIDE = replace(MOE, num_experts=16)
MACHINE = round_machine()


def dispatched(text: str, *, devices: int = 8, ffn: MoeFfn = MOE, **more: object) -> DispatchShape:
    where, one = context(small_model(), devices, machine=MACHINE, global_batch=devices), np.ones(1)
    shapes = block_shapes(MACHINE, where.job, PlanTable.from_plans([plan(where, text)]))
    shape = dispatch_shape(where, ffn, shapes, load_ratio=one, kept_ratio=one)
    return replace(shape, **more)  # type: ignore[arg-type]


def test_alltoall_sends_copies_probabilities_and_counts() -> None:
    """7/8 of 8192 copies of 2048 + 4 bytes, and 8 counts of 8 bytes to each of 7 ranks; combine: copies alone."""
    shape = dispatched("ep=8")
    assert dispatch_sent_bytes(shape) == T * K * 7 / 8 * (2 * H + 4) + 7 * 8 * 8
    assert combine_sent_bytes(shape) == T * K * 7 / 8 * 2 * H
    assert combine_sent_bytes(shape, backward=True) == T * K * 7 / 8 * 2 * H
    assert dispatch_sent_bytes(shape, backward=True) == T * K * 7 / 8 * (2 * H + 4), "probabilities have gradients"


def test_allgather_sends_all_tokens_to_all() -> None:
    """7 peers get 4096 tokens of 2048 bytes, 8 flags, 8 probabilities; combine reduces in fp32, 4096 bytes each."""
    shape = dispatched("ep=8,dispatcher=allgather")
    assert dispatch_sent_bytes(shape) == 7 * T * (2 * H + E + 4 * E)
    assert combine_sent_bytes(shape) == 7 * T * 4 * H
    assert combine_sent_bytes(shape, backward=True) == 7 * T * 4 * H
    assert dispatch_sent_bytes(shape, backward=True) == 7 * T * (2 * H + 4 * E)


def test_deepep_sends_a_token_once_per_rank() -> None:
    """Top-2 of 8 lies on 2 ranks of 8. With indices (8 bytes), weights (4) and source (4): 2048 + 2 x 12 + 4 bytes."""
    shape = dispatched("ep=8,dispatcher=deepep")
    delivered = T * 2 * 7 / 8
    assert dispatch_sent_bytes(shape) == pytest.approx(delivered * (2 * H + 28))
    assert combine_sent_bytes(shape) == pytest.approx(delivered * 2 * H)
    assert combine_sent_bytes(shape, backward=True) == pytest.approx(delivered * 2 * H)
    assert dispatch_sent_bytes(shape, backward=True) == pytest.approx(delivered * (2 * H + 8))


def test_fp8_dispatch_is_deepeps_alone() -> None:
    """1024 + 8 scales of 4 bytes instead of 2048, towards experts; partial sums stay bf16."""
    shape = dispatched("ep=8,dispatcher=deepep", fp8_dispatch=True)
    delivered = T * 2 * 7 / 8
    assert dispatch_sent_bytes(shape) == pytest.approx(delivered * (H + 32 + 28))
    assert combine_sent_bytes(shape, backward=True) == pytest.approx(delivered * (H + 32))
    assert combine_sent_bytes(shape) == pytest.approx(delivered * 2 * H)
    for other in ("alltoall", "allgather", "hybridep"):
        plain = dispatched(f"ep=8,dispatcher={other}")
        assert dispatch_sent_bytes(replace(plain, fp8_dispatch=True)) == dispatch_sent_bytes(plain)


def test_hybridep_gathers_the_routing_map() -> None:
    """2048 bytes and one expert's probability per delivered token; 4096 x 8 flags to 7 ranks before."""
    shape = dispatched("ep=8,dispatcher=hybridep")
    delivered = T * 2 * 7 / 8
    assert dispatch_sent_bytes(shape) == pytest.approx(delivered * (2 * H + 4) + 7 * T * E)
    assert combine_sent_bytes(shape) == pytest.approx(delivered * 2 * H)
    assert dispatch_sent_bytes(shape, backward=True) == pytest.approx(delivered * (2 * H + 4))


def test_expert_tensor_parallelism_gathers_and_reduces_besides() -> None:
    """ep 4 x etp 2: 3/4 of the copies exchanged; each then goes to one more rank, and comes back in fp32."""
    shape = dispatched("tp=2,ep=4,etp=2")
    copies = T / 2 * K
    assert dispatch_sent_bytes(shape) == copies * (2 * H + 4) * (3 / 4 + 1) + 7 * 8 * 8
    assert combine_sent_bytes(shape) == copies * (2 * H * 3 / 4 + 4 * H)
    assert combine_sent_bytes(shape, backward=True) == copies * (2 * H * 3 / 4 + 4 * H)
    assert dispatch_sent_bytes(shape, backward=True) == copies * (2 * H + 4) * (3 / 4 + 1)
    counts = 8 * E * 7 / 1e11
    assert dispatch_time_s(MACHINE, shape) == pytest.approx(copies * (2 * H + 4) * (3 / 4 + 1) / 1e11 + counts)
    assert combine_time_s(MACHINE, shape) == pytest.approx(copies * (2 * H * 3 / 4 + 4 * H) / 1e11)


def test_etp_copies_of_deepep_are_destinations_of_their_own() -> None:
    """Top-2 of 8 lies on 4 (1 - 15/28) = 1.857 of 4 ep ranks, each twice; 7/8 of 8 ranks are others."""
    shape = dispatched("tp=2,ep=4,etp=2,dispatcher=deepep")
    assert combine_sent_bytes(shape) == pytest.approx(T / 2 * 4 * (1 - 15 / 28) * 2 * 7 / 8 * 2 * H)


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
def test_the_busiest_rank_receives_more_and_sends_more_back(dispatcher: str) -> None:
    """What it sends out stays as it is; payload in, and home, is 1.5 times the mean; so is the time."""
    even = dispatched(f"ep=8,dispatcher={dispatcher}")
    skewed = replace(even, load_ratio=np.full(1, 1.5))
    assert dispatch_sent_bytes(skewed) == dispatch_sent_bytes(even)
    assert combine_received_bytes(skewed) == combine_received_bytes(even)
    assert combine_sent_bytes(skewed) == pytest.approx(1.5 * combine_sent_bytes(even))
    assert combine_received_bytes(skewed, backward=True) == pytest.approx(1.5 * combine_sent_bytes(even, backward=True))
    assert dispatch_received_bytes(skewed) > 1.4 * dispatch_received_bytes(even)
    assert combine_time_s(MACHINE, skewed) == pytest.approx(1.5 * combine_time_s(MACHINE, even))


def test_allgather_does_not_care_who_is_busy() -> None:
    even = dispatched("ep=8,dispatcher=allgather")
    skewed = replace(even, load_ratio=np.full(1, 3.0))
    for size in (dispatch_sent_bytes, dispatch_received_bytes, combine_sent_bytes, combine_received_bytes):
        assert size(skewed) == size(even)
    assert dispatch_time_s(MACHINE, skewed) == dispatch_time_s(MACHINE, even)


def test_a_rank_gets_no_token_twice() -> None:
    """Eight times the mean of 2 tokens in 8: no more than every token of all 8 ranks."""
    shape = dispatched("ep=8,dispatcher=deepep", load_ratio=np.full(1, 8.0))
    assert shape.delivered(shape.load_ratio) == 8 * T


def test_alltoall_in_one_domain() -> None:
    """7/8 of the copies at 1e11 bytes/s, then their probabilities; the counts before."""
    shape = dispatched("ep=8")
    copies = T * K * 7 / 8
    assert dispatch_time_s(MACHINE, shape) == pytest.approx((copies * (2 * H + 4) + 7 * 8 * E) / 1e11)
    assert combine_time_s(MACHINE, shape) == pytest.approx(copies * 2 * H / 1e11)
    assert dispatch_time_s(MACHINE, shape, backward=True) == pytest.approx(copies * (2 * H + 4) / 1e11)


def test_alltoall_across_domains() -> None:
    """ep 16 over two domains: half of the copies leave over the network at 1e10 bytes/s, slower than what stays."""
    shape = dispatched("ep=16", devices=16, ffn=WIDE)
    assert combine_time_s(MACHINE, shape) == pytest.approx(T * K * 2 * H / 2 / 1e10)


def test_allgather_in_one_domain() -> None:
    shape = dispatched("ep=8,dispatcher=allgather")
    assert dispatch_time_s(MACHINE, shape) == pytest.approx(7 * T * (2 * H + 5 * E) / 1e11)
    assert combine_time_s(MACHINE, shape) == pytest.approx(7 * T * 4 * H / 1e11)


def test_deepep_takes_the_slower_of_two_resources() -> None:
    """Top-2 of 8 goes to 2 ranks of 8. Top-2 of 16 over two domains of 8: 2 (1 - (8 x 7)/(16 x 15)) = 1.533 domains,
    half of them others, in messages of 2048 + 8 bytes aligned to 16.
    """
    inside = dispatched("ep=8,dispatcher=deepep")
    assert combine_time_s(MACHINE, inside) == pytest.approx(T * 2 * 2 * H / 1e11)
    across = dispatched("ep=16,dispatcher=deepep", devices=16, ffn=WIDE)
    remote = 2 * (1 - 56 / 240) / 2
    assert combine_time_s(MACHINE, across) == pytest.approx(T * remote * 2064 / 1e10)


def test_a_full_mesh_has_one_link_per_pair() -> None:
    """Two ranks of a mesh of 8: half of what arrives comes over one link of 1e11/7, instead of 1e11 for all."""
    level = replace(MACHINE.levels[0], pair_bytes_per_s=1e11 / 7)
    mesh = round_machine(levels=(level, MACHINE.levels[1]))
    pair, whole = (dispatched(f"ep={ep},dispatcher=deepep") for ep in (2, 8))
    assert combine_time_s(mesh, pair) == pytest.approx(T * 2 * (1 - 6 / 28) * 2 * H / 2 / (1e11 / 7))
    assert combine_time_s(mesh, whole) == combine_time_s(MACHINE, whole)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "deepep", "hybridep"])
def test_one_expert_parallel_rank_sends_nothing(dispatcher: str) -> None:
    shape = dispatched(f"ep=1,dispatcher={dispatcher}")
    for backward in (False, True):
        for time_s in (dispatch_time_s, combine_time_s):
            assert time_s(MACHINE, shape, backward=backward) == 0.0
        for size in (dispatch_sent_bytes, dispatch_received_bytes, combine_sent_bytes, combine_received_bytes):
            assert size(shape, backward=backward) == 0.0


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("ep=1", 1 + 2),
        ("ep=4", 1 + 2 + 2 * 2),
        ("ep=8", 1 + 2),
        ("ep=8,dispatcher=allgather", 2 * 2),
        ("ep=8,dispatcher=deepep", 2 + 2),
        ("ep=8,dispatcher=hybridep", 0),
    ],
)
def test_permutation_moves_tokens_in_memory(text: str, moved: int) -> None:
    """Tokens read, copies written; sorted again where several experts are local; fused kernels do it on the way."""
    assert permute_bytes(dispatched(text)) == pytest.approx(moved * T * 2 * H)


def test_copies_of_experts_are_sorted_too() -> None:
    """8 experts and 8 copies over 8 ranks: two local experts each, so that arrivals are sorted."""
    assert permute_bytes(dispatched("ep=8", redundant_experts=8)) == pytest.approx((1 + 2 + 2 * 2) * T * 2 * H)


def test_state_of_a_micro_batch_by_dispatcher() -> None:
    """alltoall: 8 flags a token, 12 bytes a copy, 24 split sizes. allgather: flags of 8 x 4096 tokens for one expert.

    deepep: 24 bytes and 8 x 5 of the handle a token, 4 + 1 a received token (2 x 4096), 8 a row, 24 split sizes.
    """
    splits = 8 * (16 + E)
    assert dispatch_state_bytes(dispatched("ep=8")) == T * E + T * K * 12 + splits
    assert dispatch_state_bytes(dispatched("ep=8,dispatcher=allgather")) == 8 * T + T * K * 12 + splits
    fused = T * (K * 12 + 8 * 5) + 2 * T * 5 + 8 * T * K + splits
    assert dispatch_state_bytes(dispatched("ep=8,dispatcher=deepep")) == pytest.approx(fused)


def test_reductions_in_the_routers_type_need_a_copy() -> None:
    """allgather: 8 x 4096 tokens in bf16 and in fp32, 8192 rows; with bf16 probabilities nothing is cast."""
    shape = dispatched("ep=8,dispatcher=allgather")
    assert dispatch_transient_bytes(shape) == 8 * T * H * (2 + 4) + T * K * 2 * H
    assert dispatch_transient_bytes(replace(shape, router_bytes=2)) == 8 * T * H * 2 + T * K * 2 * H


def test_dispatch_kernels_take_multiprocessors() -> None:
    assert free_sm_ratio(MACHINE) == 0.8


def test_the_host_waits_for_counts_once_per_forward() -> None:
    """50 us more forward, and once more where the layer's forward is repeated; none with padded inputs."""

    def others(text: str, sync_s: float, **job: object) -> np.ndarray:
        software = replace(PLAIN, host_sync_s=sync_s)
        where = context(small_model(), 8, machine=MACHINE, global_batch=8, software=software, **job)
        shapes, one = block_shapes(MACHINE, where.job, PlanTable.from_plans([plan(where, text)])), np.ones(1)
        shape = dispatch_shape(where, MOE, shapes, load_ratio=one, kept_ratio=one)
        time = moe_time(where, MOE, shapes, shape=shape)
        return np.array([time.forward[Part.OTHER, 0], time.backward[Part.RECOMPUTE, 0]])

    again = "ep=8,recompute=selective:moe"
    assert others(again, 50e-6) - others(again, 0.0) == pytest.approx([50e-6, 50e-6])
    padded = {"capacity_factor": 1.0, "pad_to_capacity": True}
    assert np.array_equal(others(again, 50e-6, **padded), others(again, 0.0, **padded))


@pytest.mark.parametrize("ep", [2, 8, 64])
@pytest.mark.parametrize("kept", [0.9, 0.5])
def test_a_destination_is_lost_only_with_all_its_copies(ep: int, kept: float) -> None:
    """Against drawn routing whose copies are each dropped with the same chance."""
    moe, draw = MoeFfn(num_experts=64, top_k=8, expert_width=512), np.random.default_rng(0)
    chosen = draw.random((20_000, 64)).argsort(axis=1)[:, :8]
    ranks = np.where(draw.random(chosen.shape) < kept, chosen * ep // 64, -1)
    reached = (ranks[:, :, None] == np.arange(ep)).any(axis=1).sum(axis=1).mean()
    shape = dispatched(f"dp={ep},ep={ep},dispatcher=deepep", devices=ep, ffn=moe)
    assert replace(shape, kept_ratio=kept).distinct_ranks() == pytest.approx(reached, rel=0.05)
