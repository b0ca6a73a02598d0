"""Meshes from the integer solver, the counted space of a search, and the smallest clash, on worlds counted by hand."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from ap_search.errors import SpecError
from ap_search.plan.plan import Dispatcher, Layout, Recompute, Schedule, Sharding
from ap_search.plan.table import PlanTable
from ap_search.plan.text import parse_knob_values
from ap_search.search.clash import Clash, smallest_clash
from ap_search.search.domains import SearchDomains, default_domains, search_domains
from ap_search.search.rules import RuleContext, check
from ap_search.search.solver import MeshTable, enumerate_meshes
from ap_search.search.space import Space, build_table, search_context
from tests.search_cases import Target, context, deepseek_v3, dense_model, moe_model


def domains(where: RuleContext, **chosen: str) -> SearchDomains:
    return search_domains(where, [(axis, parse_knob_values(axis, text)) for axis, text in chosen.items()])


def rows(meshes: MeshTable) -> list[tuple[int, ...]]:
    columns = (meshes.tp, meshes.cp, meshes.pp, meshes.dp, meshes.ep, meshes.etp, meshes.edp)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_world_of_one_device_has_one_mesh() -> None:
    where = context(moe_model(), 1)
    assert rows(enumerate_meshes(where, domains(where))) == [(1, 1, 1, 1, 1, 1, 1)]


def test_three_nodes_of_four() -> None:
    """Dense: pp in 1 2 3 4 6 12, tp in 1 2 4 (3 does not divide 32 heads), cp in 1 2, tp*cp*pp divides 12.

    pp=1: tp,cp = 1,1 1,2 2,1 2,2 4,1 (4,2 is 8); pp=2: 1,1 1,2 2,1 (2,2 is 8); pp=3: as for 12/3 = 4: 1,1 1,2 2,1 2,2
    4,1; pp=4: 1,1 (12/4 = 3 leaves no 2); pp=6: 1,1 1,2 2,1; pp=12: 1,1. In all 5+3+5+1+3+1 = 18.
    """
    where = context(dense_model(), 12, devices_per_domain=4)
    found = rows(enumerate_meshes(where, domains(where)))
    assert len(found) == 18
    assert all(tp * cp * pp * dp == 12 and (ep, etp, edp) == (1, 1, 12 // pp) for tp, cp, pp, dp, ep, etp, edp in found)


@pytest.mark.parametrize("devices", [24, 96])
def test_odd_worlds_have_both_factorisations(devices: int) -> None:
    where = context(moe_model(), devices)
    found = rows(enumerate_meshes(where, domains(where)))
    assert {mesh[2] % 3 for mesh in found} == {0, 1, 2}, "the factor 3 may lie on pp or on dp"
    for tp, cp, pp, dp, ep, etp, edp in found:
        assert tp * cp * pp * dp == etp * ep * pp * edp == devices
    assert 1 in {mesh[0] for mesh in found}


def test_meshes_are_sorted_distinct_and_the_same_every_time() -> None:
    where = context(moe_model(), 96)
    found = rows(enumerate_meshes(where, domains(where)))
    assert found == sorted(set(found))
    assert found == rows(enumerate_meshes(where, domains(where)))


def test_set_restricts_the_meshes() -> None:
    where = context(moe_model(), 64)
    found = rows(enumerate_meshes(where, domains(where, tp="2", ep="4,8", dp="8")))
    assert {(mesh[0], mesh[3]) for mesh in found} == {(2, 8)}
    assert {mesh[4] for mesh in found} == {4, 8}


def test_candidates_outside_the_world_are_no_mesh() -> None:
    where = context(moe_model(), 64)
    assert len(enumerate_meshes(where, domains(where, ep="3,5,16"))) == 0


@pytest.mark.parametrize("target", [Target.TORCHTITAN, Target.HYPERPARALLEL, Target.DEEPSPEED])
def test_a_target_that_joins_the_meshes_gives_the_rows_that_its_rules_leave(target: Target) -> None:
    """Every mesh of the target is one of any target, and those left out break a rule of the target."""
    where = context(deepseek_v3(), 256)
    every, some = rows(enumerate_meshes(where, domains(where))), context(deepseek_v3(), 256, target=target)
    found = set(rows(enumerate_meshes(some, domains(some))))
    assert found < set(every)
    for tp, cp, pp, dp, ep, etp, _ in every:
        legal = {
            Target.TORCHTITAN: etp == 1,
            Target.HYPERPARALLEL: etp == 1 and (ep == 1 or pp == 1),
            Target.DEEPSPEED: cp == 1 and (tp * dp) % (ep * etp) == 0,
        }[target]
        assert ((tp, cp, pp, dp, ep, etp, _) in found) is legal


def space(where: RuleContext, **chosen: str) -> Space:
    return build_table(where, domains(where, **chosen))


def test_candidates_are_priced_or_counted_under_a_rule() -> None:
    """8 devices, ep=2,3 pp=1,2 tp=1 cp=1 etp=1 mbs=1 vpp=1,2, one value of each other knob: 2*2*2 = 8 candidates.

    ep=3 takes 4 of them (8 experts % 3); of the rest pp=1 vpp=2 falls out; pp=1 vpp=1, pp=2 vpp=1, pp=2 vpp=2 stay.
    """
    one = {"tp": "1", "cp": "1", "etp": "1", "mbs": "1", "sharding": "zero1", "recompute": "none"}
    found = space(context(moe_model(), 8), ep="2,3", pp="1,2", vpp="1,2", dispatcher="alltoall", **one)
    assert found.candidates == 8
    assert [(each.rule.id, each.count) for each in found.dropped] == [("experts_ep", 4), ("vpp_needs_pipeline", 1)]
    assert list(zip(found.table.pp.tolist(), found.table.vpp.tolist(), strict=True)) == [(1, 1), (2, 1), (2, 2)]
    assert found.table.ep.tolist() == [2, 2, 2]
    assert found.table.schedule.tolist() == [Schedule.ONE_F_ONE_B, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED]
    assert found.table.num_microbatches.tolist() == [128, 256, 256], "1024 / 8, 1024 / 4, 1024 / 4"


def test_rejections_name_count_example_and_levers() -> None:
    found = space(context(moe_model(), 8), ep="3", tp="1")
    (rejection,) = found.rejections
    assert rejection.rule_id == "experts_ep"
    assert rejection.count == found.candidates
    assert "ep3" in rejection.example
    assert rejection.levers[0].change == "ep=2 or ep=4"
    assert "8 experts do not divide over ep=3" in rejection.message


@pytest.mark.parametrize("devices", [1, 12, 24])
def test_the_whole_default_space_is_accounted_for_and_legal(devices: int) -> None:
    where = context(moe_model(num_experts=4, layers=6), devices)
    chosen = domains(where)
    found = build_table(where, chosen)
    assert len(found.table) + sum(each.count for each in found.dropped) == found.candidates
    assert check(search_context(where, chosen), found.table).legal.all()
    assert {found.table.tp.dtype, found.table.layout.dtype} == {np.dtype(np.int64)}
    assert len(set(plan_rows(found.table))) == len(found.table)


def plan_rows(table: PlanTable) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(table, name).tolist() for name in PlanTable.columns()), strict=True))


def test_one_device_lists_each_plan_once() -> None:
    """Nothing is sharded or dispatched: zero1 and alltoall stand for all, so mbs, vpp=1 and recompute remain."""
    found = space(context(moe_model(), 1))
    assert set(found.table.sharding.tolist()) == {Sharding.ZERO1}
    assert set(found.table.dispatcher.tolist()) == {Dispatcher.ALLTOALL}
    assert len(found.table) == 4 * 5, "mbs 1 2 4 8 times recompute none, moe_act, moe_act+layernorm, moe, full"


@pytest.mark.parametrize(
    ("chosen", "target", "left"),
    [
        ({"sharding": "zero3"}, Target.ANY, Sharding.ZERO3),
        ({"sharding": "zero3,none"}, Target.ANY, Sharding.NONE),
        ({}, Target.TORCHTITAN, Sharding.ZERO2),
    ],
)
def test_the_plan_that_stands_for_others_is_a_legal_candidate(
    chosen: dict[str, str], target: Target, left: Sharding
) -> None:
    """On one device torchtitan cannot run zero1, so zero2 stands for all that it can."""
    found = space(context(moe_model(), 1, target=target), **chosen)
    assert set(found.table.sharding.tolist()) == {left}


def test_layouts_come_from_the_caller_and_are_shared() -> None:
    asked: list[tuple[int, int]] = []

    def layout_for(pp: int, vpp: int) -> Layout | None:
        asked.append((pp, vpp))
        return (
            None
            if pp * vpp > 6
            else Layout(pp=pp, vpp=vpp, chunk_layers=(6 - pp * vpp + 1,) + (1,) * (pp * vpp - 1), even=False)
        )

    where = context(moe_model(layers=6), 8)
    found = build_table(where, domains(where, pp="1,2,8", vpp="1,2"), layout_for=layout_for)
    assert {(one.pp, one.vpp) for one in found.table.layouts} == {(1, 1), (2, 1), (2, 2)}
    assert found.table.layouts[int(found.table.layout[found.table.pp * found.table.vpp == 4][0])].chunk_layers == (
        3,
        1,
        1,
        1,
    )
    assert "layer_per_stage" in {each.rule.id for each in found.dropped}
    assert (2, 2) in asked


def test_too_many_combinations_are_refused() -> None:
    where = context(moe_model(), 64)
    wide = replace(domains(where), tp=tuple(range(1, 2001)), ep=tuple(range(1, 2001)))
    with pytest.raises(SpecError, match="combinations"):
        build_table(where, wide)


def test_default_candidates_of_deepseek_v3_on_2048_devices() -> None:
    where = context(deepseek_v3(), 2048)
    assert default_domains(where) == SearchDomains(
        tp=(1, 2, 4, 8),
        cp=(1, 2),  # 4096 tokens leave two ranks 2048 each
        pp=(1, 2, 4, 8, 16, 32),  # 64 would be more than 61 layers
        ep=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        etp=(1, 2),  # 2048 / 2 = 1024
        mbs=(1, 2, 4, 8),
        vpp=(1, 2, 3, 4, 5, 6, 8, 10),
        sharding=(Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.HSDP),
        dispatcher=(Dispatcher.ALLTOALL, Dispatcher.ALLGATHER, Dispatcher.DEEPEP),
        recompute=(
            Recompute.NONE,
            Recompute.MOE_ACT,
            Recompute.MOE_ACT | Recompute.LAYERNORM | Recompute.MLA_UP_PROJ,
            Recompute.MOE | Recompute.MLP,
            Recompute.FULL,
        ),
    )


def test_default_candidates_of_other_machines_and_models() -> None:
    wide = default_domains(context(moe_model(), 128, devices_per_domain=64, seq_len=131072))
    assert wide.tp == (1, 2, 4, 8, 16)
    assert wide.cp == (1, 2, 4, 8, 16)
    assert wide.dispatcher == (Dispatcher.ALLTOALL, Dispatcher.ALLGATHER, Dispatcher.HYBRIDEP)
    dense = default_domains(context(dense_model(layers=3), 8))
    assert (dense.ep, dense.etp, dense.vpp) == ((1,), (1,), (1,))
    assert dense.dispatcher == (Dispatcher.ALLTOALL,)
    assert dense.recompute == (Recompute.NONE, Recompute.MLP, Recompute.FULL)


@pytest.mark.parametrize(
    ("chosen", "path"),
    [
        ([("edp", (1,))], "--set edp"),
        ([("ep", (1,)), ("ep", (2,))], "--set ep"),
        ([("ep", ())], "--set ep"),
    ],
)
def test_bad_candidate_lists_are_refused(chosen: list[tuple[str, tuple[int, ...]]], path: str) -> None:
    with pytest.raises(SpecError, match=path):
        search_domains(context(moe_model(), 8), chosen)


def clash(where: RuleContext, **chosen: str) -> Clash:
    return smallest_clash(where, domains(where, **chosen))


def members(found: Clash) -> list[str]:
    return [one.rule_id for one in found.clash]


def test_no_clash_where_a_plan_is_legal() -> None:
    assert clash(context(moe_model(), 8)) == Clash(clash=(), levers=())


def test_clash_of_one_setting_and_one_rule() -> None:
    """8 experts: ep=3 clashes with experts_ep; of 2 and 4, the nearest, both divide 8 devices too."""
    found = clash(context(moe_model(), 8), ep="3")
    assert members(found) == ["set:ep", "experts_ep"]
    assert found.clash[0].sentence == "--set ep=3"
    assert [(one.change, one.effect) for one in found.levers] == [("--set ep=2 or --set ep=4", "some plan is legal")]


def test_clash_of_two_settings_with_the_world() -> None:
    """24 % (4*4) = 8. With tp=4, pp=3 and pp=6 give 12 and 24; the multiples of 16 nearest to 24 are 16 and 32."""
    found = clash(context(moe_model(), 24), tp="4", pp="4")
    assert members(found) == ["set:tp", "set:pp", "world_dense"]
    changes = [one.change for one in found.levers]
    assert changes == ["--set pp=3 or --set pp=6", "devices=16 or devices=32"]


def test_clash_without_any_setting() -> None:
    """37 is prime: dp=37 is the only mesh, and 1024 % 37 = 25; 999 = 27*37 and 1036 = 28*37."""
    found = clash(context(moe_model(), 37))
    assert members(found) == ["world_dense", "batch"]
    assert found.levers[0].change == "global_batch=999 or global_batch=1036"


def test_clash_of_knobs() -> None:
    found = clash(context(moe_model(), 64), vpp="2", pp="1")
    assert members(found) == ["set:pp", "set:vpp", "vpp_needs_pipeline"]
    assert members(clash(context(dense_model(), 64), dispatcher="deepep")) == [
        "set:dispatcher",
        "dispatcher_needs_group",
    ]


def test_smallest_of_several_clashes_is_named_and_that_another_remains() -> None:
    """tp=3 breaks 32 heads, ep=5 breaks 8 experts: either alone is a clash of two, and mending one leaves the other."""
    found = clash(context(moe_model(), 64), tp="3", ep="5")
    assert len(found.clash) == 2
    assert {one.effect for one in found.levers} == {"this clash is gone, another remains"}


def test_every_member_of_a_clash_is_needed() -> None:
    """Leave out one setting after the other: a plan becomes legal."""
    where = context(moe_model(), 24, global_batch=1536)
    assert members(clash(where, tp="4", pp="4")) == ["set:tp", "set:pp", "world_dense"]
    assert members(clash(where, tp="4")) == members(clash(where, pp="4")) == []


def test_asking_for_the_modules_does_not_load_the_solver() -> None:
    """OR-Tools takes most of a second to import: a bad flag need not wait for it."""
    code = "import sys, ap_search.search.clash, ap_search.search.space; sys.exit('ortools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
