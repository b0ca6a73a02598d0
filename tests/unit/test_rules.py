"""Every rule: a plan that breaks it, the value and the bound that it reports, and legal values that are truly legal."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.plan.table import PlanTable
from ap_search.search.rules import MEMORY_LIMIT_ID, MEMORY_LIMIT_SENTENCE, RULES, Rule, RuleContext, check, violations
from ap_search.search.rules.columns import vary
from ap_search.search.rules.state import DEEPEP_GROUP_SIZES
from ap_search.spec.blocks import LinearMixer
from ap_search.spec.job import PlacementPolicy, Precision
from tests.search_cases import Target, context, deepseek_v3, dense_model, gqa, machine, moe_model, plan

RULE = {rule.id: rule for rule in RULES}
MOE, DENSE, V3 = moe_model(), dense_model(), deepseek_v3()
ODD_HEADS = dense_model(heads=40, kv_heads=8, hidden=5120, width=13824)
WINDOWED = replace(DENSE, kinds=(replace(DENSE.kinds[0], mixer=replace(gqa(32, 8), window=4096)),))
BIASED = replace(MOE, kinds=(replace(MOE.kinds[0], ffn=replace(MOE.moe, expert_bias=True)),))
TITAN, HYPER = {"target": Target.TORCHTITAN}, {"target": Target.HYPERPARALLEL}
MEGATRON, DEEPSPEED = {"target": Target.MEGATRON}, {"target": Target.DEEPSPEED}

# rule, context, axes of the plan, demand, bound: the arithmetic is in the trailing comment.
BROKEN = [
    ("routing", context(moe_model(top_k=9), 8), {}, 1, 0),  # 9 of 8 experts: one fault
    ("heads_tp", context(ODD_HEADS, 16), {"tp": 16}, 16, 40),  # 40 % 16 = 8
    ("kv_heads_tp", context(dense_model(heads=24, kv_heads=8), 3), {"tp": 3}, 3, 8),  # 8 % 3 = 2 and 3 % 8 = 3
    ("hidden_tp", context(dense_model(hidden=4100), 8), {"tp": 8}, 8, 4100),  # 4100 % 8 = 4
    ("ffn_tp", context(dense_model(width=1001), 8), {"tp": 8}, 8, 1001),  # 1001 % 8 = 1
    ("shared_expert_tp", context(moe_model(shared_width=1001), 8), {"tp": 8}, 8, 1001),
    ("ep_needs_experts", context(DENSE, 8), {"ep": 2}, 2, 1),
    ("experts_ep", context(MOE, 6), {"ep": 3}, 3, 8),  # 8 % 3 = 2
    (
        "redundant_experts_ep",
        context(MOE, 8, placement=PlacementPolicy.EPLB, redundant_experts=6),
        {"ep": 4},
        4,
        14,
    ),  # (8 + 6) % 4 = 2
    ("expert_ffn_etp", context(moe_model(expert_width=1001), 8), {"tp": 2, "etp": 2}, 2, 1001),
    ("sequence_cp", context(MOE, 8, seq_len=4098), {"cp": 2}, 4, 4098),  # 4098 % 4 = 2
    ("sequence_tp", context(MOE, 8, seq_len=4100), {"tp": 8}, 8, 4100),  # 4100 % 8 = 4
    ("sequence_parallel_needs_tp", context(MOE, 8), {"tp": 1, "sp": 1}, 2, 1),
    ("moe_needs_sequence_parallel", context(MOE, 8), {"tp": 2, "sp": 0}, 2, 1),
    ("world_dense", context(MOE, 24), {"tp": 4, "pp": 4}, 16, 24),  # 24 % 16 = 8
    ("world_expert", context(MOE, 4), {"pp": 2, "ep": 4}, 8, 4),
    ("cp_attention", context(WINDOWED, 8), {"cp": 2}, 2, 1),
    ("expert_bias_etp", context(BIASED, 8), {"tp": 2, "etp": 2}, 2, 1),
    # 2880 / 8 = 360 = 22 * 16 + 8
    ("fp8_widths", context(moe_model(expert_width=2880), 8, precision=Precision.FP8), {"tp": 8, "etp": 8}, 128, 2880),
    ("torchtitan_etp", context(MOE, 8, **TITAN), {"tp": 2, "etp": 2}, 2, 1),
    ("torchtitan_kv_heads", context(dense_model(heads=16, kv_heads=2), 8, **TITAN), {"tp": 4}, 4, 2),
    ("torchtitan_ep", context(MOE, 4, **TITAN), {"ep": 8}, 8, 4),  # 8 does not divide dp*cp*tp = 4
    ("hyperparallel_etp", context(MOE, 8, **HYPER), {"tp": 2, "etp": 2}, 2, 1),
    ("hyperparallel_ep", context(MOE, 4, **HYPER), {"ep": 8}, 8, 4),
    ("hyperparallel_ep_pipeline", context(MOE, 8, **HYPER), {"pp": 2, "ep": 4}, 2, 1),
    ("deepspeed_cp", context(MOE, 8, **DEEPSPEED), {"cp": 2}, 2, 1),
    ("deepspeed_ep", context(MOE, 4, **DEEPSPEED), {"ep": 8}, 8, 4),
    ("batch", context(MOE, 8, global_batch=12), {}, 8, 12),  # 12 % (1*8) = 4
    ("token_dispatch", context(MOE, 8, seq_len=4100), {"tp": 8}, 8, 4100),  # 4100*1 % 8 = 4
    ("vpp_needs_pipeline", context(MOE, 8), {"vpp": 2}, 2, 1),
    ("vpp_schedule", context(MOE, 8), {"pp": 2, "schedule": Schedule.INTERLEAVED}, 1, 2),
    ("layer_per_stage", context(MOE, 8), {"pp": 8, "vpp": 5}, 40, 32),
    ("stage_layers", context(moe_model(layers=30), 8, explicit_layout=False), {"pp": 4}, 2, 0),  # 30 % 4 = 2
    ("vpp_microbatches", context(MOE, 8, global_batch=6), {"pp": 4, "vpp": 2}, 4, 3),  # 6 / (1*2) = 3 < 4
    ("dualpipe", context(MOE, 8, global_batch=14), {"pp": 4, "schedule": Schedule.DUALPIPE}, 8, 7),
    ("zb_h1", context(MOE, 8), {"schedule": Schedule.ZB_H1}, 2, 1),
    ("megatron_schedule", context(MOE, 8, **MEGATRON), {"pp": 2, "schedule": Schedule.GPIPE}, 2, 1),
    ("torchtitan_schedule", context(MOE, 8, **TITAN), {"pp": 2, "schedule": Schedule.ZB_H1}, 3, 2),
    # 14 micro-batches over pp=4 make 3 rounds, and 14 % 3 = 2
    ("torchtitan_rounds", context(MOE, 8, global_batch=28, **TITAN), {"pp": 4, "vpp": 2}, 3, 14),
    ("hyperparallel_schedule", context(MOE, 8, **HYPER), {"pp": 2, "schedule": Schedule.ZB_H1}, 3, 2),
    ("deepspeed_schedule", context(MOE, 8, **DEEPSPEED), {"pp": 2, "vpp": 2}, 1, 0),
    ("sharding_group", context(MOE, 8), {"sharding": Sharding.HSDP}, 1, 8),  # dp*cp = 8 in one domain of 8
    ("one_sharding_of_one", replace(context(MOE, 1), sharding_of_one=Sharding.ZERO1), {"sharding": 3}, 1, 2),
    ("torchtitan_sharding", context(MOE, 8, **TITAN), {"sharding": Sharding.ZERO1}, 1, 4),
    ("deepspeed_sharding_pipeline", context(MOE, 8, **DEEPSPEED), {"pp": 2, "sharding": Sharding.ZERO2}, 2, 1),
    ("deepspeed_sharding_tensor", context(MOE, 8, **DEEPSPEED), {"tp": 2, "sharding": Sharding.ZERO3}, 2, 1),
    ("dispatcher_needs_group", context(MOE, 8), {"dispatcher": Dispatcher.DEEPEP}, 2, 1),
    ("deepep_group_size", context(V3, 256), {"ep": 256, "dispatcher": Dispatcher.DEEPEP}, 256, 160),
    (
        "dispatcher_kernels",
        replace(context(MOE, 8), machine=replace(machine(), fused_dispatchers=("hybridep",))),
        {"ep": 8, "dispatcher": Dispatcher.DEEPEP},
        1,
        0,
    ),
    (
        "deepep_padding",
        context(MOE, 8, capacity_factor=1.25, pad_to_capacity=True),
        {"ep": 8, "dispatcher": Dispatcher.DEEPEP},
        1,
        0,
    ),
    ("deepep_node", context(V3, 64, devices_per_domain=4), {"ep": 16, "dispatcher": Dispatcher.DEEPEP}, 4, 8),
    (
        "one_dispatcher_of_one",
        replace(context(MOE, 8), dispatcher_of_one=Dispatcher.ALLTOALL),
        {"dispatcher": Dispatcher.ALLGATHER},
        1,
        2,
    ),
    ("torchtitan_dispatcher", context(MOE, 8, **TITAN), {"ep": 8, "dispatcher": Dispatcher.ALLGATHER}, 0, 3),
    ("hyperparallel_dispatcher", context(MOE, 8, **HYPER), {"ep": 8, "dispatcher": Dispatcher.DEEPEP}, 2, 1),
    ("deepspeed_dispatcher", context(MOE, 8, **DEEPSPEED), {"ep": 8, "dispatcher": Dispatcher.HYBRIDEP}, 3, 2),
    ("recompute_module", context(DENSE, 8), {"recompute": Recompute.MOE_ACT | Recompute.MLA_UP_PROJ}, 1, 0),
    ("zb_h1_recompute", context(MOE, 8), {"pp": 2, "schedule": Schedule.ZB_H1, "recompute": Recompute.FULL}, 1, 0),
    ("torchtitan_recompute", context(MOE, 8, **TITAN), {"recompute": Recompute.MOE_ACT}, 2, 128),
]
CASES = pytest.mark.parametrize(
    ("rule_id", "where", "axes", "demand", "bound"), BROKEN, ids=[case[0] for case in BROKEN]
)


def broken_ids(where: RuleContext, one: Plan) -> list[str]:
    return [violation.rule_id for violation in violations(where, one)]


def test_every_rule_has_a_case_that_breaks_it() -> None:
    assert sorted(case[0] for case in BROKEN) == sorted(RULE)


@CASES
def test_broken_rule_is_reported_with_value_and_bound(
    rule_id: str, where: RuleContext, axes: dict[str, int], demand: float, bound: float
) -> None:
    found = {violation.rule_id: violation for violation in violations(where, plan(where, **axes))}
    assert rule_id in found
    assert (found[rule_id].demand, found[rule_id].bound) == (demand, bound)
    assert found[rule_id].unit
    assert "\n" not in found[rule_id].message


@CASES
def test_nearest_values_are_legal_for_the_rule(
    rule_id: str, where: RuleContext, axes: dict[str, int], demand: float, bound: float
) -> None:
    """A lever `ep=2 or ep=4` means: with that one change the rule's margin is not negative."""
    one = plan(where, **axes)
    violation = next(each for each in violations(where, one) if each.rule_id == rule_id)
    assert violation.levers or rule_id == "routing", "only the router's own sizes cannot be mended by a plan"
    for lever in violation.levers:
        for axis, text in re.findall(r"([a-z_]+)=([0-9]+)\b", lever.change):
            if axis in ("devices", "global_batch", "seq_len", "redundant_experts", "stage_layers", "sp"):
                continue
            table = vary(where, one, axis=axis, values=np.array([int(text)]))
            assert RULE[rule_id].margin(where, table)[0] >= 0, lever.change


@CASES
def test_margin_depends_on_nothing_but_what_the_rule_reads(
    rule_id: str, where: RuleContext, axes: dict[str, int], demand: float, bound: float
) -> None:
    """Change every column that the rule does not read, nor derive from what it reads: the margin stays."""
    rule = RULE[rule_id]
    derived = {"num_microbatches": {"dp", "mbs"}, "sequence_parallel": {"tp"}, "layout": {"pp", "vpp"}}
    table = PlanTable.from_plans([plan(where, **axes)])
    free = [name for name in PlanTable.columns() if not (derived.get(name, {name}) & set(rule.reads))]
    limits = {"sharding": 5, "dispatcher": 4, "schedule": 5, "recompute": 256, "layout": 1, "sequence_parallel": 2}
    changed = {
        name: (getattr(table, name) + 1) % limits[name] if name in limits else getattr(table, name) * 3 for name in free
    }
    assert rule.margin(where, replace(table, **changed)).tolist() == rule.margin(where, table).tolist()


def test_rules_are_ordered_by_the_stage_that_knows_what_they_read() -> None:
    """Only then is the first broken rule of a staged search the first of the list."""
    stages = [rule.stage for rule in RULES]
    assert stages == sorted(stages)


def test_ids_are_distinct_snake_case_and_every_rule_names_its_source() -> None:
    assert len(RULE) == len(RULES)
    for rule in RULES:
        assert re.fullmatch("[a-z][a-z0-9_]*", rule.id)
        assert rule.sentence and rule.source


def test_every_rule_stands_in_the_page_on_constraints() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "constraints.md").read_text()
    assert f"| `{MEMORY_LIMIT_ID}` | {MEMORY_LIMIT_SENTENCE} |" in page
    for rule in RULES:
        assert f"| `{rule.id}` | {rule.sentence} | {rule.source} |" in page
    assert set(re.findall(r"^\| `([a-z0-9_]+)` \|", page, flags=re.MULTILINE)) == {*RULE, MEMORY_LIMIT_ID}


def test_a_common_plan_breaks_nothing() -> None:
    where = context(V3, 2048)
    one = plan(where, tp=2, pp=16, ep=32, sharding=Sharding.ZERO1, dispatcher=Dispatcher.DEEPEP)
    assert violations(where, one) == ()


def test_all_broken_rules_are_reported_first_blocker_first() -> None:
    """64 % 3 = 1 and 256 % 3 = 1: two rules of one plan (three devices hold both meshes: 3 = 3*1*1 = 1*3*1)."""
    where = context(moe_model(heads=64, num_experts=256, hidden=3072, expert_width=1536), 3, seq_len=4096)
    found = broken_ids(where, plan(where, tp=3, ep=3))
    assert found[0] == "heads_tp"
    assert "experts_ep" in found


def test_rejections_count_under_the_first_broken_rule() -> None:
    where = context(moe_model(heads=64, num_experts=256), 3)
    matrix = check(where, PlanTable.from_plans([plan(where, tp=3, ep=3), plan(where, ep=3), plan(where)]), RULES)
    names = [rule.id for rule in matrix.rules]
    assert matrix.first_blocker.tolist() == [names.index("heads_tp"), names.index("experts_ep"), names.index("batch")]
    assert matrix.legal.tolist() == [False, False, False]


def test_rules_of_other_targets_do_not_apply() -> None:
    where = context(MOE, 8)
    assert {rule.target for rule in check(where, PlanTable.from_plans([plan(where)])).rules} == {None}


def test_key_value_heads_may_be_held_by_several_ranks() -> None:
    """16 % 8 = 0: each of 8 key/value heads is on two of 16 ranks; torchtitan refuses that."""
    model = dense_model(heads=128, kv_heads=8, hidden=8192)
    where = context(model, 16)
    assert broken_ids(where, plan(where, tp=16)) == []
    titan = context(model, 16, **TITAN)
    assert broken_ids(titan, plan(titan, tp=16, sharding=Sharding.ZERO3)) == ["torchtitan_kv_heads"]


def test_dense_training_needs_no_sequence_parallelism() -> None:
    where = context(DENSE, 8)
    assert broken_ids(where, plan(where, tp=2, sp=0)) == []


def test_every_attention_kind_is_asked() -> None:
    """A second kind with 6 heads refuses tp=4 although the first has 32."""
    kind = DENSE.kinds[0]
    model = replace(DENSE, kinds=(kind, replace(kind, mixer=gqa(6, 2))), layers=(0, 1) * 16)
    where = context(model, 8)
    (violation,) = (each for each in violations(where, plan(where, tp=4)) if each.rule_id == "heads_tp")
    assert violation.bound == 6


def test_mixers_without_softmax_split_their_own_heads() -> None:
    mixer = LinearMixer(name="mamba2", in_width=8, out_width=8, small_params=0, scan_flops_per_token=0, heads=6)
    model = replace(DENSE, kinds=(replace(DENSE.kinds[0], mixer=mixer),))
    where = context(model, 8)
    assert broken_ids(where, plan(where, tp=4)) == ["heads_tp"]
    assert broken_ids(where, plan(where, tp=2)) == []


@pytest.mark.parametrize(
    ("routing", "fine"),
    [
        ({"num_groups": 8, "topk_groups": 4}, True),  # 8 of 4 groups x 32 experts
        ({"num_groups": 7, "topk_groups": 1}, False),  # 256 % 7 = 4
        ({"num_groups": 8, "topk_groups": 9}, False),  # 9 of 8 groups
        ({"num_groups": 128, "topk_groups": 2}, False),  # 8 of 2 groups x 2 experts
    ],
)
def test_group_limited_routing(routing: dict[str, int], fine: bool) -> None:
    where = context(moe_model(num_experts=256, top_k=8, **routing), 8)
    assert (broken_ids(where, plan(where)) == []) is fine


def test_a_negative_capacity_factor_is_no_routing() -> None:
    where = context(MOE, 8, capacity_factor=-1.0)
    assert broken_ids(where, plan(where)) == ["routing"]


def test_given_dp_must_fill_the_devices() -> None:
    """dp=3 times tp=2 is 6, not 16 devices; 8 would fill them."""
    where = context(MOE, 16, global_batch=48)
    (violation,) = violations(where, plan(where, tp=2, dp=3))
    assert (violation.rule_id, violation.demand, violation.bound) == ("world_dense", 6, 16)
    assert "dp=8" in [lever.change for lever in violation.levers]


def test_uneven_layout_is_legal_where_it_is_asked_for_and_its_lever_says_how() -> None:
    """30 layers over 4 stages: 8+8+7+7."""
    model = moe_model(layers=30)
    asked = context(model, 8)
    assert broken_ids(asked, plan(asked, pp=4)) == []
    guessed = context(model, 8, explicit_layout=False)
    (violation,) = violations(guessed, plan(guessed, pp=4))
    changes = [lever.change for lever in violation.levers]
    assert changes == ["pp=2", "stage_layers=8x2+7x2"], "pp=3 and pp=5 divide 30 layers, but not 8 devices"


def test_layout_that_loses_layers_is_refused() -> None:
    where = context(MOE, 8)
    one = plan(where, pp=4)
    short = replace(one, layout=replace(one.layout, chunk_layers=(8, 8, 8, 7)))
    assert broken_ids(where, short) == ["stage_layers"]


def test_virtual_stages_may_stay_empty_in_a_given_layout_only() -> None:
    """22 layers on 8*3 = 24 virtual stages: the first holds the embedding alone, the last the head alone."""
    where = context(dense_model(layers=22), 8)
    one = plan(where, pp=8, vpp=3)
    assert broken_ids(where, one) == ["layer_per_stage"]
    given = replace(one, layout=replace(one.layout, chunk_layers=(0, *(1,) * 22, 0)))
    assert broken_ids(replace(where, given_layout=True), given) == []


def test_hsdp_replicates_over_scale_up_domains() -> None:
    """16 devices in domains of 8: two replicas of 8; with ep=8 edp=2 is divided, with ep=16 edp=1 is not."""
    model = moe_model(num_experts=16)
    where = context(model, 16)
    assert broken_ids(where, plan(where, sharding=Sharding.HSDP)) == []
    assert broken_ids(where, plan(where, ep=8, sharding=Sharding.HSDP)) == []
    assert broken_ids(where, plan(where, ep=16, sharding=Sharding.HSDP)) == ["sharding_group"]


@pytest.mark.parametrize("group", [*DEEPEP_GROUP_SIZES, 256])
def test_deepep_group_sizes(group: int) -> None:
    where = context(moe_model(num_experts=group * 2, top_k=2), group)
    found = broken_ids(where, plan(where, ep=group, dispatcher=Dispatcher.DEEPEP))
    assert ("deepep_group_size" in found) is (group == 256)


@pytest.mark.parametrize(
    ("chosen", "fine"),
    [
        (Recompute.NONE, True),
        (Recompute.FULL, True),
        (Recompute.FULL | Recompute.MLP, False),
        (Recompute.MOE | Recompute.MLP, True),
        (Recompute.MOE | Recompute.MOE_ACT, False),
        (Recompute.MOE | Recompute.SHARED_EXPERTS, False),
        (Recompute.MOE_ACT | Recompute.LAYERNORM | Recompute.MLA_UP_PROJ | Recompute.SHARED_EXPERTS, True),
    ],
)
def test_recompute_sets_of_a_model_with_every_module(chosen: Recompute, fine: bool) -> None:
    where = context(V3, 8)
    assert (broken_ids(where, plan(where, recompute=chosen)) == []) is fine


def test_recompute_names_the_module_that_is_missing() -> None:
    where = context(MOE, 8)
    (violation,) = violations(where, plan(where, recompute=Recompute.MLP | Recompute.MOE_ACT))
    assert "moe has no mlp" in violation.message
    assert [lever.change for lever in violation.levers] == ["recompute=selective:moe_act"]


@pytest.mark.parametrize(
    ("mixer", "named"),
    [
        (replace(gqa(32, 8), window=128), "windows"),
        (replace(gqa(32, 8), index_topk=2048, index_heads=4, index_head_dim=64), "picked keys"),
        (replace(gqa(32, 8), sink=True), "sinks"),
        (
            LinearMixer(name="mamba2", in_width=8, out_width=8, small_params=0, scan_flops_per_token=0, heads=32),
            "scans",
        ),
    ],
)
def test_context_parallelism_needs_full_attention_in_every_layer(mixer: object, named: str) -> None:
    """One such kind among others is enough; without cp it is fine."""
    kind = replace(DENSE.kinds[0], mixer=mixer)
    where = context(replace(DENSE, kinds=(DENSE.kinds[0], kind), layers=(0,) * 31 + (1,)), 8)
    (violation,) = violations(where, plan(where, cp=2))
    assert (violation.rule_id, [lever.change for lever in violation.levers]) == ("cp_attention", ["cp=1"])
    assert named in violation.message
    assert broken_ids(where, plan(where)) == []


def test_low_precision_wants_whole_blocks_of_inner_widths() -> None:
    """1456 = 91*16 is fine in fp8 and not in mxfp8 (45.5*32); a hidden size has no axis."""
    where = context(moe_model(expert_width=1456), 8, precision=Precision.FP8)
    assert broken_ids(where, plan(where)) == []
    coarse = context(moe_model(expert_width=1456), 8, precision=Precision.MXFP8)
    (violation,) = violations(coarse, plan(coarse))
    assert (violation.rule_id, violation.demand, violation.bound) == ("fp8_widths", 32, 1456)
    assert "precision=bf16" in [lever.change for lever in violation.levers]
    narrow = context(moe_model(hidden=4104), 8, precision=Precision.FP8)
    assert broken_ids(narrow, plan(narrow)) == ["fp8_widths"], "4104 = 256*16 + 8"
    assert broken_ids(context(moe_model(hidden=4104), 8), plan(narrow)) == []


@pytest.mark.parametrize(
    ("ep", "domain", "fine"),
    [(8, 8, True), (16, 8, True), (4, 8, True), (8, 4, False), (16, 64, True), (64, 32, False), (8, 64, True)],
)
def test_deepep_counts_eight_devices_to_a_node(ep: int, domain: int, fine: bool) -> None:
    """Inside one domain any group; 8 over two domains of 4, or 64 over two of 32, are no nodes of 8."""
    where = context(V3, 64, devices_per_domain=domain)
    one = plan(where, ep=ep, dispatcher=Dispatcher.DEEPEP)
    assert broken_ids(where, one) == ([] if fine else ["deepep_node"])
    assert broken_ids(where, replace(one, dispatcher=Dispatcher.HYBRIDEP)) == []


def test_every_posted_rule_is_a_rule_on_mesh_axes() -> None:
    """Rules with a post of their own are those the solver enumerates; the others are tabulated from their margins."""
    posted: list[Rule] = [rule for rule in RULES if rule.post is not None]
    assert {rule.stage for rule in posted} == {0}
    assert len(posted) >= 12
