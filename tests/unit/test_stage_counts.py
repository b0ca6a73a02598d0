"""More stages than layers: refused unless the layout is given, and said how."""

from dataclasses import replace

from ap_search import estimate
from ap_search.search.rules import violations
from tests.search_cases import context, moe_model, plan


def test_more_stages_than_layers_are_refused_unless_the_layout_is_given_and_the_lever_says_how() -> None:
    """4 layers on 8 stages: refused in virtual stages, legal as `stage_layers=1x4+0x4`; a search offers no layout."""
    where = context(moe_model(layers=4), 8, explicit_layout=False)
    one = plan(where, pp=8)
    found = next(each for each in violations(where, one) if each.rule_id == "layer_per_stage")
    assert (found.demand, found.bound, found.unit) == (8, 4, "virtual stages")
    assert [lever.change for lever in found.levers] == ["pp=4", "stage_layers=1x4+0x4"]
    assert violations(replace(where, given_layout=True), one) == ()
    (searched,) = violations(replace(where, explicit_layout=True), one)
    assert [lever.change for lever in searched.levers] == ["pp=4"]


def test_a_plan_with_empty_stages_is_legal_by_its_printed_name_only() -> None:
    """Megatron-LM takes empty stages in a layout that is given: `pp=8` alone gives none, the printed name does."""
    guessed = estimate(model="toy-moe", devices=8, plan="pp=8").plans[0]
    assert [one.rule_id for one in guessed.violations] == ["layer_per_stage", "stage_layers"]
    assert guessed.name.endswith("-L1x4+0x4")
    assert estimate(model="toy-moe", devices=8, plan=guessed.name).plans[0].feasible
    assert estimate(model="toy-moe", devices=8, plan="pp=8,stage_layers=1x4+0x4").plans[0].feasible
