"""Dispatch, pipeline and data-parallel bytes against figures worked out from the sources.

Sources: deepseek-ai/DeepEP dd758caf (`tests/legacy/test_internode.py`: one copy per destination);
NVIDIA/Megatron-LM d98e8a64 (`token_dispatcher.py`, `schedules.py` get_tensor_shapes, `dist_optimizer.md`);
DeepSeek-V3 report section 2.1.2 with a Monte-Carlo run of its group selection.
"""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.collective import sent_bytes
from ap_search.cost.destinations import destinations, distinct_destinations
from ap_search.cost.dispatch import COUNT_BYTES, DispatchShape, combine_sent_bytes, dispatch_sent_bytes
from ap_search.plan.plan import Dispatcher
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.machine import Collective
from tests.cost_cases import V3_EXPERTS, context, deepseek_v3, mixtral_8x7b, price

V3_UNGROUPED = replace(V3_EXPERTS, num_groups=1, topk_groups=1)


def shape(moe: MoeFfn, *, ep: int, dispatcher: Dispatcher, tokens: float = 4096, hidden: float = 7168) -> DispatchShape:
    """A balanced dispatch inside one domain, etp 1, probabilities in fp32."""
    one = np.ones(1)
    return DispatchShape(
        moe=moe,
        tokens=tokens * one,
        hidden=hidden,
        ep=ep * one,
        etp=one,
        dispatcher=int(dispatcher) * one,
        ep_per_domain=ep * one,
        ep_domains=one,
        etp_per_domain=one,
        etp_domains=one,
        group_per_domain=ep * one,
        group_domains=one,
        router_bytes=4,
        load_ratio=one,
        kept_ratio=one,
    )


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "expected"),
    [
        (256, 8, 4, 3.614214),
        (256, 8, 8, 5.294652),
        (256, 8, 16, 6.523280),
        (256, 8, 32, 7.266800),
        (256, 8, 64, 7.675750),
        (8, 2, 8, 2.0),
        (8, 2, 2, 1.571429),
    ],
)
def test_distinct_destinations_of_uniform_routing(experts: int, top_k: int, ranks: int, expected: float) -> None:
    assert distinct_destinations(experts, top_k, ranks) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(("groups", "simulated"), [(8, 3.954), (64, 7.485)])
def test_group_limited_routing_meets_the_simulation(groups: int, simulated: float) -> None:
    """E = 256, k = 8, 4 of 8 groups kept by the sum of their two best scores: 8 nodes, or 64 ranks."""
    assert float(destinations(V3_EXPERTS, groups)) == pytest.approx(simulated, rel=0.02)


def test_alltoall_sends_a_copy_per_token_and_expert() -> None:
    """4096 x 8 x 7168 x 2 = 469,762,048 bytes with what stays; 7/8 of it, 411,041,792, leaves the rank.

    Beside the payload: 4 bytes of probability per copy that leaves, and 256 counts of 8 bytes to each of 7 ranks.
    """
    case = shape(V3_UNGROUPED, ep=8, dispatcher=Dispatcher.ALLTOALL)
    assert case.copies * case.hidden * 2 == 469_762_048
    metadata = 4096 * 8 * 4 * 7 // 8 + 7 * COUNT_BYTES * 256
    assert dispatch_sent_bytes(case) - metadata == 411_041_792
    assert combine_sent_bytes(case) == 411_041_792


def test_allgather_equals_alltoall_where_ep_is_the_number_of_experts_per_token() -> None:
    """Each of 7 peers gets all 4096 tokens of 14,336 bytes: 411,041,792; beside it map and probabilities, 256 x 5."""
    case = shape(V3_UNGROUPED, ep=8, dispatcher=Dispatcher.ALLGATHER)
    assert dispatch_sent_bytes(case) - 7 * 4096 * 256 * 5 == 411_041_792
    assert combine_sent_bytes(case) == 2 * 411_041_792, "the reduce-scatter runs in the fp32 of the probabilities"


def test_allgather_is_worse_beyond_that() -> None:
    """At ep 16 allgather sends 15 copies of each token, alltoall 8 x 15/16 = 7.5."""
    gathered = dispatch_sent_bytes(shape(V3_UNGROUPED, ep=16, dispatcher=Dispatcher.ALLGATHER))
    exchanged = dispatch_sent_bytes(shape(V3_UNGROUPED, ep=16, dispatcher=Dispatcher.ALLTOALL))
    assert gathered > 2.0 * exchanged


def test_deepep_sends_a_copy_per_token_and_rank() -> None:
    """4096 x 5.294652 x 14,336 = 310,903,321 bytes with what stays; 7/8 of it leaves."""
    case = shape(V3_UNGROUPED, ep=8, dispatcher=Dispatcher.DEEPEP)
    kept = case.tokens * case.distinct_ranks() * case.hidden * 2
    assert round(float(kept[0])) == 310_903_321
    assert float(combine_sent_bytes(case)[0]) == pytest.approx(310_903_321 * 7 / 8, abs=1)


def test_bf16_payload_of_hidden_7168_is_14336_bytes() -> None:
    case = shape(V3_UNGROUPED, ep=2, dispatcher=Dispatcher.ALLTOALL, tokens=1)
    assert combine_sent_bytes(case) == 8 * 14_336 / 2


@pytest.mark.parametrize(("axes", "message_bytes"), [("tp=1,pp=2", 58_720_256), ("tp=8,pp=2", 7_340_032)])
def test_pipeline_message(axes: str, message_bytes: int) -> None:
    """4096 tokens x 7168 x 2 bytes, an eighth with tp 8; an end stage sends one per micro-batch."""
    answer = price(context(deepseek_v3(dense=0, moe=4), 16, global_batch=16), axes)
    assert answer.traffic.pp_bytes == message_bytes * answer.plan.num_microbatches


def test_ring_bytes_of_mixtrals_first_stage() -> None:
    """233,635,840 dense parameters over 8 ranks, 1,409,286,144 of experts over 2; fp32 gradients, bf16 weights."""
    dense, expert = 233_635_840, 1_409_286_144
    assert sent_bytes(Collective.REDUCE_SCATTER, size_bytes=dense * 4, ranks=8) == 817_725_440
    assert sent_bytes(Collective.ALL_GATHER, size_bytes=dense * 2, ranks=8) == 408_862_720
    assert sent_bytes(Collective.REDUCE_SCATTER, size_bytes=expert * 4, ranks=2) == 2_818_572_288


def test_data_parallel_bytes_of_a_step() -> None:
    """Mixtral, tp2 pp4 ep8 on 64: the last stage paces, with 4,096 dense parameters (final norm) above the first.

    (817,725,440 + 408,862,720) + 4,096 x 6 x 7/8 dense, (2,818,572,288 + half of it) experts: reduce-scatter of
    gradients and all-gather of weights once per step, whatever the number of micro-batches.
    """
    expected = 817_725_440 + 408_862_720 + 4096 * 6 * 7 // 8 + 2_818_572_288 * 3 // 2
    for batch in (64, 128):
        answer = price(context(mixtral_8x7b(), 64, global_batch=batch), "tp=2,pp=4,ep=8")
        assert answer.traffic.dp_bytes == expected
