"""Laws that prices of plans obey whatever the plan: shards sum, parts sum, more bandwidth is never slower."""

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.cost.context import CostContext
from ap_search.cost.details import price_plan
from ap_search.cost.step import price_table
from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Dispatcher, Layout, Plan, Recompute, Schedule, Sharding
from ap_search.plan.table import PlanTable
from ap_search.result import StageMemory
from ap_search.spec.machine import Machine
from ap_search.spec.parameters import layer_params, mtp_extra_params, params_mtp, params_total
from ap_search.spec.software import Software
from tests.cost_cases import PLAIN, context, h100, small_model

DEVICES, BATCH, LAYERS = 16, 64, 8
MODEL = small_model(layers=LAYERS)
WHERE = context(MODEL, DEVICES, global_batch=BATCH)
MODULES = [Recompute.NONE, Recompute.FULL, Recompute.MOE_ACT, Recompute.MOE, Recompute.LAYERNORM | Recompute.MLP]


@st.composite
def layouts(draw: st.DrawFn, pp: int, vpp: int) -> Layout:
    """Each virtual stage has at least one of the layers; where the others lie is drawn."""
    stages = pp * vpp
    extra = draw(st.lists(st.integers(0, stages - 1), min_size=LAYERS - stages, max_size=LAYERS - stages))
    return layout_of([1 + extra.count(stage) for stage in range(stages)], pp=pp, vpp=vpp)


@st.composite
def plans(draw: st.DrawFn, **fixed: st.SearchStrategy[object]) -> Plan:
    """A plan whose meshes multiply to the devices; `fixed` replaces the strategy of a knob."""
    pp = draw(fixed.get("pp", st.sampled_from([1, 2, 4])))
    tp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([size for size in (1, 2) if tp * pp * size <= DEVICES]))
    dp = DEVICES // (tp * cp * pp)
    etp = draw(fixed.get("etp", st.sampled_from([1, 2])))
    ep = draw(fixed.get("ep", st.sampled_from([size for size in (1, 2, 4, 8) if size * etp * pp <= DEVICES])))
    legal = [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1]
    legal += [Schedule.INTERLEAVED] if 1 < pp <= 4 else []
    legal += [Schedule.DUALPIPE] if pp > 1 else []
    schedule = draw(fixed.get("schedule", st.sampled_from(legal)))
    vpp = 2 if schedule == Schedule.INTERLEAVED else 1
    mbs = draw(st.sampled_from([1, 2]))
    return Plan(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        ep=ep,
        etp=etp,
        edp=DEVICES // (ep * etp * pp),
        mbs=mbs,
        num_microbatches=BATCH // (mbs * dp),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        sharding=draw(fixed.get("sharding", st.sampled_from(list(Sharding)))),
        recompute=draw(fixed.get("recompute", st.sampled_from(MODULES))),
        dispatcher=draw(fixed.get("dispatcher", st.sampled_from(list(Dispatcher)))),
        schedule=schedule,
        layout=draw(layouts(pp, vpp)),
    )


def hiding(ratio: float) -> Software:
    """Software that hides a share of every communication."""
    return replace(
        PLAIN,
        dp_reduce_overlap_ratio=ratio,
        dp_gather_overlap_ratio=ratio,
        fsdp_overlap_ratio=ratio,
        tp_overlap_ratio=ratio,
        cp_overlap_ratio=ratio,
        pp_overlap_ratio=ratio,
        ep_overlap_ratio=ratio,
        shared_expert_overlap=ratio > 0,
    )


tables = st.lists(plans(), min_size=2, max_size=4)
law = settings(max_examples=10, deadline=None)


def prices(where: CostContext, rows: list[Plan]) -> tuple[np.ndarray, np.ndarray]:
    found = price_table(where, PlanTable.from_plans(rows))
    return found.step_s, found.peak_bytes


def state_bytes(stage: StageMemory) -> int:
    return stage.shared.total_bytes + stage.expert.total_bytes + stage.router_bytes


@law
@given(tables, st.sampled_from([0.0, 0.9]))
def test_a_table_of_plans_costs_what_each_plan_costs(rows: list[Plan], overlap: float) -> None:
    where = replace(WHERE, software=hiding(overlap))
    step_s, peak_bytes = prices(where, rows)
    for index, row in enumerate(rows):
        answer = price_plan(where, row)
        assert step_s[index] == pytest.approx(answer.step_time_s, rel=1e-12)
        assert peak_bytes[index] == pytest.approx(answer.peak_memory_bytes, abs=16)


@law
@given(plans(), st.sampled_from([0.0, 0.9]))
def test_parts_are_not_negative_and_sum_to_the_whole(row: Plan, overlap: float) -> None:
    answer = price_plan(replace(WHERE, software=hiding(overlap)), row)
    assert sum(astuple(answer.time)) == pytest.approx(answer.step_time_s, rel=1e-9)
    assert min(astuple(answer.time)) >= 0.0
    assert min(*astuple(answer.hidden), *astuple(answer.traffic)) >= 0
    assert answer.step_time_s >= max(answer.stage_times_s) * (1 - 1e-9)
    for stage in answer.memory.stages:
        rest = stage.activations_bytes + stage.dispatch_bytes + stage.logits_bytes + stage.buffers_bytes
        assert state_bytes(stage) + rest + stage.reserve_bytes == stage.total_bytes
        assert min(stage.activations_bytes, stage.dispatch_bytes, stage.logits_bytes, stage.buffers_bytes) >= 0
    assert max(stage.total_bytes for stage in answer.memory.stages) == answer.peak_memory_bytes


@law
@given(plans(schedule=st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE])))
def test_expert_shards_of_all_ranks_are_the_experts(row: Plan) -> None:
    """Weights per rank x ep x etp, over all stages, times the ranks that share them: 2 bytes per expert parameter."""
    experts = sum(layer_params(MODEL, MODEL.kinds[index]).expert for index in (*MODEL.layers, MODEL.mtp_index))
    whole, split = (
        sum(stage.expert.weights_bytes for stage in price_plan(WHERE, replace(row, sharding=kind)).memory.stages)
        for kind in (Sharding.ZERO1, Sharding.ZERO3)
    )
    assert whole * row.ep * row.etp == 2 * experts
    assert split * row.ep * row.etp * row.edp == pytest.approx(2 * experts, abs=DEVICES * LAYERS)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_all_parameters_are_held_once_without_tensor_parallelism(ep: int, pp: int) -> None:
    """Over all stages: the model, its MTP module, and where there are several stages one more embedding for it."""
    row = Plan(
        pp=pp,
        dp=DEVICES // pp,
        ep=ep,
        edp=DEVICES // pp // ep,
        num_microbatches=BATCH * pp // DEVICES,
        sharding=Sharding.NONE,
        layout=layout_of([LAYERS // pp] * pp, pp=pp, vpp=1),
    )
    stages = price_plan(WHERE, row).memory.stages
    held = sum(state_bytes(stage) + (ep - 1) * stage.expert.total_bytes for stage in stages)
    copies = MODEL.vocab_size * MODEL.hidden_size if pp > 1 else 0
    assert held == 18 * (params_total(MODEL) + params_mtp(MODEL) + copies)
    assert params_mtp(MODEL) - mtp_extra_params(MODEL) == layer_params(MODEL, MODEL.mtp_kind).total


def faster(machine: Machine, factor: float) -> Machine:
    """The same devices with links of `factor` times the bandwidth."""
    return replace(
        machine,
        levels=tuple(
            replace(level, bytes_per_s=level.bytes_per_s * factor, pair_bytes_per_s=level.pair_bytes_per_s * factor)
            for level in machine.levels
        ),
        collectives=tuple(replace(fit, bytes_per_s=fit.bytes_per_s * factor) for fit in machine.collectives),
        dispatch=replace(
            machine.dispatch,
            scale_up_bytes_per_s=machine.dispatch.scale_up_bytes_per_s * factor,
            network_bytes_per_s=machine.dispatch.network_bytes_per_s * factor,
        ),
    )


@law
@given(tables, st.sampled_from([1.5, 10.0]), st.sampled_from([0.0, 0.9]))
def test_more_bandwidth_is_never_slower(rows: list[Plan], factor: float, overlap: float) -> None:
    slow = replace(WHERE, software=hiding(overlap))
    quick = replace(slow, machine=faster(h100(), factor))
    before, after = prices(slow, rows), prices(quick, rows)
    assert (after[0] <= before[0] * (1 + 1e-12)).all()
    assert np.array_equal(after[1], before[1])


def even(row: Plan) -> Layout:
    return layout_of([LAYERS // row.pp] * row.pp, pp=row.pp, vpp=1)


def with_top_k(top_k: int) -> CostContext:
    moe = MODEL.moe
    assert moe is not None
    kinds = (MODEL.kinds[0], replace(MODEL.kinds[1], ffn=replace(moe, top_k=top_k)))
    return replace(WHERE, model=replace(MODEL, kinds=kinds))


@law
@given(plans(dispatcher=st.sampled_from(list(Dispatcher))), st.sampled_from([(1, 2), (2, 3), (2, 8)]))
def test_more_experts_per_token_never_send_less(row: Plan, ranks: tuple[int, int]) -> None:
    plain = replace(row, schedule=Schedule.ONE_F_ONE_B, vpp=1, layout=even(row))
    few, many = (price_plan(with_top_k(top_k), plain) for top_k in ranks)
    assert many.traffic.dispatch_bytes >= few.traffic.dispatch_bytes
    assert many.traffic.combine_bytes >= few.traffic.combine_bytes
    assert many.step_time_s >= few.step_time_s
    assert many.peak_memory_bytes >= few.peak_memory_bytes


@law
@given(plans())
def test_more_sharding_never_needs_more_state(row: Plan) -> None:
    order = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
    states = [
        [state_bytes(stage) for stage in price_plan(WHERE, replace(row, sharding=sharding)).memory.stages]
        for sharding in (*order, Sharding.HSDP)
    ]
    for stage in range(row.pp):
        none, zero1, zero2, zero3, hsdp = (state[stage] for state in states)
        assert none >= zero1 >= zero2 >= zero3
        assert none >= hsdp >= zero3


@law
@given(plans(recompute=st.sampled_from(MODULES)))
def test_full_recompute_never_needs_more_memory(row: Plan) -> None:
    """And takes at least as long."""
    full = price_plan(WHERE, replace(row, recompute=Recompute.FULL))
    other = price_plan(WHERE, row)
    for less, more in zip(full.memory.stages, other.memory.stages, strict=True):
        assert less.total_bytes <= more.total_bytes
    assert full.step_time_s >= other.step_time_s * (1 - 1e-12)


@law
@given(plans(), st.sampled_from([1, LAYERS - 1]))
def test_a_uniform_load_is_balanced_in_every_figure(row: Plan, rows: int) -> None:
    uniform = context(MODEL, DEVICES, global_batch=BATCH, shares=[[0.125] * 8] * rows)
    assert price_plan(uniform, row) == price_plan(WHERE, row)


@law
@given(plans(), st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8))
def test_a_skewed_load_never_helps(row: Plan, shares: list[float]) -> None:
    skewed = context(MODEL, DEVICES, global_batch=BATCH, shares=[(np.array(shares) / sum(shares)).tolist()])
    worse, fair = price_plan(skewed, row), price_plan(WHERE, row)
    assert worse.step_time_s >= fair.step_time_s * (1 - 1e-12)
    assert worse.peak_memory_bytes >= fair.peak_memory_bytes - 16
    if row.ep == 1:
        assert worse == fair


@law
@given(plans(ep=st.just(1), etp=st.just(1)))
def test_one_expert_parallel_rank_sends_nothing_whatever_the_dispatcher(row: Plan) -> None:
    answers = [price_plan(WHERE, replace(row, dispatcher=dispatcher)) for dispatcher in Dispatcher]
    for answer in answers:
        assert answer.traffic.dispatch_bytes == answer.traffic.combine_bytes == 0
        assert answer.time == answers[0].time
        assert answer.memory == answers[0].memory


@law
@given(plans())
def test_degrees_of_one_change_nothing(row: Plan) -> None:
    """One tensor-parallel rank sends nothing and has no use for sequence parallelism; likewise cp, pp and dp."""
    answer = price_plan(WHERE, row)
    assert (answer.traffic.tp_bytes == 0) == (row.tp == 1)
    assert (answer.traffic.cp_bytes == 0) == (row.cp == 1)
    assert (answer.traffic.pp_bytes == 0) == (row.pp == 1)
    assert (answer.time.tp_comm_s == 0) == (row.tp == 1)
    assert (answer.time.cp_comm_s == 0) == (row.cp == 1)
    if row.tp == 1:
        flagged = price_plan(WHERE, replace(row, sequence_parallel=True))
        assert (flagged.time, flagged.memory, flagged.traffic) == (answer.time, answer.memory, answer.traffic)
    if row.pp == 1:
        assert answer.time.bubble_s == answer.time.pp_comm_s == 0
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1):
            assert price_plan(WHERE, replace(row, schedule=schedule)).step_time_s == answer.step_time_s


@law
@given(st.sampled_from(list(Sharding)), st.sampled_from([2, 4]))
def test_sharding_over_one_rank_changes_nothing(sharding: Sharding, pp: int) -> None:
    where = context(MODEL, pp, global_batch=BATCH)
    row = Plan(pp=pp, num_microbatches=BATCH, layout=layout_of([LAYERS // pp] * pp, pp=pp, vpp=1))
    plain, sharded = (price_plan(where, replace(row, sharding=kind)) for kind in (Sharding.NONE, sharding))
    assert (sharded.time, sharded.memory, sharded.traffic) == (plain.time, plain.memory, plain.traffic)
    assert sharded.traffic.dp_bytes == 0
