"""AP-EP-03 and 05: token dispatch and combine, expert compute, balanced load and not; by hand on round figures."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ap_search.result import PathStep
from ap_search.search.explanation import explain_plan
from ap_search.spec.blocks import Model
from ap_search.spec.model import load_model
from tests import cost_cases as cases
from tests.acceptance.toy import TOKENS, shape, steps, toy, toy_search, with_top_k

# AP-EP-03: token dispatch and combine (3.2).


def _path(dispatcher: str, devices: int = 8, *, ep: int = 8, model: Model | None = None) -> dict[str, PathStep]:
    """Steps of the toy's MoE layer on a machine of round figures: 1e11 B/s inside nodes of 8, 1e10 B/s beyond."""
    where = cases.context(model or load_model("toy-moe"), devices, machine=cases.round_machine(), seq_len=TOKENS)
    return steps(explain_plan(where, cases.price(where, f"ep={ep},dispatcher={dispatcher}")))


def test_ap_ep_03_alltoall_by_hand() -> None:
    """1,024 tokens, top-2: 2,048 copies of 128 bytes with a probability of 4; 7 of 8 leave the rank at 1e11 B/s.

    Dispatch 2048*132*7/8 = 236,544 bytes, and before it the counts of 8 experts (8 bytes) to 7 ranks, 448. Combine
    2048*128*7/8 = 229,376 bytes. Backward, dispatch returns gradients of tokens and probabilities, 236,544, and combine
    hands on gradients alone, 229,376.
    """
    path = _path("alltoall")
    dispatch, combine = path["dispatch"], path["combine"]
    assert (dispatch.sent_forward_bytes, dispatch.sent_backward_bytes) == (236_544 + 448, 236_544)
    assert (combine.sent_forward_bytes, combine.sent_backward_bytes) == (229_376, 229_376)
    for step in (dispatch, combine):
        assert step.forward_s == pytest.approx(step.sent_forward_bytes / 1e11)
        assert step.backward_s == pytest.approx(step.sent_backward_bytes / 1e11)


def test_ap_ep_03_alltoall_beyond_the_node_by_hand() -> None:
    """ep=16 of 16 experts on two nodes: half of 2048*132 bytes crosses at 1e10 B/s while the rest moves inside.

    The counts, 16*8 bytes of each of 15 others, go around a ring that leaves a node over its 8 NICs: 8e10 B/s.
    """
    path = _path("alltoall", 16, ep=16, model=_with_experts(load_model("toy-moe"), 16))
    assert path["dispatch"].forward_s == pytest.approx(2048 * 132 / 2 / 1e10 + 15 * 16 * 8 / 8e10)


def _with_experts(model: Model, num_experts: int) -> Model:
    """The same model with another number of experts."""
    kinds = (
        replace(kind, ffn=replace(kind.ffn, num_experts=num_experts)) if kind.is_moe else kind for kind in model.kinds
    )
    return replace(model, kinds=tuple(kinds))


def test_ap_ep_03_allgather_by_hand() -> None:
    """Each token goes to 7 others with its map (8 bytes) and probabilities (32), and comes back in fp32 (256)."""
    path = _path("allgather")
    assert path["dispatch"].sent_forward_bytes == 1024 * (128 + 8 + 32) * 7
    assert path["combine"].sent_forward_bytes == 1024 * 64 * 4 * 7
    assert path["dispatch"].forward_s == pytest.approx(1024 * 168 * 7 / 1e11)


def test_ap_ep_03_deepep_sends_a_token_once_per_rank() -> None:
    """Top-2 of 8 on 8 ranks: two distinct ranks; on 4 ranks 4*(1 - C(6,2)/C(8,2)) = 1.857 instead of 2 copies.

    A token is 128 bytes, two indices of 8, two weights of 4 and its source, 4; what arrives counts, its own rank's too.
    """
    token_bytes = 128 + 2 * 8 + 2 * 4 + 4
    assert _path("deepep")["dispatch"].forward_s == pytest.approx(1024 * token_bytes * 2.0 / 1e11)
    on_four = _path("deepep", 4, ep=4)["dispatch"]
    assert on_four.forward_s == pytest.approx(1024 * token_bytes * 4 * (1 - 15 / 28) / 1e11)


def _sent(dispatcher: str, ep: int) -> float:
    """Bytes of forward dispatch and combine of a DeepSeek-V3 layer, 4,096 tokens."""
    where = cases.context(cases.deepseek_v3(dense=0, moe=1), 64, machine=cases.round_machine())
    path = steps(explain_plan(where, cases.price(where, f"ep={ep},dispatcher={dispatcher}")))
    return path["dispatch"].sent_forward_bytes + path["combine"].sent_forward_bytes


def test_ap_ep_03_dispatchers_of_deepseek_v3() -> None:
    """Deduplication sends less than a copy per expert (5.29 against 8 at ep=8); gathering all tokens costs ep - 1."""
    for ep in (8, 16, 32, 64):
        assert _sent("deepep", ep) < _sent("alltoall", ep)
    for ep in (16, 32, 64):
        assert _sent("alltoall", ep) < _sent("allgather", ep)
    assert _sent("allgather", 64) > 4 * _sent("alltoall", 64)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_ap_ep_03_ep_1_sends_nothing(dispatcher: str) -> None:
    """Neither bytes nor seconds of communication; what is left of both parts is the permutation."""
    priced = toy(f"ep=1,dispatcher={dispatcher}")
    assert priced.traffic.dispatch_bytes == priced.traffic.combine_bytes == 0
    path = _path(dispatcher, ep=1)
    assert path["dispatch"].forward_s == path["combine"].forward_s == 0


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_ap_ep_03_never_less_with_a_larger_top_k(dispatcher: str) -> None:
    paths = [_path(dispatcher, model=with_top_k(load_model("toy-moe"), top_k)) for top_k in (1, 2, 4, 8)]
    for name in ("dispatch", "combine"):
        sent = [path[name].sent_forward_bytes for path in paths]
        seconds = [path[name].forward_s for path in paths]
        assert sent == sorted(sent)
        assert seconds == sorted(seconds)


def _with_capacity(dispatcher: str, factor: float, *, shares: list[float] | None = None, **job: bool) -> PathStep:
    """The dispatch of the toy's MoE layer under a capacity factor; 0 drops nothing."""
    rows = None if shares is None else [shares]
    machine, model = cases.round_machine(), load_model("toy-moe")
    where = cases.context(
        model,
        8,
        machine=machine,
        seq_len=TOKENS,
        shares=rows,
        capacity_factor=factor,
        **job,  # type: ignore[arg-type]
    )
    return steps(explain_plan(where, cases.price(where, f"ep=8,dispatcher={dispatcher}")))["dispatch"]


def test_ap_ep_03_capacity_by_hand() -> None:
    """A rank has 2,048 copies, 256 for each expert. Factor 0.5 keeps 128 of them, 1 all of them.

    With 0.3 of them for the first expert and 0.1 for each other, factor 1 drops 0.3 - 1/8 = 0.175. Padded to 1.25, each
    expert gets 320 slots, whatever the load.
    """
    counts = 8 * 8 * 7
    skewed = [0.3] + [0.1] * 7
    copies = {
        1024: _with_capacity("alltoall", 0.5),
        2048: _with_capacity("alltoall", 1.0),
        0.825 * 2048: _with_capacity("alltoall", 1.0, shares=skewed),
        2560: _with_capacity("alltoall", 1.25, shares=skewed, pad_to_capacity=True),
    }
    for sent, step in copies.items():
        assert step.sent_forward_bytes == pytest.approx(sent * 132 * 7 / 8 + counts, abs=1)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_ap_ep_03_never_less_with_a_larger_capacity(dispatcher: str) -> None:
    """The more copies capacity lets through, the more travel, up to what dropless routing sends."""
    passes = [_with_capacity(dispatcher, factor, shares=[0.3] + [0.1] * 7) for factor in (0.5, 0.8, 1.0, 2.0, 0.0)]
    for less, more in pairwise(passes):
        assert less.sent_forward_bytes <= more.sent_forward_bytes
        assert less.forward_s <= more.forward_s


# AP-EP-05: expert compute, balanced and not (3.2).


def _histogram(folder: Path, counts: list[int] | list[list[int]]) -> str:
    """A file of tokens per expert."""
    path = folder / "histogram.json"
    path.write_text(json.dumps({"tokens_per_expert": counts}))
    return str(path)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_ap_ep_05_balanced_work_per_rank_does_not_depend_on_ep(ep: int) -> None:
    """Each rank brings 1,024 tokens with 2 copies and receives as many: 2,048 rows, over 8/ep experts."""
    assert float(shape(f"ep={ep}").rows[0]) == 2048


def test_ap_ep_05_a_uniform_histogram_is_balanced_in_every_figure(tmp_path: Path) -> None:
    """Step, parts, memory and traffic, for all of a search's plans."""
    balanced, uniform = toy_search(), toy_search(load=_histogram(tmp_path, [125] * 8))
    assert len(balanced.plans) == len(uniform.plans) > 10
    for one, other in zip(balanced.plans, uniform.plans, strict=True):
        assert replace(other, imbalance=None) == one


@pytest.mark.parametrize(("ep", "ratio"), [(8, 2.4), (4, 1.6), (2, 1.2), (1, 1.0)])
def test_ap_ep_05_a_skewed_histogram_by_hand(tmp_path: Path, ep: int, ratio: float) -> None:
    """Counts 300, 100 x 7: the first rank has 300 of a mean of 125, 400 of 250, 600 of 500, all of all."""
    load = _histogram(tmp_path, [300] + [100] * 7)
    priced, even = toy(f"ep={ep}", load=load), toy(f"ep={ep}")
    assert priced.imbalance is not None
    assert priced.imbalance.worst_rank_ratio_max == pytest.approx(ratio)
    assert float(shape(f"ep={ep}", ratio).rows[0]) == pytest.approx(2048 * ratio)
    assert priced.time.expert_s == pytest.approx(even.time.expert_s)
    if ep > 1:
        assert priced.time.imbalance_s > 0
        assert priced.memory.stages[0].activations_bytes > even.memory.stages[0].activations_bytes
        assert priced.step_time_s > even.step_time_s
    else:
        assert priced.step_time_s == pytest.approx(even.step_time_s)


def test_ap_ep_05_layers_add_their_own_worst_ranks(tmp_path: Path) -> None:
    """Three layers with different busy experts cost as much as three with the same one: maxima are summed."""
    same = [[300] + [100] * 7] * 3
    turned = [row[-turn:] + row[:-turn] for turn, row in enumerate(same)]
    assert turned[0] != turned[1]
    one = toy("ep=8", load=_histogram(tmp_path, same))
    other = toy("ep=8", load=_histogram(tmp_path, turned))
    assert other.step_time_s == pytest.approx(one.step_time_s)
    averaged = toy("ep=8", load=_histogram(tmp_path, [sum(column) for column in zip(*turned, strict=True)]))
    assert averaged.step_time_s < other.step_time_s


def test_ap_ep_05_more_skew_is_never_faster(tmp_path: Path) -> None:
    times = [toy("ep=8", load=load).step_time_s for load in ("balanced", "zipf:0.2", "zipf:0.5", "zipf:1", "zipf:2")]
    assert times == sorted(times)
