"""What is adopted: the better of two ways, and only where neither median error nor order gets worse."""

import pytest

from ap_search.calibration.judge import choose
from ap_search.calibration.records import CrossValidation, Fidelity
from ap_search.fidelity.records import ErrorStats


def of(median, p90, spearman=0.9):
    stats = ErrorStats(rows=20, bias_ratio=0.0, median_abs_error_ratio=median, p90_abs_error_ratio=p90)
    return Fidelity(step=stats, spearman=spearman)


@pytest.mark.parametrize(
    ("level", "full", "chosen"),
    [
        (of(0.08, 0.25), of(0.05, 0.15), "full"),
        (of(0.053, 0.283), of(0.063, 0.147), "full"),  # a tail cut in half outweighs a point of the median
        (of(0.05, 0.15), of(0.05, 0.15), "level"),  # as good: the simpler
        (of(0.08, 0.25), of(0.05, 0.15, 0.8), "level"),  # the order would get worse
        (of(0.12, 0.1), of(0.11, 0.1), "none"),  # the median would get worse, whatever the tail
        (of(0.1, 0.1), of(0.1, 0.1), "none"),  # no better
        (of(0.05, 0.1, 0.7), of(0.05, 0.1, 0.7), "none"),
    ],
)
def test_choice(level, full, chosen):
    found = CrossValidation(leave_out="group", units=4, before=of(0.1, 0.3), level=level, full=full)
    assert choose(found)[0] == chosen


def test_groups_that_are_no_ranking_have_no_order_to_lose():
    ways = {"before": of(0.1, 0.3, None), "level": of(0.05, 0.2, None), "full": of(0.06, 0.2, None)}
    assert choose(CrossValidation(leave_out="source", units=2, **ways)) == (
        "level",
        "the median error on each source left out falls from 10.0 % to 5.0 %",
    )


def test_one_unit_sets_the_level():
    assert choose(None)[0] == "level"
