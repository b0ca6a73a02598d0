"""Recorded runs speak for the device that they ran on, not for a file that borrows its name."""

from dataclasses import replace

import pytest

from ap_search.fidelity.expectation import expectation
from ap_search.spec.cluster import load_cluster
from ap_search.spec.profiles import load_software


def test_a_preset_has_the_band_of_its_runs() -> None:
    assert expectation(load_cluster("h100-sxm"), load_software("default"), moe=False).step_time is not None


@pytest.mark.parametrize(
    "change", [{"peak_bf16_flops_per_s": 7e14}, {"hbm_bytes_per_s": 2e12}, {"sustained_ratio": 0.5}]
)
def test_another_device_of_the_same_name_has_none(change: dict[str, float]) -> None:
    machine = replace(load_cluster("h100-sxm"), **change)
    found = expectation(machine, load_software("default"), moe=False)
    assert (found.step_time, found.memory) == (None, None)
    assert "not validated" in found.statement
