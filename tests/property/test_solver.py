"""The solver's meshes and the counted space against brute force over the whole product of candidates."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.plan.plan import Schedule
from ap_search.plan.table import IntArray, PlanTable
from ap_search.search.domains import SearchDomains, search_domains
from ap_search.search.rules import MESH_AXES, RULES, STAGES, RuleContext, check
from ap_search.search.rules.columns import complete
from ap_search.search.solver import enumerate_meshes
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
        draw(st.integers(1, 64)),
        devices_per_domain=draw(st.sampled_from([4, 8])),
        seq_len=draw(st.sampled_from([36, 96, 100, 8192])),
        global_batch=draw(st.sampled_from([6, 16, 48])),
        target=draw(st.sampled_from(list(Target))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[RuleContext, SearchDomains]:
    where = draw(contexts())
    axes = draw(st.lists(st.sampled_from(["tp", "cp", "pp", "ep", "etp", "dp"]), unique=True, max_size=6))
    values = st.lists(SMALL, min_size=1, max_size=4, unique=True)
    return where, search_domains(where, [(axis, tuple(draw(values))) for axis in axes])


def grid(domains: SearchDomains, axes: tuple[str, ...]) -> dict[str, IntArray]:
    """The product of the candidates of some axes, a row each; axes that follow from others are left out."""
    lists = {axis: values for axis in axes if (values := getattr(domains, axis, ()))}
    rows = np.array(list(product(*lists.values())), dtype=np.int64).reshape(-1, len(lists))
    return dict(zip(lists, rows.T, strict=True))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_solver_finds_what_brute_force_finds(case: tuple[RuleContext, SearchDomains]) -> None:
    where, domains = case
    columns = grid(domains, MESH_AXES)
    table = complete(where, columns, rows=len(columns["tp"]))
    legal = check(where, table, tuple(rule for rule in RULES if rule.stage == 0)).legal
    expected = {tuple(int(getattr(table, axis)[row]) for axis in MESH_AXES) for row in np.flatnonzero(legal)}
    found = enumerate_meshes(where, domains)
    rows = list(zip(*(getattr(found, axis).tolist() for axis in MESH_AXES), strict=True))
    assert set(rows) == expected
    assert len(rows) == len(expected)


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from(["none", "schedule"]))
def test_space_is_the_legal_part_of_the_product_and_counts_the_rest(
    case: tuple[RuleContext, SearchDomains], knob: str
) -> None:
    """Lay the whole product out, judge it in one go, and compare rows and counts by first broken rule."""
    where, domains = case
    chosen = [(axis, getattr(domains, axis)) for axis in domains.fixed]
    chosen += [("vpp", (1, 2)), ("mbs", (1, 2)), ("recompute", (0, 32, 128)), ("sharding", (1, 3, 4))]
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
