"""What becomes a check, and what a check finds."""

from dataclasses import replace

import pytest

from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Dispatcher, Plan, Recompute
from ap_search.result.verification import Check
from ap_search.runtime.agreement import (
    Difference,
    figure_checks,
    guarded_dispatches,
    hook_order_checks,
    number_checks,
)
from ap_search.runtime.prediction import RankFigures, Routed, predict
from ap_search.setting import load_execution
from ap_search.spec.model import load_model

MODEL = load_model("toy-moe")
FIGURES = RankFigures(
    rank=0,
    sent={"dispatch": 100, "layout": 16},
    state={("expert", "weights"): 64},
    saved={"layers.0": (8, 8), "layers.1": (9,), "layers.1 routing": (3,)},
    in_flight=((2,),),
)


def _failed(checks: tuple[Check, ...]) -> set[str]:
    return {check.name for check in checks if not check.ok}


def test_the_largest_difference_of_a_name_counts() -> None:
    found = [
        Difference(name="grad.w", ratio=1e-6, where="rank 0"),
        Difference(name="grad.w", ratio=2e-3, where="rank 1"),
        Difference(name="forward", ratio=1e-3, where="rank 1"),
    ]
    gradient, forward = number_checks(found, dtype="float32", routed=True)
    assert (gradient.name, gradient.ok, gradient.actual, gradient.where) == ("grad.w", False, 2e-3, "rank 1")
    assert forward.ok
    assert not any(check.ok for check in number_checks(found[:1], dtype="float64", routed=True))


@pytest.mark.parametrize(("dtype", "routed", "ok"), [("bfloat16", True, True), ("bfloat16", False, False)])
def test_near_ties_excuse_bfloat16_with_experts_alone(dtype: str, routed: bool, ok: bool) -> None:
    (check,) = number_checks([Difference(name="w", ratio=0.5, where="")], dtype=dtype, routed=routed)
    assert check.ok is ok
    assert bool(check.exception) is ok
    (wrong,) = number_checks([Difference(name="w", ratio=float("nan"), where="")], dtype=dtype, routed=routed)
    assert not wrong.ok


def test_a_block_that_never_ran_is_seen() -> None:
    checks = figure_checks(MODEL, [FIGURES], [replace(FIGURES, saved={"layers.0": (8, 8)})])
    assert "bytes.saved.moe_layer" in _failed(checks)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_no_number_is_worse_than_any(order: int) -> None:
    found = [Difference(name="w", ratio=ratio, where="") for ratio in (float("nan"), 0.0)][::order]
    (check,) = number_checks(found, dtype="float32", routed=True)
    assert not check.ok


def test_equal_figures_hold_and_named_traffic_is_an_exception() -> None:
    checks = figure_checks(MODEL, [replace(FIGURES, sent={"dispatch": 100})], [FIGURES])
    assert _failed(checks) == set()
    assert {check.name for check in checks if check.exception} == {"bytes.layout"}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sent": {"dispatch": 101}}, "bytes.dispatch"),
        ({"sent": {"dispatch": 100, "gossip": 1}}, "bytes.gossip"),
        ({"state": {("expert", "weights"): 63}}, "bytes.weights.expert"),
        ({"state": {("expert", "weights"): 64, ("router", "optimizer"): 1}}, "bytes.optimizer.router"),
        ({"saved": {**FIGURES.saved, "layers.0": (8, 7)}}, "bytes.saved.dense_layer"),
        ({"saved": {**FIGURES.saved, "layers.1": (9, 9)}}, "bytes.saved.moe_layer"),
        ({"in_flight": ((3,),)}, "in_flight"),
    ],
)
def test_a_byte_too_many_fails_by_name(change: dict[str, object], name: str) -> None:
    assert _failed(figure_checks(MODEL, [FIGURES], [replace(FIGURES, **change)])) == {name}


def test_the_rank_that_is_off_is_shown() -> None:
    second = replace(FIGURES, rank=1, sent={"dispatch": 90})
    checks = figure_checks(MODEL, [FIGURES, FIGURES], [FIGURES, second])
    (check,) = [check for check in checks if not check.ok]
    assert (check.expected, check.actual, check.where) == (100, 90, "rank 1")


@pytest.mark.parametrize(
    ("events", "sharded", "found"),
    [
        (["dispatch", "combine"], False, (1, 1)),
        (["dispatch", "combine"], True, (1, 0)),
        (["unshard", "dispatch", "combine", "reshard"], True, (1, 1)),
        (["dispatch", "unshard", "combine", "reshard"], True, (1, 0)),
        (["unshard", "dispatch", "reshard", "combine"], True, (1, 0)),
        (["unshard", "dispatch", "reshard", "unshard", "dispatch", "combine"], True, (2, 2)),  # recompute stops early
    ],
)
def test_a_dispatch_is_guarded_where_weights_are_whole_until_its_combine(
    events: list[str], sharded: bool, found: tuple[int, int]
) -> None:
    assert guarded_dispatches([f"layers.1 {event}" for event in events], sharded=sharded) == found
    (check,) = hook_order_checks([found])
    assert check.ok == (found[0] == found[1])


def test_layers_are_apart() -> None:
    events = ["layers.1 unshard", "layers.2 dispatch", "layers.1 dispatch", "layers.1 combine", "layers.2 combine"]
    assert guarded_dispatches(events, sharded=True) == (2, 1)
    assert hook_order_checks([(0, 0)]) == ()


def _predicted(plan: str, routed: list[list[Routed]]) -> list[RankFigures]:
    setting, asked = load_execution(
        model=MODEL, devices=2, plan=plan, global_batch=None, replicas=2, seq_len=32, capacity_factor=None,
        pad_to_capacity=False,
    )  # fmt: skip
    return list(predict(setting.cost, asked, routed))


def test_predicted_bytes_follow_the_tokens_that_were_routed() -> None:
    """Two ranks with experts 0-3 and 4-7, hidden 64, one MoE forward. Rank 0 sends 40 of its 64 copies away, rank 1 10.

    Dispatch: 40 (2*64 + 4) bytes and counts 8*8*1 forward; its backward carries home what came: 10 (2*64 + 4).
    Combine: 10 * 2*64 home, its backward 40 * 2*64 out.
    """
    sent = ((24, 0, 0, 0, 40, 0, 0, 0), (5, 5, 0, 0, 54, 0, 0, 0))
    first, second = _predicted("ep=2", [[Routed(layer=1, copies=copies)] for copies in sent])
    assert first.sent["dispatch"] == 40 * 132 + 64 + 10 * 132
    assert first.sent["combine"] == 10 * 128 + 40 * 128
    assert second.sent["dispatch"] == 10 * 132 + 64 + 40 * 132
    assert second.sent["combine"] == 40 * 128 + 10 * 128


def test_predicted_bytes_of_distinct_tokens() -> None:
    """Rank 0 sends 20 distinct tokens away, rank 1 8: payload 128, with 12 k + 4 = 28 bytes out, 4 k = 8 home."""
    copies = (8,) * 8
    routed = [
        [Routed(layer=1, copies=copies, tokens_per_rank=(30, 20))],
        [Routed(layer=1, copies=copies, tokens_per_rank=(8, 31))],
    ]
    first, second = _predicted("ep=2,dispatcher=deepep", routed)
    assert first.sent["dispatch"] == 20 * 156 + 8 * 136
    assert first.sent["combine"] == 8 * 128 + 20 * 128
    assert second.sent["dispatch"] == 8 * 156 + 20 * 136


def test_predicted_bytes_over_expert_tensor_parallelism() -> None:
    """Rank 0 and 1 share all experts (etp 2): 64 copies each are gathered by the other, and reduced in fp32.

    Dispatch: 64 (2*64 + 4) bytes and counts 8*8*1 forward, its backward returns 64 (2*64 + 4); combine reduces 64 rows
    of 4*64 bytes, and gathers their gradients.
    """
    (first, _) = _predicted("etp=2", [[Routed(layer=1, copies=(8,) * 8)]] * 2)
    assert first.sent["dispatch"] == 64 * 132 + 64 + 64 * 132
    assert first.sent["combine"] == 2 * 64 * 256


def test_a_repeated_forward_sends_again_but_goes_back_once() -> None:
    """Full recompute: both forwards are among what was routed."""
    forward = Routed(layer=1, copies=(24, 0, 0, 0, 40, 0, 0, 0))
    (once, _) = _predicted("ep=2", [[forward]] * 2)
    (twice, _) = _predicted("ep=2,recompute=full", [[forward, forward]] * 2)
    back = 24 * 132
    assert twice.sent["dispatch"] == 2 * once.sent["dispatch"] - back


def test_a_plan_of_one_device_sends_nothing() -> None:
    plan = Plan(layout=layout_of((4,), pp=1, vpp=1), dispatcher=Dispatcher.ALLTOALL, recompute=Recompute.NONE)
    setting, _ = load_execution(
        model=MODEL, devices=1, plan="ep=1", global_batch=2, replicas=2, seq_len=32, capacity_factor=None,
        pad_to_capacity=False,
    )  # fmt: skip
    (figures,) = predict(setting.cost, plan, [[Routed(layer=1, copies=(8,) * 8)]])
    assert set(figures.sent.values()) == {0}
