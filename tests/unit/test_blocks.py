"""Seconds of each block kind on a machine of round figures: 1e15 FLOP/s, 1e12 bytes/s of memory, 1e11 per link."""

from dataclasses import replace

import numpy as np
import pytest

from ap_search.cost.blocks import BlockCosts, block_costs
from ap_search.cost.context import CostContext
from ap_search.cost.data_parallel import ReplicaComm, exposed_replica_comm
from ap_search.cost.overlap import overlap_ratio, paired_exchange_s, paired_microbatches, unpaired_reason
from ap_search.cost.parts import BlockTime, Part
from ap_search.cost.step import price_table
from ap_search.plan.plan import Schedule
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import LayerKind
from tests.cost_cases import PLAIN, V3_ATTENTION, context, plan, price, round_machine, small_model

T, H, VOCAB, DENSE, SHARED = 4096, 1024, 4096, 2048, 256
SMOOTH = replace(PLAIN, hbm_efficiency_ratio=1.0)
MACHINE = round_machine()
MIB = 2**20
LAYER, MOE, EMBEDDING, MTP, HEAD = range(5)


def where_with(**software: object) -> CostContext:
    return context(small_model(), 8, machine=MACHINE, software=replace(SMOOTH, **software), global_batch=8)  # type: ignore[arg-type]


def costs(text: str, where: CostContext | None = None) -> BlockCosts:
    where = where or where_with()
    return block_costs(where, PlanTable.from_plans([plan(where, text)]), (-1, 0))


def seconds(block: int, part: Part, text: str = "tp=1", **software: object) -> tuple[float, float]:
    """Forward and backward of one part of one block."""
    time = costs(text, where_with(**software)).times[block]
    return float(time.forward[part][0]), float(time.backward[part][0])


def gemm(m: float, n: float, k: float) -> float:
    return max(2 * m * n * k / 1e15, 2 * (m * k + k * n + m * n) / 1e12)


def both_gradients(m: float, n: float, k: float) -> float:
    return gemm(m, k, n) + max(2 * m * n * k / 1e15, (2 * (m * k + m * n) + 8 * k * n) / 1e12)


def test_dense_feed_forward() -> None:
    """Gate and up as one product, down, and an activation that moves 3 tensors forward and 5 backward."""
    forward = gemm(T, 2 * DENSE, H) + gemm(T, H, DENSE) + 6 * T * DENSE / 1e12
    backward = both_gradients(T, 2 * DENSE, H) + both_gradients(T, H, DENSE) + 10 * T * DENSE / 1e12
    assert seconds(LAYER, Part.DENSE_FFN) == pytest.approx((forward, backward))
    unfused = seconds(LAYER, Part.DENSE_FFN, fused_activation=False)
    assert unfused == pytest.approx((forward + 4 * T * DENSE / 1e12, backward + 6 * T * DENSE / 1e12))


def test_shared_experts_are_a_feed_forward_of_their_width() -> None:
    forward = gemm(T, 2 * SHARED, H) + gemm(T, H, SHARED) + 6 * T * SHARED / 1e12
    assert seconds(MOE, Part.SHARED_EXPERT)[0] == pytest.approx(forward)
    assert seconds(LAYER, Part.SHARED_EXPERT) == (0.0, 0.0)


def test_attention() -> None:
    """Fused QKV (16 + 2 x 8 heads of 64) and output; 16 x T^2/2 x 128 multiply-adds; rotation moves q and k twice.

    Heads of 64 reach 64/(64 + 54.5) of what heads of 128 reach by 128/(128 + 54.5).
    """
    narrow = (64 / 118.5) / (128 / 182.5)
    core = 2 * 16 * T * T / 2 * 128 / 1e15 / narrow
    rotate = 4 * T * 24 * 64 / 1e12
    forward = gemm(T, 2048, H) + gemm(T, H, 1024) + core + rotate
    backward = both_gradients(T, 2048, H) + both_gradients(T, H, 1024) + 2.5 * core + rotate
    assert seconds(LAYER, Part.ATTENTION) == pytest.approx((forward, backward))
    again = seconds(LAYER, Part.RECOMPUTE, "recompute=selective:core_attn")
    assert again == pytest.approx((0.0, core))


def test_router_runs_on_the_tokens_a_rank_holds() -> None:
    """A product of 8 columns; scores in fp32 move 6 times forward and 4 backward."""
    for tp in (1, 2):
        tokens = T / tp
        forward = gemm(tokens, 8, H) + 6 * tokens * 32 / 1e12
        backward = both_gradients(tokens, 8, H) + 4 * tokens * 32 / 1e12
        assert seconds(MOE, Part.ROUTER, f"tp={tp}") == pytest.approx((forward, backward))


def test_norms_and_launches() -> None:
    """Two norms move 5 tensors each forward and 6 backward; launches count once forward and twice backward."""
    moved = 2 * 2 * T * H / 1e12
    assert seconds(LAYER, Part.OTHER) == pytest.approx((5 * moved, 6 * moved))
    assert seconds(LAYER, Part.OTHER, fused_norm=True) == pytest.approx((4 * moved, 5 * moved))
    launches = {"launch_per_layer_s": 1.0, "launch_per_moe_layer_s": 10.0}
    assert seconds(LAYER, Part.OTHER, **launches) == pytest.approx((1 + 5 * moved, 2 + 6 * moved))
    assert seconds(MOE, Part.OTHER, **launches) == pytest.approx((11 + 5 * moved, 22 + 6 * moved))
    assert seconds(LAYER, Part.RECOMPUTE, "recompute=selective:layernorm")[1] == pytest.approx(5 * moved)


def test_embedding() -> None:
    """Rows read and written; gradients read, fp32 rows read and written; with tp partial rows are summed."""
    moved = T * H / 1e12
    assert seconds(EMBEDDING, Part.OTHER) == pytest.approx((4 * moved, 10 * moved))
    sent = T * 2 * H / 2 / 1e11
    assert seconds(EMBEDDING, Part.TP_COMM, "tp=2") == pytest.approx((sent, sent))


def test_head() -> None:
    """Logits; cross-entropy moves 12 bytes per logit forward and 8 backward; the norm; its input gathered over tp."""
    logits = T * VOCAB
    forward, backward = gemm(T, VOCAB, H) + 12 * logits / 1e12, both_gradients(T, VOCAB, H) + 8 * logits / 1e12
    assert seconds(HEAD, Part.HEAD) == pytest.approx((forward, backward))
    unfused = seconds(HEAD, Part.HEAD, fused_cross_entropy=False)
    assert unfused == pytest.approx((forward + 12 * logits / 1e12, backward + 6 * logits / 1e12))
    assert seconds(HEAD, Part.OTHER) == pytest.approx((10 * T * H / 1e12, 12 * T * H / 1e12))
    once = T * 2 * H / 2 / 1e11
    assert seconds(HEAD, Part.TP_COMM, "tp=2") == pytest.approx((once, 2 * once))


def test_mtp_module_is_a_layer_a_projection_and_a_head() -> None:
    """eh_proj is 2h x h; its two inputs and its output are gathered over tp: 2 + 1 widths forward, 4 + 1 backward."""
    for text in ("tp=1", "tp=2"):
        times = costs(text).times
        tp = int(text[-1])
        beside = times[MTP].forward - times[MOE].forward - times[HEAD].forward
        assert beside[Part.HEAD] == pytest.approx(gemm(T, H / tp, 2 * H))
        assert beside[Part.OTHER] == pytest.approx(2 * 10 * T / tp * H / 1e12)
        back = times[MTP].backward - times[MOE].backward - times[HEAD].backward
        once = T * 2 * H * (tp - 1) / tp / 1e11
        assert (beside[Part.TP_COMM], back[Part.TP_COMM]) == pytest.approx((3 * once, 5 * once))
        gradient = times[MTP].weight_grad - times[MOE].weight_grad - times[HEAD].weight_grad
        assert gradient == pytest.approx(both_gradients(T, H / tp, 2 * H) - gemm(T, 2 * H, H / tp))


@pytest.mark.parametrize("text", ["tp=1,ep=8", "tp=2,ep=4", "tp=2,cp=2,ep=4,etp=2"])
def test_full_recompute_repeats_the_forward_with_its_communication(text: str) -> None:
    plain, again = costs(text), costs(f"{text},recompute=full")
    for block in (LAYER, MOE):
        before, after = plain.times[block], again.times[block]
        assert after.backward[Part.RECOMPUTE] == pytest.approx(before.forward.sum())
        assert after.sent_backward_bytes == pytest.approx(before.sent_backward_bytes + before.sent_forward_bytes)
        assert np.array_equal(after.forward, before.forward)
    for block in (EMBEDDING, HEAD):
        assert np.array_equal(again.times[block].backward, plain.times[block].backward)


@pytest.mark.parametrize(("block", "module"), [(LAYER, "mlp"), (MOE, "shared_experts")])
def test_repeated_feed_forward_gathers_again(block: int, module: str) -> None:
    """Compute of the module and its gather and scatter: two of the four that a layer's forward sends."""
    part = Part.DENSE_FFN if module == "mlp" else Part.SHARED_EXPERT
    time = costs(f"tp=2,recompute=selective:{module}").times[block]
    gathers = T * 2 * H / 2 / 1e11
    assert time.backward[Part.RECOMPUTE] == pytest.approx(time.forward[part] + 2 * gathers)
    plain = costs("tp=2").times[block]
    assert (time.sent_backward_bytes - plain.sent_backward_bytes).sum() == pytest.approx(2 * gathers * 1e11)


def test_mla_up_projections_are_repeated() -> None:
    """Queries 1536 -> 128 x 192 and keys and values 512 -> 128 x 256."""
    base = small_model()
    kind = LayerKind(mixer=V3_ATTENTION, ffn=base.kinds[0].ffn)
    where = replace(where_with(), model=replace(base, kinds=(kind,), layers=(0,) * 8, mtp_layers=0))
    text = "recompute=selective:mla_up_proj"
    time = block_costs(where, PlanTable.from_plans([plan(where, text)]), (-1,)).times[0]
    up = gemm(T, 128 * 192, 1536) + gemm(T, 128 * 256, 512)
    assert time.backward[Part.RECOMPUTE] == pytest.approx(up)


def test_shared_experts_run_beside_dispatch_and_combine() -> None:
    """Nothing of them is left where the exchange takes longer."""
    alone, beside = seconds(MOE, Part.SHARED_EXPERT, "ep=8"), costs("ep=8", where_with(shared_expert_overlap=True))
    time = beside.times[MOE]
    exchange = float(time.forward[Part.DISPATCH][0] + time.forward[Part.COMBINE][0])
    assert time.forward[Part.SHARED_EXPERT] == pytest.approx(max(alone[0] - exchange, 0.0))
    assert time.hidden.sum() == pytest.approx(min(alone[0], exchange) + min(alone[1], exchange))


def test_pairs_of_micro_batches_hide_what_three_columns_hold() -> None:
    """Hand-made seconds: dispatch 10, combine 20, backward the other way round.

    Experts 12 + 14 s stand beside 30 s; attention 4 s beside 10, 30 s beside 20.
    26 + 4 + 20 s, of which 80 of 100 multiprocessors leave 0.8. Not with allgather, nor where the exchange is repeated.
    """
    time = BlockTime.empty(1)
    time.exchange[:, 0] = 10.0, 20.0, 20.0, 10.0
    time.forward[Part.DISPATCH], time.forward[Part.COMBINE] = 10.0, 20.0
    time.backward[Part.DISPATCH], time.backward[Part.COMBINE] = 20.0, 10.0
    time.forward[Part.EXPERT], time.backward[Part.EXPERT] = 12.0, 14.0
    time.forward[Part.ATTENTION], time.backward[Part.ATTENTION] = 4.0, 30.0
    where = where_with()
    for text, hidden in (
        ("ep=8", [0.8 * 26, 0.8 * 24]),
        ("ep=8,dispatcher=deepep", [0.8 * 26, 0.8 * 24]),
        ("ep=8,dispatcher=allgather", [0, 0]),
        ("ep=8,recompute=full", [0, 0]),
        ("ep=8,recompute=selective:moe", [0, 0]),
    ):
        found = paired_exchange_s(where, costs(text, where).shapes, time)
        assert found[:, 0].tolist() == pytest.approx(hidden)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "ratio", "paired"),
    [
        (Schedule.ONE_F_ONE_B, 1, 1, 0.9, 31),
        (Schedule.ONE_F_ONE_B, 4, 1, 0.0, None),
        (Schedule.INTERLEAVED, 4, 2, 0.9, 32 - (2 * 2 + 4 + 2) / 2),
        (Schedule.DUALPIPE, 4, 1, 1.0, 32 - 5),
        (Schedule.GPIPE, 4, 1, 0.0, None),
    ],
)
def test_which_schedules_pair(schedule: Schedule, pp: int, vpp: int, ratio: float, paired: float | None) -> None:
    """32 micro-batches, stage 1: all but the warm-up of each schedule."""
    assert overlap_ratio(where_with(ep_overlap_ratio=0.9), schedule, pp) == ratio
    if paired is not None:
        count = paired_microbatches(schedule=schedule, pp=pp, vpp=vpp, stage=1, num_microbatches=32)
        assert count == paired


def test_step_communication_hides_behind_first_forward_and_last_backward() -> None:
    """10 s of gather beside 3 s of forward, 10 s of reduction beside 8 s of backward; per micro-batch likewise."""
    comm = ReplicaComm(
        forward_s=2.0, backward_s=20.0, reduce_s=10.0, gather_s=10.0, sent_each_bytes=0.0, sent_once_bytes=0.0
    )
    where = where_with(dp_reduce_overlap_ratio=0.9, dp_gather_overlap_ratio=0.5, fsdp_overlap_ratio=1.0)
    exposed = exposed_replica_comm(where, comm, forward_s=3.0, backward_s=8.0)
    assert exposed.once_s == pytest.approx((10 - 8) + (10 - 3))
    assert exposed.each_s == pytest.approx(0 + 12)


def test_half_of_the_micro_batches_reach_each_stage_of_a_dualpipe_device() -> None:
    """What a parameter costs per micro-batch halves, what it costs per step stays."""
    comm = ReplicaComm(
        forward_s=2.0, backward_s=4.0, reduce_s=8.0, gather_s=16.0, sent_each_bytes=32.0, sent_once_bytes=64.0
    ).seen_by(0.5)
    assert (comm.forward_s, comm.backward_s, comm.sent_each_bytes) == (1.0, 2.0, 16.0)
    assert (comm.reduce_s, comm.gather_s, comm.sent_once_bytes) == (8.0, 16.0, 64.0)


@pytest.mark.parametrize(
    ("text", "buffers"),
    [
        ("tp=1", (32 + 128) * MIB),
        ("tp=2", (32 + 128) * MIB + T * 2 * H),
        ("tp=2,sp=0", (32 + 128) * MIB),
        ("tp=2,pp=2", (32 + 128) * MIB + T * 2 * H + 2 * T // 2 * 2 * H),
    ],
)
def test_buffers_of_a_stage(text: str, buffers: int) -> None:
    """Workspace of GEMMs and grouped GEMMs; the gathered input under sequence parallelism; two messages in transit."""
    for stage in price(where_with(), text).memory.stages:
        assert stage.buffers_bytes == buffers


def test_a_dense_stage_has_no_workspace_for_grouped_products() -> None:
    assert price(where_with(), "pp=8").memory.stages[0].buffers_bytes == 32 * MIB + 2 * T * 2 * H


def test_fullest_block_of_a_stage_sets_what_is_alive_besides() -> None:
    """Stage 0 holds embedding, the dense layer and a MoE layer: the largest of each transient, not their sum."""
    answer = price(where_with(), "pp=4,recompute=full")
    memories = costs("pp=4,recompute=full").memories[:2]
    stage, first = answer.memory.stages[0], answer.plan.pp
    held = first * (8 * T + sum(float(memory.saved[0]) for memory in memories))
    again = max(float(memory.recomputed[0]) for memory in memories)
    running = max(float(memory.transient[0]) for memory in memories)
    assert stage.moment == "backward"
    assert stage.activations_bytes == pytest.approx(held + again + running, abs=1)
    inner = 6 * DENSE * T
    assert float(memories[0].transient[0]) == max(inner, 2 * T * (16 + 8) * 128) + 2 * H * T


def test_order_of_rows_does_not_matter() -> None:
    where = where_with()
    texts = ["tp=2,ep=4", "pp=2", "ep=8,recompute=full", "pp=2,vpp=2,ep=2", "cp=2,tp=2"]
    table = PlanTable.from_plans([plan(where, text) for text in texts])
    order = np.array([3, 1, 4, 0, 2])
    there, back = price_table(where, table), price_table(where, table.take(order))
    assert np.array_equal(there.step_s[order], back.step_s)
    assert np.array_equal(there.peak_bytes[order], back.peak_bytes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dp=8,ep=4", ""),
        ("dp=8,ep=1,recompute=full", ""),
        ("dp=8,ep=4,recompute=full", "full and moe recompute cannot be paired"),
        ("dp=8,ep=4,dispatcher=allgather", "allgather cannot be paired"),
        ("dp=4,ep=4,pp=2", "pp=2 pairs micro-batches under interleaved (vpp above 1) and dualpipe only"),
    ],
)
def test_an_overlap_that_is_not_in_effect_is_said(text: str, reason: str) -> None:
    where = where_with(ep_overlap_ratio=0.9)
    said = unpaired_reason(where, plan(where, text))
    assert said == (reason and f"the software's EP overlap is not in effect: {reason}")
    assert unpaired_reason(where_with(), plan(where, text)) == ""
