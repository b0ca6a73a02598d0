"""The solver's meshes and the counted space against brute force over the whole product of candidates."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.plan.plan import Schedule
from ap_search.plan.table import IntArray, PlanTable
from ap_search.search.domains import SearchDomains, search_domains
from ap_search.search.rules import MESH_AXES, RULES, STAGES, Rule, RuleContext, check
from ap_search.search.rules.columns import complete
from ap_search.search.solver import MeshTable, enumerate_meshes
from ap_search.search.space import build_table, search_context
from ap_search.spec.blocks import Model
from tests.search_cases import Target, context, dense_model, moe_model

SMALL = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])


@st.composite
def models(draw: st.DrawFn) -> Model:
    sizes = {
        "layers": draw(st.integers(1, 8)),
        "heads": draw(st.sampled_from([2, 6, 8, 12, 16])),
        "kv_heads": draw(st.sampled_from([1, 2, 3, 4])),
        "hidden": draw(st.sampled_from([96, 128, 120])),
    }
    if draw(st.booleans()):
        return dense_model(**sizes, width=draw(st.sampled_from([96, 100, 512])))
    return moe_model(
        **sizes,
        num_experts=draw(st.sampled_from([2, 4, 6, 8, 12])),
        top_k=2,
        expert_width=draw(st.sampled_from([48, 64, 2048])),
        shared_width=draw(st.sampled_from([0, 64])),
        first_dense=draw(st.integers(0, 1)),
    )


@st.composite
def contexts(draw: st.DrawFn) -> RuleContext:
    return context(
        draw(models()),
        draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 36, 48, 64]) | st.integers(1, 64)),
        devices_per_domain=draw(st.sampled_from([4, 8])),
        seq_len=draw(st.sampled_from([36, 96, 100, 8192])),
        global_batch=draw(st.sampled_from([6, 16, 48])),
        target=draw(st.sampled_from(list(Target))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[RuleContext, SearchDomains]:
    where = draw(contexts())
    axes = draw(st.lists(st.sampled_from(["tp", "pp", "ep", "etp", "dp"]), unique=True, max_size=3))
    values = st.lists(SMALL, min_size=1, max_size=4, unique=True)
    # The default for these short sequences is cp = 1 alone, which would leave cp untested.
    return where, search_domains(where, [(axis, tuple(draw(values))) for axis in ("cp", *axes)])


def grid(domains: SearchDomains, axes: tuple[str, ...]) -> dict[str, IntArray]:
    """The product of the candidates of some axes, a row each; axes that follow from others are left out."""
    lists = {axis: values for axis in axes if (values := getattr(domains, axis, ()))}
    rows = np.array(list(product(*lists.values())), dtype=np.int64).reshape(-1, len(lists))
    return dict(zip(lists, rows.T, strict=True))


def mesh_rows(found: MeshTable | PlanTable) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(found, axis).tolist() for axis in MESH_AXES), strict=True))


def brute_force(where: RuleContext, domains: SearchDomains, rules: tuple[Rule, ...]) -> set[tuple[int, ...]]:
    """Judge the whole product of the mesh candidates by the margins of the rules."""
    columns = grid(domains, MESH_AXES)
    table = complete(where, columns, rows=len(columns["tp"]))
    return set(mesh_rows(table.take(check(where, table, rules).legal)))


MESH_STAGE = tuple(rule for rule in RULES if rule.stage == 0)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_solver_finds_what_brute_force_finds(case: tuple[RuleContext, SearchDomains]) -> None:
    where, domains = case
    expected, found = brute_force(where, domains, MESH_STAGE), mesh_rows(enumerate_meshes(where, domains))
    assert set(found) == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("target", list(Target))
@pytest.mark.parametrize("devices", [1, 24, 72])
def test_solver_and_brute_force_with_every_rule_at_work(devices: int, target: Target) -> None:
    """Each model has one size that tp = 9 does not divide, so that no rule hides behind another."""
    sizes = {"layers": 12, "heads": 72, "kv_heads": 1, "hidden": 72, "num_experts": 12, "expert_width": 16}
    odd = [{"heads": 24}, {"kv_heads": 6}, {"hidden": 48}, {"shared_width": 24}]
    models = [moe_model(**(sizes | {"shared_width": 72} | one)) for one in odd]
    models.append(dense_model(layers=12, heads=72, kv_heads=1, hidden=72, width=24))
    degrees = (1, 2, 3, 4, 5, 8, 9)
    for model in models:
        where = context(model, devices, seq_len=36, target=target)
        domains = search_domains(where, [(axis, degrees) for axis in ("tp", "cp", "pp", "ep", "etp")])
        assert set(mesh_rows(enumerate_meshes(where, domains))) == brute_force(where, domains, MESH_STAGE)


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from(["none", "schedule"]))
def test_space_is_the_legal_part_of_the_product_and_counts_the_rest(
    case: tuple[RuleContext, SearchDomains], knob: str
) -> None:
    """Lay the whole product out, judge it in one go, and compare rows and counts by first broken rule."""
    where, domains = case
    chosen = [(axis, getattr(domains, axis)) for axis in domains.fixed]
    chosen += [("vpp", (1, 2)), ("mbs", (1, 2)), ("recompute", (0, 32)), ("sharding", (1, 4))]
    chosen += [("schedule", tuple(int(value) for value in Schedule))] if knob == "schedule" else []
    domains = search_domains(where, chosen)
    columns = grid(domains, tuple(axis for stage in STAGES for axis in stage))
    if "schedule" not in columns:
        columns["schedule"] = np.where(columns["vpp"] > 1, int(Schedule.INTERLEAVED), int(Schedule.ONE_F_ONE_B))
    table = complete(where, columns, rows=len(columns["tp"]))
    matrix = check(search_context(where, domains), table)
    counts = np.bincount(matrix.first_blocker, minlength=len(matrix.rules) + 1)
    found = build_table(where, domains)
    assert found.candidates == len(table)
    assert plan_rows(found.table) == plan_rows(table.take(matrix.legal))
    dropped = {one.rule.id: one.count for one in found.dropped}
    assert dropped == {rule.id: int(count) for rule, count in zip(matrix.rules, counts[:-1], strict=True) if count}


def plan_rows(table: PlanTable) -> set[tuple[object, ...]]:
    names = [name for name in PlanTable.columns() if name != "layout"]
    layouts = [table.layouts[index].chunk_layers for index in table.layout]
    return set(zip(*(getattr(table, name).tolist() for name in names), layouts, strict=True))
