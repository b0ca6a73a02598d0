"""Laws of the pipeline kernels: the event simulation confirms the closed forms for equal stages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ap_search.cost.in_flight import in_flight_chunk_vectors, in_flight_microbatches, interleave_group
from ap_search.cost.pipeline import StageTimes, makespan
from ap_search.plan.plan import Schedule
from tests.pipeline_simulator import (
    Costs,
    Order,
    dualpipe,
    gpipe,
    interleaved,
    most_in_flight,
    one_f_one_b,
    simulate,
    zb_h1,
)

SECONDS = st.floats(0.5, 4.0)
SHARES = st.floats(0.0, 1.0)


def span_s(schedule: Schedule, times: list[list[float]], *, count: int, vpp: int = 1, overlap: float = 1.0) -> float:
    """Closed form for one plan; `times` are forward, backward and weight gradient per stage."""
    forward, backward, weight_grad = (np.array([row]) for row in times)
    stages = StageTimes(
        forward_s=forward,
        backward_s=backward,
        weight_grad_s=weight_grad,
        overlapped_s=overlap * (forward + backward),
        run_length=np.ones_like(forward, dtype=np.int64),
    )
    return float(makespan(stages=stages, schedule=schedule, vpp=vpp, num_microbatches=count).total_s[0])


def orders_of(schedule: Schedule, pp: int, vpp: int, count: int) -> list[Order]:
    if schedule == Schedule.INTERLEAVED:
        return interleaved(pp, vpp, count, int(interleave_group(count, pp)))
    return {Schedule.ONE_F_ONE_B: one_f_one_b, Schedule.GPIPE: gpipe, Schedule.ZB_H1: zb_h1}[schedule](pp, count)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE]),
    pp=st.integers(1, 6),
    count=st.integers(1, 16),
    forward=SECONDS,
    backward=SECONDS,
)
def test_equal_stages_are_exact(schedule: Schedule, pp: int, count: int, forward: float, backward: float) -> None:
    times = [[forward] * pp, [backward] * pp, [0.0] * pp]
    simulated = simulate(orders_of(schedule, pp, 1, count), Costs(*times))
    assert span_s(schedule, times, count=count) == pytest.approx(simulated, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(2, 5), vpp=st.integers(2, 3), count=st.integers(2, 16), forward=SECONDS, ratio=st.floats(1, 3))
def test_equal_interleaved_stages_are_exact(pp: int, vpp: int, count: int, forward: float, ratio: float) -> None:
    count = max(count, pp)
    times = [[forward] * pp, [ratio * forward] * pp, [0.0] * pp]
    costs = Costs(*([value / vpp for value in row] * vpp for row in times))
    simulated = simulate(orders_of(Schedule.INTERLEAVED, pp, vpp, count), costs)
    assert span_s(Schedule.INTERLEAVED, times, count=count, vpp=vpp) == pytest.approx(simulated, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(1, 6), extra=st.integers(0, 12), input_grad=SECONDS, ratio=st.floats(0.8, 1), share=SHARES)
def test_equal_zb_h1_stages_are_exact(pp: int, extra: int, input_grad: float, ratio: float, share: float) -> None:
    """A forward costs no more than an input gradient, and a weight gradient no more than a forward."""
    forward = ratio * input_grad
    weight_grad = share * forward
    times = [[forward] * pp, [input_grad + weight_grad] * pp, [weight_grad] * pp]
    simulated = simulate(zb_h1(pp, pp + extra), Costs(*times))
    assert span_s(Schedule.ZB_H1, times, count=pp + extra) == pytest.approx(simulated, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(half=st.integers(1, 4), extra=st.integers(0, 6), forward=SECONDS, share=SHARES, overlap=st.floats(0.7, 1.0))
def test_equal_dualpipe_stages_are_bounded(half: int, extra: int, forward: float, share: float, overlap: float) -> None:
    """An upper bound; exact where the weight gradient is half the backward or more."""
    pp = 2 * half
    count = 2 * (pp + extra)
    for weight_grad, exact in ((forward * share, share == 1.0), (forward, True), (forward * (1 + share / 2), True)):
        times = [[forward] * pp, [2 * forward] * pp, [weight_grad] * pp]
        simulated = simulate(dualpipe(pp, count), Costs(*times, overlap=overlap))
        closed = span_s(Schedule.DUALPIPE, times, count=count, overlap=overlap)
        assert simulated <= closed * (1 + 1e-9)
        assert not exact or simulated == pytest.approx(closed, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.ZB_H1, Schedule.INTERLEAVED]),
    forward=st.lists(st.floats(1.0, 1.5), min_size=2, max_size=5),
    count=st.integers(5, 16),
)
def test_unequal_stages_are_bounded_from_below(schedule: Schedule, forward: list[float], count: int) -> None:
    pp, vpp = len(forward), 2 if schedule == Schedule.INTERLEAVED else 1
    times = [forward, [2.1 * value for value in forward], forward]
    costs = Costs(*([value / vpp for value in row] * vpp for row in times))
    simulated = simulate(orders_of(schedule, pp, vpp, count), costs)
    closed = span_s(schedule, times, count=count, vpp=vpp)
    assert 1 - 1e-9 <= simulated / closed <= 1.12


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(2, 5), vpp=st.integers(2, 4), count=st.integers(2, 40), stage=st.integers(0, 4))
def test_shortened_walk_finds_the_same_moments(pp: int, vpp: int, count: int, stage: int) -> None:
    count, stage = max(count, pp), min(stage, pp - 1)
    order = interleaved(pp, vpp, count, int(interleave_group(count, pp)))[stage]
    walked = {tuple(number for _, number in moment) for moment in most_in_flight(order)}
    shape = {"schedule": Schedule.INTERLEAVED, "pp": pp, "vpp": vpp, "stage": stage, "num_microbatches": count}
    vectors = in_flight_chunk_vectors(**shape)
    assert {tuple(row) for row in vectors.tolist()} == walked
    assert int(vectors.sum(axis=1).max()) / vpp == float(np.asarray(in_flight_microbatches(**shape)))


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 200), pp=st.integers(1, 40))
def test_groups_are_legal_and_smallest(count: int, pp: int) -> None:
    def legal(size: int) -> bool:
        return pp <= size <= count and (count % size == 0 or count % size >= pp)

    group = int(interleave_group(count, pp))
    assert legal(group) if group else count < pp
    assert not any(legal(size) for size in range(1, group))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_table_prices_as_its_rows(data: st.DataObject) -> None:
    """Many plans of all schedules at once give what each gives alone."""
    rows = data.draw(st.integers(2, 6))
    shape = (rows, 4)
    seconds = st.lists(SECONDS, min_size=4 * rows, max_size=4 * rows)
    forward, backward = (np.array(data.draw(seconds)).reshape(shape) for _ in range(2))
    schedule = np.array(data.draw(st.lists(st.sampled_from(list(Schedule)), min_size=rows, max_size=rows)))
    count = np.array(data.draw(st.lists(st.integers(4, 20), min_size=rows, max_size=rows)))

    def price(rows: slice) -> np.ndarray:
        stages = StageTimes(
            forward_s=forward[rows],
            backward_s=backward[rows],
            weight_grad_s=backward[rows] / 2,
            run_length=np.ones_like(forward[rows], dtype=np.int64),
        )
        return makespan(stages=stages, schedule=schedule[rows], vpp=2, num_microbatches=count[rows], hop_s=0.01).total_s

    each = [price(slice(row, row + 1))[0] for row in range(rows)]
    assert price(slice(None)).tolist() == each
