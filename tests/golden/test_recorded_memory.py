"""Recorded peaks of each stack whose kept tensors are modelled, within what its operators leave open.

The rows and their sources: `data/memory_runs.yaml` (Megatron-LM's functional tests) and configs/runs.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from ap_search import validate
from ap_search.fidelity.records import RowResult

TESTS = Path(__file__).parent / "data" / "memory_runs.yaml"


@pytest.fixture(scope="module")
def shipped() -> tuple[RowResult, ...]:
    return validate().rows


def errors(rows: Iterable[RowResult]) -> dict[str, float]:
    """Predicted over measured bytes, minus 1, by run."""
    known = {row.label.id: row.memory_error_ratio for row in rows}
    return {name: error for name, error in known.items() if error is not None}


@pytest.mark.parametrize("row", validate([TESTS]).rows, ids=lambda row: row.label.id)
def test_peaks_of_megatron_functional_tests(row: RowResult) -> None:
    """Fused and unfused attention, dropout, recomputation, pipelines, experts: each within 4.5 % of its peak."""
    assert row.memory_error_ratio == pytest.approx(0.0, abs=0.045)


def test_unfused_scores_are_what_separates_two_tests() -> None:
    """The same job with and without fused attention: 1.83 GiB more are recorded, 12 layers x 5 a s^2 b = 1.88 GiB."""
    by_name = {row.label.id: row for row in validate([TESTS]).rows}
    unfused = by_name["gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files"].memory[0]
    fused = by_name["gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer"].memory[0]
    predicted = unfused.predicted_bytes - fused.predicted_bytes
    assert predicted == pytest.approx(unfused.measured_bytes - fused.measured_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("source", "software", "rows", "largest", "median"),
    [
        ("Zero Bubble", "megatron-2023", 6, 0.07, 0.04),
        ("BigScience", "megatron-deepspeed", 20, 0.13, 0.06),
        ("llama3-8b_h200_202506", "torchtitan", 2, 0.03, 0.03),
        ("PithTrain", "torchtitan", 1, 0.03, 0.03),
        ("SimuMax", "default", 37, 0.07, 0.03),
    ],
)
def test_peaks_of_a_stack(
    shipped: tuple[RowResult, ...], source: str, software: str, rows: int, largest: float, median: float
) -> None:
    """Each stack keeps what its code keeps; no row of it is further off than `largest`."""
    found = [row for row in shipped if source in row.label.source]
    assert {row.software for row in found} == {software}
    sizes = sorted(abs(error) for error in errors(found).values())
    assert len(sizes) >= rows
    assert sizes[-1] <= largest
    assert sizes[len(sizes) // 2] <= median


def test_peaks_of_nanotron(shipped: tuple[RowResult, ...]) -> None:
    """One stage without tp is within 11 %; tp adds what depends on a setting that the source does not state."""
    plans = ((row, row.plan) for row in shipped if row.software == "nanotron")
    found = [row for row, plan in plans if plan is not None and plan.tp == plan.pp == 1]
    sizes = sorted(abs(error) for error in errors(found).values())
    assert len(sizes) >= 3
    assert sizes[-1] <= 0.11


def test_a_schedule_priced_as_another_compares_no_memory(shipped: tuple[RowResult, ...]) -> None:
    """ZB-2p keeps twice the micro-batches of ZB-H1, as which its time is priced."""
    found = [row for row in shipped if any(line.startswith("schedule:") for line in row.assumed)]
    assert found
    assert all(row.memory == () for row in found)
