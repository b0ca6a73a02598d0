"""The bands that answers show are those of the runs that ship, today."""

import pytest
import yaml

from ap_search import estimate, validate
from ap_search.errors import SpecError
from ap_search.fidelity.bands import bands_of
from ap_search.fidelity.statistics import summarise
from ap_search.spec.bands import load_bands
from tests.regression import bands
from tests.regression.fidelity import COMMAND

# Ratios: what a rounding or another processor may move.
SLACK = 0.005
JOB = {"model": "llama-3.1-8b", "devices": 8, "plan": "tp=2"}


@pytest.fixture(scope="module")
def own():
    return validate()


def test_the_bands_are_those_of_today(own):
    committed = yaml.safe_load(bands.FILE.read_text(encoding="utf-8"))
    now = yaml.safe_load(bands.written(bands_of(own), committed["date"]))
    assert len(committed["bands"]) == len(now["bands"]), f"rewritten by {COMMAND}"
    for old, new in zip(committed["bands"], now["bands"], strict=True):
        assert old.keys() == new.keys()
        for what in ("step_time", "memory"):
            assert old.get(what) == pytest.approx(new.get(what), abs=SLACK), (
                old["hardware"],
                f"rewritten by {COMMAND}",
            )


def test_a_band_is_measured_over_predicted(own):
    rows = [row for row in own.rows if row.step_error_ratio is not None][:1]
    ((_, _, time, _),) = bands_of(summarise(rows))
    ratio = rows[0].measured_step_time_s / rows[0].predicted_step_time_s
    assert (time.rows, time.median_ratio) == (1, pytest.approx(ratio, abs=1e-4))


def test_an_answer_carries_the_band_of_its_machine_and_kind():
    answer = estimate(**JOB).to_json()
    entry = next(each for each in load_bands().bands if (each.hardware, each.kind) == ("h100-sxm", "dense"))
    assert answer["fidelity"]["step_time"] == entry.step_time.model_dump()
    (plan,) = answer["plans"]
    low, high = plan["step_time_band_s"]
    assert low == pytest.approx(plan["step_time_s"] * entry.step_time.p10_ratio)
    assert high == pytest.approx(plan["step_time_s"] * entry.step_time.p90_ratio)
    assert answer["fidelity"]["provenance"] == {
        "step_time": "calibrated",
        "memory": "analytic",
        "traffic": "analytic",
        "flops": "analytic",
    }


@pytest.mark.parametrize(
    ("cluster", "words"), [("mi300x", "no recorded dense runs"), ("a100-40-sxm", "only 4 recorded")]
)
def test_a_machine_that_few_runs_validate_is_named(cluster, words):
    result = estimate(**JOB, cluster=cluster)
    assert words in result.fidelity.statement
    assert result.fidelity.step_time is None
    assert result.to_json()["plans"][0]["step_time_band_s"] is None
    assert dict(result.fidelity.provenance)["step_time"] in ("default", "derived", "calibrated")


def test_a_file_of_bands_is_checked(tmp_path):
    file = tmp_path / "bands.yaml"
    band = {"rows": 5, "median_ratio": 1.0, "p10_ratio": 1.1, "p90_ratio": 1.2}
    entry = {"hardware": "x", "kind": "dense", "step_time": band}
    file.write_text(yaml.safe_dump({"date": "2026", "source": "s", "bands": [entry]}), encoding="utf-8")
    with pytest.raises(SpecError, match="ascend"):
        load_bands(file)
