"""Where the best measured plan of a group stands: its rank is that of a search with the same job and `--set`."""

import pytest
import yaml

from ap_search import estimate, search, validate
from ap_search.cli import main
from ap_search.limits import MAX_TOP

JOB = {"model": "toy-moe", "devices": 8, "global_batch": 64, "seq_len": 4096}
# Measured seconds by plan: in prediction others are faster, and the fastest of these is not the first.
BEST = "ep=4,mbs=4,recompute=full"
PLANS = {BEST: 1.0, "ep=8,mbs=8": 2.0, "pp=2,ep=4,mbs=8": 3.0, "tp=2,ep=4,mbs=8": 4.0}


@pytest.fixture
def write(tmp_path):
    """Write a group of runs to a file and return its path."""

    def written(plans, **job):
        file = tmp_path / "runs.yaml"
        rows = [
            {"id": f"r{number}", "plan": plan, "measured": {"step_time_s": seconds}}
            for number, (plan, seconds) in enumerate(plans.items())
        ]
        file.write_text(yaml.safe_dump({"defaults": JOB | {"group": "g"} | job, "runs": rows}), encoding="utf-8")
        return file

    return written


def standings(file):
    (best,) = validate([file], best_plans=True).best_plans
    return best, {place.space.value: place for place in best.standings}


def test_ranks_are_those_of_a_search(write):
    """All plans that a search lists before it, for each `--set`; `held` has what all four agree in, `tried` lists."""
    best, places = standings(write(PLANS))
    priced = estimate(**JOB, plan=BEST).plans[0]
    assert (best.group, best.run, best.plan, best.fits) == ("g", "r0", priced.name, True)
    assert best.predicted_step_time_s == pytest.approx(priced.step_time_s)
    assert "mbs=4,8" in places["tried"].kept and "pp=1,2" in places["tried"].kept
    assert "vpp=1" in places["held"].kept and not any(text.startswith("mbs") for text in places["held"].kept)
    assert places["all"].kept == ()
    for place in places.values():
        found = search(**JOB, set=place.kept, top=MAX_TOP)
        before = [plan for plan in found.plans if plan.step_time_s < priced.step_time_s]
        assert 1 < place.rank == len(before) + 1 < MAX_TOP
        assert place.feasible == found.search.feasible
        assert place.first == found.plans[0].name
        assert place.lead_ratio == pytest.approx(priced.step_time_s / found.plans[0].step_time_s - 1)


def test_what_is_left_of_the_lead_is_that_of_a_search_which_keeps_the_knob(write):
    """Each knob that is named leaves less than the whole; of the others each leaves all of it."""
    best, places = standings(write(PLANS))
    left = dict(places["all"].left)
    assert left
    own = {"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "ep": 4, "mbs": 4, "recompute": "full"}
    for knob, value in own.items():
        first = search(**JOB, set={knob: value}, top=1).plans[0].step_time_s
        lead = max(0.0, best.predicted_step_time_s / first - 1)
        assert left.get(knob, places["all"].lead_ratio) == pytest.approx(lead), knob
    assert list(left.values()) == sorted(left.values())
    assert all(lead < places["all"].lead_ratio for lead in left.values())


def test_a_plan_with_a_layout_of_its_own_is_not_displaced_by_itself(write):
    """Stages of 3 and 1 layers are slower than 2 and 2, which is the same plan; it stands for it, and counts once."""
    uneven = {plan: 9.0 for plan in ("pp=2,ep=2", "pp=2,ep=2,mbs=2", "pp=2,ep=2,mbs=4")}
    layers = search(**JOB, set={"pp": 2, "ep": 2}, top=1).model.num_layers
    lopsided = f"pp=2,ep=2,stage_layers={layers - 1}+1"
    _, places = standings(write({lopsided: 1.0, **uneven}))
    place = places["tried"]
    found = search(**JOB, set=place.kept, top=MAX_TOP)
    slow = estimate(**JOB, plan=lopsided).plans[0].step_time_s
    twin = estimate(**JOB, plan="pp=2,ep=2").plans[0]
    before = [plan.name for plan in found.plans if plan.step_time_s < slow]
    assert twin.name in before
    assert place.rank == len(before)
    assert place.feasible == found.search.feasible


def test_a_plan_outside_the_candidates_counts_as_one_more(write):
    """Nobody proposes sharding none; a search without it has one feasible plan fewer."""
    plans = {plan + ",sharding=none": seconds for plan, seconds in PLANS.items()}
    best, places = standings(write(plans))
    assert "-none-" in best.plan
    assert places["all"].feasible == search(**JOB, top=1).search.feasible + 1
    assert places["held"].feasible == search(**JOB, set=places["held"].kept, top=1).search.feasible


def test_the_profile_of_the_call_is_the_one_that_is_searched_with(write):
    """Else the measured plan and its rivals would be priced for different software."""
    file = write(PLANS)
    (best,) = validate([file], software="megatron-core", best_plans=True).best_plans
    first = search(**JOB, software="megatron-core", top=1).plans[0]
    assert best.standings[0].first == first.name
    assert best.predicted_step_time_s == pytest.approx(
        estimate(**JOB, software="megatron-core", plan=BEST).plans[0].step_time_s
    )


def test_the_flag_prints_and_writes_the_places(write, tmp_path, capsys):
    """Terminal, Markdown and JSON say the same; without the flag there is none of it."""
    file, page = str(write(PLANS)), tmp_path / "tables.md"
    best, places = standings(file)
    assert main(["validate", file, "--best-plans", "--markdown", str(page)]) == 0
    out = capsys.readouterr().out
    for place in places.values():
        assert f"{place.space.value:<8}  rank {place.rank:,} of {place.feasible:,}, lead" in out
    assert "left where kept: " in out and max(map(len, out.splitlines())) <= 120
    text = page.read_text(encoding="utf-8")
    ranks = " | ".join(f"{place.rank:,} of {place.feasible:,}" for place in places.values())
    assert f"| g | {best.plan} | {ranks} |" in text
    assert "--best-plans`" in text
    (entry,) = validate([file], best_plans=True).to_json()["best_plans"]
    assert [place["space"] for place in entry["standings"]] == ["all", "held", "tried"]
    assert entry["standings"][0]["left"] == dict(places["all"].left)
    assert main(["validate", file, "--summary"]) == 0
    assert "best measured plans" not in capsys.readouterr().out
    assert validate([file]).to_json()["best_plans"] == []


def test_a_log_is_no_group(capsys):
    """One run cannot be ranked: said, not ignored."""
    assert main(["validate", "--megatron-log", "x.log", "--best-plans"]) == 2
    assert "--best-plans: has no effect on a log" in capsys.readouterr().err
