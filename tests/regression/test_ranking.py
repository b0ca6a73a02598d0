"""Our own ranking of every model preset at two device counts is the committed one.

A difference is no fault by itself: the cost model may have become better. Then rewrite the files by the command and say
in docs/changelog.md what moved (docs/guides/regression.md).
"""

import pytest

from ap_search.spec.presets import preset_names
from tests.regression.snapshot import CASES, COMMAND, DEVICES, FOLDER, differences, file_of, recorded, snapshot


@pytest.mark.parametrize(("model", "devices"), CASES)
def test_the_ranking_is_the_committed_one(model: str, devices: int) -> None:
    expected = recorded(model, devices)
    assert expected is not None, f"{file_of(model, devices).name} is missing: {COMMAND}"
    found = list(differences(expected, snapshot(model, devices)))
    assert not found, "\n".join([f"{model} on {devices} devices; rewritten by {COMMAND}:", *found])


def test_every_preset_is_watched_at_two_device_counts() -> None:
    assert set(DEVICES) == set(preset_names("models"))
    assert all(len(set(counts)) == 2 for counts in DEVICES.values())


def test_no_file_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {file_of(*case).name for case in CASES}


def test_the_comparison_sees_what_moves() -> None:
    before = {
        "plans": [{"name": "a", "step_time_s": 10.0}, {"name": "b", "step_time_s": 11.0}],
        "best": {"moment": "x"},
    }
    after = {"plans": [{"name": "c", "step_time_s": 10.1}], "best": {"moment": "x", "stage": 1}}
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [
        "plans[0].name: a -> c",
        "plans[0].step_time_s: 10.0 -> 10.1 (+1.00%)",
        "plans[1]: {'name': 'b', 'step_time_s': 11.0} -> None",
        "best.stage: None -> 1",
    ]


def test_rounding_is_no_difference_and_the_fifth_digit_is() -> None:
    assert list(differences({"x": 1.00000}, {"x": 1.00001})) == []
    assert list(differences({"x": 1.0000}, {"x": 1.0001})) != []
    assert list(differences({"x": 0.0}, {"x": 1e-6})) != []
