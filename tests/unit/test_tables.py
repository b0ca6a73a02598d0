"""Rules as tables: large ones split by class, knobs that no rule minds, and what the search for more devices skips."""

from itertools import product

import numpy as np
import pytest

from ap_search.cost.context import CostContext
from ap_search.cost.step import price_table
from ap_search.plan.plan import Dispatcher, Schedule, Sharding
from ap_search.plan.table import IntArray
from ap_search.search import clash, degrees, tables
from ap_search.search.clash import Clash, smallest_clash
from ap_search.search.degrees import DegreeModel
from ap_search.search.domains import divisors, search_domains
from ap_search.search.explain import _Probe
from ap_search.search.rules import RULES, Rule, RuleContext, applicable
from ap_search.search.space import build_table, legal_plans
from ap_search.search.tables import legality, settle_free_knobs
from ap_search.spec.cluster import load_cluster
from ap_search.spec.make_job import make_job
from ap_search.spec.model import load_model
from ap_search.spec.profiles import load_software
from tests.search_cases import Target, context, deepseek_v3, moe_model

HSDP = next(rule for rule in RULES if rule.id == "sharding_group")
CANDIDATES = {
    "tp": (1, 2, 4),
    "cp": (1, 2),
    "dp": (1, 2, 3, 4, 6, 12),
    "edp": (1, 2, 3, 4, 6, 12),
    "sharding": (int(Sharding.ZERO1), int(Sharding.HSDP)),
}


def test_divisors_are_all_of_them_up_to_the_limit() -> None:
    assert divisors(36, limit=36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(36, limit=10) == (1, 2, 3, 4, 6, 9)
    assert divisors(36, limit=0) == (1,)
    assert divisors(1, limit=5) == (1,)


def test_a_table_judges_every_combination_as_the_rule_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 7 as in one of all; zero1 has no group to divide."""
    where = context(moe_model(), 24, devices_per_domain=4)
    axes, legal = legality(where, HSDP, CANDIDATES)
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    assert axes == tuple(CANDIDATES)
    assert (legality(where, HSDP, CANDIDATES)[1] == legal).all()
    assert legal[..., 0].all()
    assert not legal[..., 1].all()
    assert legal[..., 1].any()


@pytest.mark.parametrize("limit", [0, 10**6])
def test_a_table_in_two_parts_allows_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix all values but one edp after the other, and compare with the table."""
    monkeypatch.setattr(degrees, "MAX_TABLE_ROWS", limit)
    where = context(moe_model(), 24, devices_per_domain=4)
    candidates = {axis: values for axis, values in CANDIDATES.items() if axis != "cp"}
    _, legal = legality(where, HSDP, candidates)
    for places in product(*(range(len(values)) for values in candidates.values())):
        if places[0] == 1:
            chosen = {axis: (candidates[axis][place],) for axis, place in zip(candidates, places, strict=True)}
            model = DegreeModel(candidates, devices=24)
            numbers = [model.post(where, HSDP), *(model.restrict(axis, axis, each) for axis, each in chosen.items())]
            assert (model.clash(numbers) is None) == legal[places]


def settled(where: RuleContext, fixed: tuple[str, ...] = (), **changes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    every = CANDIDATES | {
        "pp": (1, 2),
        "ep": (1, 2),
        "etp": (1,),
        "mbs": (1, 2),
        "vpp": (1, 2),
        "schedule": (int(Schedule.ONE_F_ONE_B), int(Schedule.INTERLEAVED)),
        "dispatcher": (int(Dispatcher.DEEPEP), int(Dispatcher.ALLTOALL)),
        "recompute": (0, 32),
    }
    return settle_free_knobs(where, every | changes, applicable(RULES, where), fixed=fixed)


def test_a_knob_that_no_rule_minds_has_one_value_left() -> None:
    """DeepEP needs a group, alltoall nothing; vpp = 1 runs 1F1B; mbs may not divide the batch, so both stay."""
    left = settled(context(moe_model(), 24))
    assert (left["vpp"], left["schedule"]) == ((1,), (int(Schedule.ONE_F_ONE_B),))
    assert left["dispatcher"] == (int(Dispatcher.ALLTOALL),)
    assert left["sharding"] == (int(Sharding.ZERO1),)
    assert left["mbs"] == (1, 2)
    assert left["tp"] == CANDIDATES["tp"]


def test_a_fixed_knob_and_one_that_a_rule_minds_stay() -> None:
    """Torchtitan has no zero1, hsdp needs a group: neither is free. pp = 64 is more than 32 layers with any vpp."""
    assert settled(context(moe_model(), 24), fixed=("sharding",))["sharding"] == CANDIDATES["sharding"]
    assert settled(context(moe_model(), 24, target=Target.TORCHTITAN))["sharding"] == CANDIDATES["sharding"]
    assert settled(context(moe_model(), 24), pp=(1, 64))["vpp"] == (1, 2)


@pytest.mark.parametrize(
    "chosen", [{"dp": (2,)}, {"pp": (4,), "vpp": (2,)}, {"dp": (5,)}, {"sharding": (4,), "tp": (8,)}]
)
def test_settling_free_knobs_changes_no_clash(
    chosen: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = context(moe_model(layers=6), 24, global_batch=37)
    domains = search_domains(where, list(chosen.items()))
    found = smallest_clash(where, domains)
    monkeypatch.setattr(clash, "settle_free_knobs", _settle_nothing)
    other = smallest_clash(where, domains)
    assert found != Clash(clash=(), levers=())
    assert len(found.clash) == len(other.clash)
    assert found.levers == other.levers


def _settle_nothing(
    context: RuleContext, candidates: dict[str, tuple[int, ...]], rules: tuple[Rule, ...], *, fixed: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    return candidates


def test_a_world_of_many_divisors_posts_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,080 has 72 divisors: dp and edp alone would make 5,184 rows for each tp, cp and sharding."""
    sizes: list[int] = []
    add = DegreeModel._add_table

    def counted(model: DegreeModel, variables: list[object], rows: IntArray) -> None:
        sizes.append(len(rows))
        add(model, variables, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(DegreeModel, "_add_table", counted)
    where = context(deepseek_v3(), 10080)
    assert [one.rule_id for one in smallest_clash(where, search_domains(where)).clash][-2:] == ["world_dense", "batch"]
    assert max(sizes) < 1000


@pytest.mark.parametrize("devices", [12, 64])
def test_legal_plans_are_those_of_the_space(devices: int) -> None:
    where = context(moe_model(layers=6), devices)
    domains = search_domains(where)
    ours, space = legal_plans(where, domains), build_table(where, domains).table
    names = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs", "sharding", "dispatcher", "recompute")
    rows = [np.array([getattr(table, name) for name in names]).T.tolist() for table in (ours, space)]
    assert len(ours) > 0
    assert sorted(rows[0]) == sorted(rows[1])


@pytest.mark.parametrize("name", ["toy-moe", "mixtral-8x7b", "llama-3.1-8b"])
def test_no_plan_needs_less_than_state_spread_over_all_devices(name: str) -> None:
    """The bound that spares a probe its pricing: all state once, plus the reserve, is at most what any plan needs."""
    model, machine = load_model(name), load_cluster("h100-sxm")
    job = make_job(machine=machine, model=model, devices=8)
    rules = RuleContext(model=model, machine=machine, job=job)
    cost = CostContext(model=model, machine=machine, software=load_software("default"), job=job)
    domains = search_domains(rules)
    needed = price_table(cost, legal_plans(rules, domains), limit_bytes=0.0).peak_bytes.min()
    least = _Probe(rules=rules, context=cost, domains=domains).state_bytes / 8 + job.reserve_bytes
    assert job.reserve_bytes < least <= needed
