"""Time and traffic of blocks, stages and steps on a machine of round figures.

The round machine moves 1e11 bytes/s per device in a domain of 8 and 1e10 across, 1e12 bytes/s of memory, 1e15 FLOP/s.
"""

from dataclasses import astuple, replace

import numpy as np
import pytest

from ap_search.cost.blocks import block_costs, kinds_by_load
from ap_search.cost.context import CostContext, exposed_s
from ap_search.cost.data_parallel import ReplicaComm, optimizer_time_s, replica_comm
from ap_search.cost.dispatch import DispatchShape, combine_sent_bytes, dispatch_sent_bytes
from ap_search.cost.dispatch_time import combine_time_s, dispatch_time_s, permute_bytes
from ap_search.cost.mixer import tensor_comm
from ap_search.cost.moe import dispatch_shape, moe_time
from ap_search.cost.parts import BlockTime, Part, Wire
from ap_search.cost.replicas import replica_groups
from ap_search.cost.shapes import block_shapes
from ap_search.cost.step import price_table
from ap_search.plan.table import PlanTable
from ap_search.spec.blocks import MoeFfn
from ap_search.spec.job import Load
from ap_search.spec.presets import preset_names
from ap_search.spec.profiles import load_software
from tests.cost_cases import PLAIN, context, plan, price, price_all, round_machine, small_model

T, K, H = 4096, 2, 1024
COPY = 2 * H + 4
MOE = MoeFfn(num_experts=8, top_k=K, expert_width=512)
MACHINE = round_machine()


def where_on(devices: int, **more: object) -> CostContext:
    return context(small_model(), devices, machine=MACHINE, global_batch=devices, **more)  # type: ignore[arg-type]


def dispatched(text: str, *, devices: int = 8, ratio: float = 1.0, ffn: MoeFfn = MOE) -> DispatchShape:
    where, one = where_on(devices), np.ones(1)
    shapes = block_shapes(MACHINE, where.job, PlanTable.from_plans([plan(where, text)]))
    return dispatch_shape(where, ffn, shapes, load_ratio=ratio * one, kept_ratio=one)


def test_communication_hides_behind_compute_as_far_as_both_reach() -> None:
    """10 s of communication: 9 may hide, behind 4 s of compute 4 do; nothing hides at ratio 0."""
    assert exposed_s(10.0, compute_s=20.0, overlap_ratio=0.9) == pytest.approx(1.0)
    assert exposed_s(10.0, compute_s=4.0, overlap_ratio=0.9) == pytest.approx(6.0)
    assert exposed_s(10.0, compute_s=4.0, overlap_ratio=0.0) == 10.0


def moe_block(text: str, *, where: CostContext | None = None, ratio: float = 1.0) -> BlockTime:
    where, one = where or where_on(8), np.ones(1)
    shapes = block_shapes(MACHINE, where.job, PlanTable.from_plans([plan(where, text)]))
    shape = dispatch_shape(where, MOE, shapes, load_ratio=ratio * one, kept_ratio=one)
    return moe_time(context=where, moe=MOE, shapes=shapes, shape=shape)


def test_a_moe_layer_with_ep_has_four_passes() -> None:
    """Dispatch and combine forward; backward the gradient of combine goes out and that of dispatch comes back."""
    time, shape = moe_block("ep=8"), dispatched("ep=8")
    sort = permute_bytes(shape) / (1e12 * PLAIN.hbm_efficiency_ratio)
    assert time.forward[Part.DISPATCH] == pytest.approx(dispatch_time_s(MACHINE, shape) + sort)
    assert time.forward[Part.COMBINE] == pytest.approx(combine_time_s(MACHINE, shape) + sort)
    assert time.backward[Part.DISPATCH] == pytest.approx(dispatch_time_s(MACHINE, shape, backward=True) + sort)
    assert time.backward[Part.COMBINE] == pytest.approx(combine_time_s(MACHINE, shape, backward=True) + sort)
    for sent, backward in ((time.sent_forward_bytes, False), (time.sent_backward_bytes, True)):
        assert sent[Wire.DISPATCH] == dispatch_sent_bytes(shape, backward=backward)
        assert sent[Wire.COMBINE] == combine_sent_bytes(shape, backward=backward)


def test_repeating_the_moe_forward_repeats_its_exchange() -> None:
    """Six passes: recompute takes as long as the whole forward and sends as much."""
    plain, again = moe_block("ep=8"), moe_block("ep=8,recompute=selective:moe")
    assert again.backward[Part.RECOMPUTE] == plain.forward.sum()
    assert np.array_equal(again.sent_backward_bytes, plain.sent_backward_bytes + plain.sent_forward_bytes)
    assert np.array_equal(again.forward, plain.forward)


OVERLAPPING = replace(PLAIN, ep_overlap_ratio=1.0)


def test_modules_inside_a_repeated_moe_are_not_repeated_twice() -> None:
    """`moe` repeats activation and shared experts anyway: time and traffic with all three bits are those of `moe`."""
    where = context(small_model(), 8, global_batch=8)
    inside, all_three = (
        price(where, f"tp=2,ep=8,recompute=selective:{modules}") for modules in ("moe", "moe_act+moe+shared_experts")
    )
    assert (all_three.time, all_three.traffic, all_three.memory) == (inside.time, inside.traffic, inside.memory)


def test_exchange_hides_behind_another_micro_batch_where_software_pairs_them() -> None:
    """One stage of 16 micro-batches on ep 8: 15 pairs. Where stages follow one another only interleaved ones pair."""
    which = small_model(mtp_layers=0)
    plain, paired = (
        context(which, 8, software=software, machine=MACHINE, global_batch=128) for software in (PLAIN, OVERLAPPING)
    )
    costs = block_costs(paired, PlanTable.from_plans([plan(paired, "ep=8")]), (-1, 0))
    before, after = price(plain, "ep=8"), price(paired, "ep=8")
    hidden = 7 * 15 * float(costs.times[1].paired.sum())
    assert hidden > 0
    assert before.step_time_s - after.step_time_s == pytest.approx(hidden)
    spared = before.time.dispatch_s + before.time.combine_s - after.time.dispatch_s - after.time.combine_s
    assert (spared, after.hidden.ep_comm_s) == pytest.approx((hidden, hidden))
    assert price(paired, "pp=2,ep=4").time == price(plain, "pp=2,ep=4").time
    assert price(paired, "pp=2,vpp=2,ep=4").step_time_s < price(plain, "pp=2,vpp=2,ep=4").step_time_s


def test_the_stage_that_paces_is_chosen_after_hiding() -> None:
    """Stage 0 has more MoE layers, stage 1 the head: it works less than stage 0 only as long as exchange is exposed."""
    which = replace(small_model(mtp_layers=0), vocab_size=18_432)
    for software, paces in ((PLAIN, 0), (OVERLAPPING, 1)):
        where = context(which, 16, software=software, machine=MACHINE, global_batch=4096)
        answer = price(where, "pp=2,vpp=2,ep=8,stage_layers=4+2+1+1")
        assert answer.critical_stage == paces
        assert answer.stage_times_s[paces] == max(answer.stage_times_s)
        assert sum(astuple(answer.time)) == pytest.approx(answer.step_time_s, rel=1e-9)


@pytest.mark.parametrize("text", ["ep=8", "pp=2,ep=4", "ep=8,sharding=zero3,recompute=full"], ids=str)
def test_adding_gradients_of_a_second_copy_is_part_of_the_step(text: str) -> None:
    """Trainers that keep 16-bit gradients beside the main ones add them once per micro-batch: the parts hold it."""
    plain, added = (
        context(small_model(), 8, software=software, machine=MACHINE, global_batch=128)
        for software in (PLAIN, replace(PLAIN, gradient_copy_bytes=2))
    )
    before, after = price(plain, text), price(added, text)
    assert after.step_time_s > before.step_time_s
    assert sum(astuple(after.time)) == pytest.approx(after.step_time_s, rel=1e-9)


def test_imbalance_is_what_the_busiest_rank_takes_longer() -> None:
    """1.5 times the mean: the other parts stay those of balanced load."""
    even, skewed = moe_block("ep=8"), moe_block("ep=8", ratio=1.5)
    for part in set(Part) - {Part.IMBALANCE}:
        assert skewed.forward[part] == even.forward[part]
    assert even.forward[Part.IMBALANCE] == even.backward[Part.IMBALANCE] == 0
    assert skewed.forward[Part.IMBALANCE] > 0.3 * even.forward[Part.EXPERT]


@pytest.mark.parametrize(
    ("text", "forward", "backward"), [("tp=1", 0, 0), ("tp=4", 2, 3), ("tp=4,sp=0", 2, 2)], ids=str
)
def test_tensor_parallel_traffic_of_a_block(text: str, forward: int, backward: int) -> None:
    """3/4 of 4096 x 2048 bytes per all-gather or reduce-scatter, twice for an all-reduce.

    With sequence parallelism the backward gathers the input once more for the weight gradients.
    """
    where = where_on(8)
    shapes = block_shapes(MACHINE, where.job, PlanTable.from_plans([plan(where, text)]))
    comm = tensor_comm(where, shapes, gathered_width=H, scattered_width=H)
    once = T * 2 * H * 3 / 4
    assert (comm.sent_forward_bytes, comm.sent_backward_bytes) == (forward * once, backward * once)
    assert (comm.forward_s, comm.backward_s) == pytest.approx((forward * once / 1e11, backward * once / 1e11))


def test_context_parallel_ring_sends_three_chunks_per_neighbour() -> None:
    """cp 4: keys and values of a quarter of the tokens, 2 x 1024 x 2 x 8 x 64 bytes, 3 times forward and 6 backward."""
    where = where_on(8)
    costs = block_costs(where, PlanTable.from_plans([plan(where, "cp=4")]), (-1, 0))
    chunk = T / 4 * 2 * 8 * (64 + 64)
    for time in costs.times[:2]:
        assert (time.sent_forward_bytes[Wire.CP], time.sent_backward_bytes[Wire.CP]) == (3 * chunk, 6 * chunk)
        assert time.forward[Part.CP_COMM] == pytest.approx(3 * chunk / 1e11)
        assert time.backward[Part.CP_COMM] == pytest.approx(6 * chunk / 1e11)


def replicas(sharding: str, devices: int = 8) -> ReplicaComm:
    """Data-parallel communication of 1e8 dense parameters."""
    where = where_on(devices)
    table = PlanTable.from_plans([plan(where, f"tp=1,sharding={sharding}")])
    group, _ = replica_groups(where, table)
    return replica_comm(where, params=1e8, sharding=table.sharding, group=group)


@pytest.mark.parametrize(
    ("sharding", "each", "once"),
    [("none", 0, 2 * 4e8), ("zero1", 0, 4e8 + 2e8), ("zero2", 4e8, 2e8), ("zero3", 2 * 2e8 + 4e8, 0)],
)
def test_data_parallel_traffic(sharding: str, each: float, once: float) -> None:
    """8 ranks send 7/8 of 4e8 bytes of gradients and 2e8 of weights; an all-reduce twice."""
    comm = replicas(sharding)
    assert comm.sent_each_bytes == each * 7 / 8
    assert comm.sent_once_bytes == once * 7 / 8
    assert comm.forward_s + comm.backward_s == pytest.approx(each * 7 / 8 / 1e11)
    assert comm.reduce_s + comm.gather_s == pytest.approx(once * 7 / 8 / 1e11)


def test_hsdp_gathers_inside_a_domain_and_reduces_between_domains() -> None:
    """16 ranks in two domains: as zero3 over 8, and an all-reduce of an eighth of the gradients between two."""
    comm, inside = replicas("hsdp", devices=16), replicas("zero3")
    assert comm.sent_each_bytes == inside.sent_each_bytes
    assert comm.forward_s + comm.backward_s == pytest.approx(inside.forward_s + inside.backward_s)
    assert comm.sent_once_bytes == 2 * 4e8 / 8 / 2
    assert comm.reduce_s == pytest.approx(4e8 / 8 / 1e10, rel=0.01)


def test_optimizer_streams_its_state() -> None:
    """Per parameter 2 x 4 of gradients, 2 x 12 of state, 2 of weights: 34 bytes at 0.8e12 bytes/s."""
    assert optimizer_time_s(where_on(8), 1e9) == pytest.approx(34e9 / 0.8e12)


PLANS = [
    "tp=1",
    "tp=2,pp=2,ep=4",
    "tp=2,pp=4,ep=2,etp=2,recompute=full",
    "pp=2,vpp=2,ep=8,sharding=zero2",
    "pp=4,ep=4,schedule=zb_h1,dispatcher=deepep",
    "pp=4,ep=4,schedule=dualpipe,sharding=zero3",
    "pp=2,schedule=gpipe,ep=4,dispatcher=allgather",
    "cp=2,tp=2,ep=8,sharding=hsdp,recompute=selective:moe_act+layernorm",
    "pp=4,stage_layers=1+2+2+3,ep=4",
]


@pytest.mark.parametrize("text", PLANS)
def test_time_parts_sum_to_the_step(text: str) -> None:
    answer = price(context(small_model(), 16, global_batch=64), text)
    assert sum(astuple(answer.time)) == pytest.approx(answer.step_time_s, rel=1e-9)
    assert min(astuple(answer.time)) >= 0.0
    assert answer.step_time_s >= max(answer.stage_times_s)
    assert answer.tokens_per_s_per_device == pytest.approx(64 * 4096 / 16 / answer.step_time_s)


@pytest.mark.parametrize("name", preset_names("software"))
def test_time_parts_sum_to_the_step_with_every_profile(name: str) -> None:
    """Gradients added apart, waits for the host, unfused attention: what lengthens the step stands under a part."""
    where = context(small_model(), 16, global_batch=64, software=load_software(name))
    answer = price(where, "tp=2,pp=2,ep=4")
    assert sum(astuple(answer.time)) == pytest.approx(answer.step_time_s, rel=1e-9)


def test_figures_per_device_are_of_the_devices_and_sequences_of_the_plan() -> None:
    """dp=128 in a job of 16 devices trains 128 sequences on 128 devices: as much per device as dp=16 on 16 of 16."""
    wide = price(context(small_model(), 16, global_batch=64), "dp=128")
    assert wide.tokens_per_s_per_device == pytest.approx(128 * 4096 / 128 / wide.step_time_s)
    right = price(context(small_model(), 16, global_batch=16), "dp=16")
    assert wide.mfu_ratio == pytest.approx(right.mfu_ratio, rel=0.1)


@pytest.mark.parametrize("text", PLANS)
def test_one_plan_costs_what_it_costs_in_a_table(text: str) -> None:
    where = context(small_model(), 16, global_batch=64)
    together, position = price_all(where, PLANS), PLANS.index(text)
    answer = price(where, text)
    assert together.step_s[position] == pytest.approx(answer.step_time_s, rel=1e-12)
    assert together.peak_bytes[position] == pytest.approx(answer.peak_memory_bytes, abs=16)


def test_equal_stages_wait_a_forward_and_a_backward_per_stage() -> None:
    """1f1b over 4 equal stages (a vocabulary of one row leaves little of embedding and head) and 8 micro-batches."""
    which = replace(small_model(layers=8, mtp_layers=0), layers=(1,) * 8, vocab_size=1)
    where = context(which, 4, machine=MACHINE, software=replace(PLAIN, vocab_divisor=1), global_batch=8)
    answer = price(where, "pp=4")
    assert answer.time.bubble_s == pytest.approx(answer.stage_times_s[-1] / 8 * 3, rel=0.05)


def test_weight_gradients_fill_the_bubble_of_zb_h1() -> None:
    where = context(small_model(), 16, global_batch=64)
    plain, filled = price(where, "pp=4,ep=4"), price(where, "pp=4,ep=4,schedule=zb_h1")
    assert filled.time.bubble_s < plain.time.bubble_s
    assert filled.stage_times_s == plain.stage_times_s


def test_table_times_only_what_fits() -> None:
    where = context(small_model(), 16, global_batch=64)
    table = PlanTable.from_plans([plan(where, "tp=1"), plan(where, "tp=2,pp=2,ep=4,recompute=full")])
    prices = price_table(where, table, limit_bytes=float(price_table(where, table).peak_bytes.min()))
    assert np.isinf(prices.step_s[0]) and np.isfinite(prices.step_s[1])
    assert prices.peak_bytes[0] > prices.peak_bytes[1]


def test_end_stages_send_one_message_fewer() -> None:
    """Per micro-batch with v chunks: 2v messages of 4096 x 2048 bytes in the middle, 2v - 1 at either end."""
    message = T * 2 * H
    for text, messages in (("pp=2,ep=8", 1), ("pp=2,vpp=2,ep=8", 3)):
        answer = price(context(small_model(), 16, global_batch=64), text)
        assert answer.traffic.pp_bytes == messages * message * answer.plan.num_microbatches


def test_mirror_devices_of_dualpipe_hold_the_same() -> None:
    """Device r holds stages r and 3-r: all four hold twice the parameters of a stage, mirrored."""
    where = context(small_model(mtp_layers=0), 4, global_batch=16)
    dual = price(where, "pp=4,schedule=dualpipe,stage_layers=1+2+2+3").memory.stages
    single = price(where, "pp=4,stage_layers=1+2+2+3").memory.stages
    for stage in range(4):
        pair = single[stage], single[3 - stage]
        assert dual[stage].expert.total_bytes == sum(one.expert.total_bytes for one in pair)
        assert dual[stage].shared.total_bytes == sum(one.shared.total_bytes for one in pair)
        assert replace(dual[stage], stage=0) == replace(dual[3 - stage], stage=0)


def test_dualpipe_peaks_where_the_heavier_stage_is_deeper() -> None:
    """Stages of 4 layers after stages of 2: equal neighbours keep unequal numbers of micro-batches of either."""
    where = context(small_model(layers=24, mtp_layers=0), 8, global_batch=32)
    text = "pp=8,schedule=dualpipe,stage_layers=2x4+4x4"
    assert price_all(where, [text]).peak_bytes[0] == pytest.approx(price(where, text).peak_memory_bytes, abs=16)


def test_a_dualpipe_device_gathers_each_stage_for_half_of_the_micro_batches() -> None:
    """Two equal stages per device: as many bytes per step as one such stage for all micro-batches without dualpipe."""
    which = replace(small_model(layers=16, mtp_layers=0), layers=(1,) * 16, vocab_size=1)
    where = context(which, 16, software=replace(PLAIN, vocab_divisor=1), global_batch=64)
    dual, single = (price(where, f"pp=4,sharding=zero3,schedule={kind}") for kind in ("dualpipe", "1f1b"))
    assert dual.traffic.dp_bytes == pytest.approx(single.traffic.dp_bytes, rel=1e-3)


def test_stages_without_layers_are_priced() -> None:
    """16 stages for 8 layers: a rule refuses the plan, but it has a price; empty stages hold workspace and messages."""
    answer = price(context(small_model(), 16, global_batch=64), "pp=16")
    empty = answer.memory.stages[10]
    assert empty.total_bytes == empty.buffers_bytes == 32 * 2**20 + 2 * T * 2 * H
    assert sum(stage.expert.weights_bytes > 0 for stage in answer.memory.stages) == 8, "seven layers and the MTP module"


def test_loads_per_layer() -> None:
    """The same row for each of 7 MoE layers is that row for all; another row in one layer costs there only."""
    skewed, even = [0.3, *[0.1] * 7], [0.125] * 8
    answers = [
        price(context(small_model(), 8, shares=rows, global_batch=8), "ep=8")
        for rows in ([skewed], [skewed] * 7, [even] * 6 + [skewed], [even] * 7)
    ]
    assert answers[1].time == answers[0].time
    assert answers[1].memory == answers[0].memory
    assert answers[3].time.imbalance_s == 0.0
    # The MTP module repeats the last layer, skew included: 2 of 8 experts layers instead of all.
    assert answers[2].time.imbalance_s == pytest.approx(answers[0].time.imbalance_s * 2 / 8, rel=1e-9)


def test_an_mtp_module_of_its_own_kind_takes_the_last_load() -> None:
    which = replace(small_model(), mtp_kind_index=1)
    load = Load(name="rows", shares=np.array([[0.125] * 8] * 6 + [[0.3, *[0.1] * 7]]))
    split, rows = kinds_by_load(which, load)
    assert split.mtp_index == 1
    assert rows[1] == 6
    assert [rows[kind] for kind in split.layers] == [-1, *[0] * 6, 6], "layers of equal loads share a kind"
