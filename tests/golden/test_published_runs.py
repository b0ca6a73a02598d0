"""The published runs beside the checkout: nearly all have a price, and no rule calls a plan impossible that ran."""

import os
from collections import Counter
from pathlib import Path

import pytest

from ap_search import validate
from ap_search.fidelity.records import Status, ValidationResult

SHARED = Path(os.environ.get("AP_SEARCH_SHARED", Path(__file__).resolve().parents[3] / "shared"))
RUNS = SHARED / "data" / "published_runs.jsonl"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not RUNS.is_file(), reason="no published runs beside the checkout"),
]


@pytest.fixture(scope="module")
def result() -> ValidationResult:
    return validate([RUNS], quality="A,B")


def test_nine_of_ten_rows_have_a_price(result: ValidationResult) -> None:
    assert result.summary.coverage_ratio >= 0.9


def test_no_plan_that_ran_breaks_a_rule(result: ValidationResult) -> None:
    broken = Counter(
        row.reason.split(":")[0]
        for row in result.rows
        if row.status is Status.REFUSED and row.run is not None and not row.ended_early
    )
    assert not broken


def test_what_is_assumed_is_said(result: ValidationResult) -> None:
    """Hundreds of rows lack a field; each says which."""
    assert dict(result.summary.assumed)["recompute"] > 100
    assert all(":" in line for row in result.rows for line in row.assumed)
