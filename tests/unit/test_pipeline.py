"""Pipeline kernels against hand-computed figures and the event simulation of each schedule."""

from collections.abc import Sequence

import numpy as np
import pytest

from ap_search.cost.in_flight import in_flight_chunk_vectors, in_flight_microbatches, interleave_group
from ap_search.cost.pipeline import Makespan, StageTimes, exposed_hops, makespan
from ap_search.plan.plan import Schedule
from tests.pipeline_simulator import (
    Costs,
    dualpipe,
    gpipe,
    interleaved,
    most_in_flight,
    one_f_one_b,
    simulate,
    zb_h1,
)

Numbers = Sequence[float]


def price(
    schedule: Schedule,
    forward: Numbers,
    backward: Numbers,
    count: int,
    *,
    weight_grad: Numbers | None = None,
    overlapped: Numbers | None = None,
    run_length: Sequence[int] | None = None,
    vpp: int = 1,
    hop_s: float = 0.0,
) -> Makespan:
    """One plan, a column per stage unless `run_length` says otherwise."""
    stages = StageTimes(
        forward_s=np.array([forward], dtype=float),
        backward_s=np.array([backward], dtype=float),
        weight_grad_s=np.array([weight_grad or [0.0] * len(forward)], dtype=float),
        overlapped_s=None if overlapped is None else np.array([overlapped], dtype=float),
        run_length=np.array([run_length or [1] * len(forward)]),
    )
    return makespan(
        stages=stages,
        schedule=np.array([schedule]),
        vpp=np.array([vpp]),
        num_microbatches=np.array([count]),
        hop_s=np.array([hop_s]),
    )


# --- oracles of the closed forms ---


@pytest.mark.parametrize(
    ("schedule", "pp", "count", "vpp", "total"),
    [
        # 32 micro-batches of F+B = 3 and a bubble of 7 stages: (32 + 7) * 3 = 117.
        (Schedule.ONE_F_ONE_B, 8, 32, 1, 117.0),
        # GPipe has 1F1B's bubble.
        (Schedule.GPIPE, 8, 32, 1, 117.0),
        # 96 + 7 * 3 / 4 = 101.25.
        (Schedule.INTERLEAVED, 8, 32, 4, 101.25),
        # 24 + 3 * 3 / 2 = 28.5.
        (Schedule.INTERLEAVED, 4, 8, 2, 28.5),
    ],
)
def test_oracle_o12_makespans(schedule: Schedule, pp: int, count: int, vpp: int, total: float) -> None:
    span = price(schedule, [1.0] * pp, [2.0] * pp, count, vpp=vpp)
    assert span.total_s[0] == total
    assert span.busy_s[0] == 3.0 * count
    assert span.bubble_s[0] == total - 3.0 * count


def test_oracle_o13_zero_bubble_h1() -> None:
    """P8 m32, F = B_in = W = 1: the bubble is 7 (F + B - 2W) = 7 (1 + 2 - 2)."""
    span = price(Schedule.ZB_H1, [1.0] * 8, [2.0] * 8, 32, weight_grad=[1.0] * 8)
    assert (span.bubble_s[0], span.total_s[0]) == (7.0, 103.0)


@pytest.mark.parametrize(
    ("together", "total"),
    [
        # 20 * 3 and a bubble of (8/2 - 1)(3 + 2 - 3) = 6.
        (3.0, 66.0),
        # The middle ranks overlap 20 - 9 = 11 pairs: 11 * 2.4 + 9 * 3, and a bubble of 3 (2.4 + 2 - 3) = 4.2.
        (2.4, 57.6),
    ],
)
def test_oracle_o14_dualpipe(together: float, total: float) -> None:
    one = [1.0] * 8
    span = price(Schedule.DUALPIPE, one, [2.0] * 8, 20, weight_grad=one, overlapped=[together] * 8)
    assert span.total_s[0] == pytest.approx(total, rel=1e-12)
    orders = dualpipe(8, 20)
    assert simulate(orders, Costs(one, [2.0] * 8, one, overlap=together / 3)) == pytest.approx(total, rel=1e-12)


def test_one_stage_has_no_bubble() -> None:
    for schedule in Schedule:
        span = price(schedule, [1.0], [2.0], 5, weight_grad=[1.0], hop_s=9.0)
        assert (span.busy_s[0], span.bubble_s[0], span.hop_s[0]) == (15.0, 0.0, 0.0)


# --- closed forms against the simulation ---

STAGES = ([1.0] * 4, [1.0, 1.1, 1.3, 0.9, 1.2, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.5], [1.0, 1.4, 1.0, 1.0, 1.0])
COUNTS = (1, 3, 6, 17)


@pytest.mark.parametrize("forward", STAGES)
@pytest.mark.parametrize("count", COUNTS)
def test_gpipe_is_exact_for_unequal_stages(forward: list[float], count: int) -> None:
    backward = [2.2 * value for value in reversed(forward)]
    span = price(Schedule.GPIPE, forward, backward, count)
    simulated = simulate(gpipe(len(forward), count), Costs(forward, backward, backward))
    assert span.total_s[0] == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("forward", STAGES)
@pytest.mark.parametrize("count", COUNTS)
def test_1f1b_is_met_within_half_a_per_cent_for_unequal_stages(forward: list[float], count: int) -> None:
    backward = [2.0 * value for value in forward]
    span = price(Schedule.ONE_F_ONE_B, forward, backward, count)
    simulated = simulate(one_f_one_b(len(forward), count), Costs(forward, backward, backward))
    assert 1.0 - 1e-12 <= simulated / span.total_s[0] <= 1.005


@pytest.mark.parametrize("forward", STAGES)
@pytest.mark.parametrize("count", COUNTS)
def test_zb_h1_is_met_within_six_per_cent_for_unequal_stages(forward: list[float], count: int) -> None:
    backward = [2.1 * value for value in forward]
    span = price(Schedule.ZB_H1, forward, backward, count, weight_grad=forward)
    simulated = simulate(zb_h1(len(forward), count), Costs(forward, backward, forward))
    assert 1.0 - 1e-12 <= simulated / span.total_s[0] <= 1.06


@pytest.mark.parametrize("forward", STAGES)
@pytest.mark.parametrize(("count", "vpp"), [(6, 2), (12, 3), (17, 2), (30, 2)])
def test_interleaved_is_met_within_seven_per_cent_for_unequal_stages(
    forward: list[float], count: int, vpp: int
) -> None:
    pp = len(forward)
    backward = [2.0 * value for value in forward]
    span = price(Schedule.INTERLEAVED, forward, backward, count, vpp=vpp)
    group = int(interleave_group(count, pp))
    costs = Costs([f / vpp for f in forward] * vpp, [b / vpp for b in backward] * vpp, [0.0] * pp * vpp)
    simulated = simulate(interleaved(pp, vpp, count, group), costs)
    assert 1.0 - 1e-12 <= simulated / span.total_s[0] <= 1.07


@pytest.mark.parametrize(("pp", "vpp", "count"), [(4, 2, 8), (4, 3, 4), (6, 2, 30)])
def test_interleaved_is_exact_when_only_the_last_chunk_is_heavier(pp: int, vpp: int, count: int) -> None:
    """The head and the loss lie on the last chunk of the last stage."""
    head = 0.4
    forward, backward = [1.0 / vpp] * pp * vpp, [2.0 / vpp] * pp * vpp
    forward[-1] += head
    backward[-1] += 2 * head
    whole = [sum(forward[stage::pp]) for stage in range(pp)]
    span = price(Schedule.INTERLEAVED, whole, [2 * value for value in whole], count, vpp=vpp)
    simulated = simulate(interleaved(pp, vpp, count, pp), Costs(forward, backward, backward))
    assert span.total_s[0] == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("forward", [[1.0, 1.1, 1.2, 1.05], [1.5, 1.0, 1.0, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("extra", [0, 10])
def test_dualpipe_is_met_within_seven_per_cent_for_unequal_stages(forward: list[float], extra: int) -> None:
    pp = len(forward)
    count = 2 * pp + extra
    pair = [(forward[i] + forward[pp - 1 - i]) / 2 for i in range(pp)]
    overlapped = [0.85 * 3 * value for value in pair]
    span = price(Schedule.DUALPIPE, pair, [2 * value for value in pair], count, weight_grad=pair, overlapped=overlapped)
    costs = Costs(forward, [2 * value for value in forward], forward, overlap=0.85)
    assert 0.93 <= simulate(dualpipe(pp, count), costs) / span.total_s[0] <= 1.02


# --- runs of equal stages ---


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(
    ("forward", "length"), [([1.0], [8]), ([1.2, 1.0, 1.7], [1, 6, 1]), ([1.0, 1.1], [6, 2]), ([1.5, 1.0], [2, 6])]
)
def test_runs_of_equal_stages_price_as_the_stages_themselves(
    schedule: Schedule, forward: list[float], length: list[int]
) -> None:
    each = [value for value, times in zip(forward, length, strict=True) for _ in range(times)]
    short = price(
        schedule, forward, [2 * f for f in forward], 24, weight_grad=forward, run_length=length, vpp=2, hop_s=0.1
    )
    long = price(schedule, each, [2 * f for f in each], 24, weight_grad=each, vpp=2, hop_s=0.1)
    assert short.total_s[0] == pytest.approx(long.total_s[0], rel=1e-12)
    assert short.bubble_s[0] == pytest.approx(long.bubble_s[0], rel=1e-12)


def test_padding_changes_nothing_and_is_never_critical() -> None:
    for schedule in Schedule:
        plain = price(schedule, [1.0, 1.0], [2.0, 2.0], 8, weight_grad=[1.0, 1.0])
        padded = price(schedule, [1.0, 1.0, 9.0], [2.0, 2.0, 9.0], 8, weight_grad=[1.0] * 3, run_length=[1, 1, 0])
        assert padded.total_s[0] == plain.total_s[0]
        assert padded.critical[0] == plain.critical[0]


def test_the_slowest_stage_is_critical() -> None:
    """Stage 2 works 8 * 6 = 48, waits 2 * 3 for the first and, of stage 3's 3, nothing: its own work fills it."""
    span = price(Schedule.ONE_F_ONE_B, [1.0, 1.0, 2.0, 1.0], [2.0, 2.0, 4.0, 2.0], 8)
    assert span.critical[0] == 2
    assert (span.busy_s[0], span.bubble_s[0]) == (48.0, 7.0)


def test_equal_stages_tie_to_the_first() -> None:
    for schedule in Schedule:
        assert price(schedule, [0.1] * 6, [0.3] * 6, 12, weight_grad=[0.1] * 6).critical[0] == 0


# --- hops ---


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 13])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_hops_are_exact_for_equal_stages(pp: int, count: int) -> None:
    hop = 0.01
    costs = Costs([1.0] * pp, [2.0] * pp, [1.0] * pp, hop=hop)
    orders = {Schedule.ONE_F_ONE_B: one_f_one_b, Schedule.GPIPE: gpipe, Schedule.ZB_H1: zb_h1}
    for schedule, order in orders.items():
        span = price(schedule, [1.0] * pp, [2.0] * pp, count, weight_grad=[1.0] * pp, hop_s=hop)
        assert span.total_s[0] == pytest.approx(simulate(order(pp, count), costs), rel=1e-12), schedule


@pytest.mark.parametrize(("pp", "vpp", "count"), [(4, 2, 8), (4, 3, 4), (4, 2, 17), (2, 2, 9)])
def test_interleaved_hops_are_exact_for_equal_stages(pp: int, vpp: int, count: int) -> None:
    group = int(interleave_group(count, pp))
    chunk = [1.0 / vpp] * pp * vpp
    costs = Costs(chunk, [2 * value for value in chunk], chunk, hop=0.01)
    span = price(Schedule.INTERLEAVED, [1.0] * pp, [2.0] * pp, count, vpp=vpp, hop_s=0.01)
    assert span.total_s[0] == pytest.approx(simulate(interleaved(pp, vpp, count, group), costs), rel=1e-12)


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (2, 10), (4, 8), (4, 18), (6, 24), (8, 34)])
def test_dualpipe_hops_are_met_within_two(pp: int, count: int) -> None:
    one, two = [1.0] * pp, [2.0] * pp
    with_hop = simulate(dualpipe(pp, count), Costs(one, two, one, hop=0.01))
    without = simulate(dualpipe(pp, count), Costs(one, two, one))
    counted = exposed_hops(schedule=Schedule.DUALPIPE, pp=pp, vpp=1, num_microbatches=count, group=0)
    assert abs(float(counted) - (with_hop - without) / 0.01) <= 2.0


# --- micro-batches in flight ---


def test_oracle_o11_one_f_one_b_in_flight() -> None:
    """min(m, pp - stage)."""
    for count, wanted in ((8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])):
        counted = in_flight_microbatches(
            schedule=Schedule.ONE_F_ONE_B, pp=4, vpp=1, stage=np.arange(4), num_microbatches=count
        )
        assert np.asarray(counted).tolist() == wanted


@pytest.mark.parametrize(
    ("pp", "vpp", "count", "chunks"),
    [(4, 2, 8, [11, 9, 7, 5]), (8, 4, 32, [39, 37, 35, 33, 31, 29, 27, 25])],
)
def test_oracle_o11_interleaved_chunks_in_flight(pp: int, vpp: int, count: int, chunks: list[int]) -> None:
    """2 (pp - stage - 1) + (v - 1) pp + 1: on stage 0 of P4 v2, 6 + 4 + 1 = 11."""
    vectors = [
        in_flight_chunk_vectors(schedule=Schedule.INTERLEAVED, pp=pp, vpp=vpp, stage=stage, num_microbatches=count)
        for stage in range(pp)
    ]
    assert [int(each.sum(axis=1).max()) for each in vectors] == chunks
    whole = in_flight_microbatches(
        schedule=Schedule.INTERLEAVED, pp=pp, vpp=vpp, stage=np.arange(pp), num_microbatches=count
    )
    assert np.asarray(whole).tolist() == [value / vpp for value in chunks]


def test_overlapped_experts_hold_one_chunk_more() -> None:
    vectors = in_flight_chunk_vectors(
        schedule=Schedule.INTERLEAVED, pp=4, vpp=2, stage=0, num_microbatches=8, extra_warmup=1
    )
    assert int(vectors.sum(axis=1).max()) == 12


def test_oracle_o13_zero_bubble_holds_pp_on_every_stage() -> None:
    counted = in_flight_microbatches(schedule=Schedule.ZB_H1, pp=8, vpp=1, stage=np.arange(8), num_microbatches=32)
    assert np.asarray(counted).tolist() == [8] * 8
    assert [most_in_flight(order) for order in zb_h1(8, 32)] == [{((rank, 8),)} for rank in range(8)]


def test_oracle_o14_dualpipe_holds_nine_on_every_device() -> None:
    """Device r holds stage r, pp - r in flight, and stage pp-1-r, r+1 in flight."""
    for rank, order in enumerate(dualpipe(8, 20)):
        vectors = in_flight_chunk_vectors(schedule=Schedule.DUALPIPE, pp=8, vpp=1, stage=rank, num_microbatches=20)
        assert vectors.tolist() == [[8 - rank, rank + 1]]
        assert most_in_flight(order) == {((rank, 8 - rank), (7 - rank, rank + 1))}


def test_gpipe_holds_all() -> None:
    vectors = in_flight_chunk_vectors(schedule=Schedule.GPIPE, pp=4, vpp=1, stage=1, num_microbatches=9)
    assert vectors.tolist() == [[9]]


def test_schedules_mix_in_one_call() -> None:
    counted = in_flight_microbatches(
        schedule=np.array([Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1, Schedule.INTERLEAVED]),
        pp=np.array([4, 4, 4, 4]),
        vpp=np.array([1, 1, 1, 2]),
        stage=np.array([3, 3, 3, 3]),
        num_microbatches=np.array([8, 8, 8, 8]),
    )
    assert np.asarray(counted).tolist() == [1, 8, 4, 2.5]


@pytest.mark.parametrize(
    ("count", "pp", "group"),
    # 6 on 4 stages: groups of 4 leave 2 < 4, of 5 leave 1, so one group of 6. 9 on 4: 5 leaves 4, legal.
    [(8, 4, 4), (6, 4, 6), (9, 4, 5), (3, 4, 0), (7, 1, 1), (4, 4, 4)],
)
def test_smallest_legal_group(count: int, pp: int, group: int) -> None:
    assert int(interleave_group(count, pp)) == group


def test_groups_of_many_plans_keep_their_shape() -> None:
    groups = interleave_group(np.array([[8, 9], [3, 6]]), np.array([4, 4]))
    assert groups.tolist() == [[4, 5], [0, 6]]
    assert interleave_group(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).shape == (0,)


def test_vectors_are_those_of_the_walked_order() -> None:
    for pp, vpp, count, stage in ((4, 2, 8, 0), (3, 3, 14, 1), (2, 2, 5, 0), (4, 3, 6, 3), (4, 4, 4, 0)):
        order = interleaved(pp, vpp, count, int(interleave_group(count, pp)))[stage]
        walked = {tuple(number for _, number in moment) for moment in most_in_flight(order)}
        vectors = in_flight_chunk_vectors(
            schedule=Schedule.INTERLEAVED, pp=pp, vpp=vpp, stage=stage, num_microbatches=count
        )
        assert {tuple(row) for row in vectors.tolist()} == walked


def test_vectors_cannot_be_written() -> None:
    vectors = in_flight_chunk_vectors(schedule=Schedule.INTERLEAVED, pp=4, vpp=2, stage=0, num_microbatches=8)
    with pytest.raises(ValueError, match="read-only"):
        vectors[0, 0] = 0
