"""What people read: units, alignment, whole names, at most 120 columns."""

import math
import re
from dataclasses import replace

import pytest

from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Plan
from ap_search.report.layout import decimals_for, in_unit, name_lines, number, paragraph, side_by_side, table
from ap_search.report.listing import render_clusters, render_models, render_software
from ap_search.report.terminal import render_estimate, render_search, size
from ap_search.result import ClusterRow, SearchResult, SoftwareRow
from ap_search.result.fidelity import Expectation
from ap_search.spec.band import Band
from ap_search.units import GIB
from tests.unit.fake_answers import (
    CLUSTER,
    MEMORY_VIOLATION,
    MODEL,
    found,
    interleaved_plan,
    nothing,
    priced,
    search_summary,
    times,
)

ESCAPE = "\x1b["


def _search(result: SearchResult, width: int = 120) -> str:
    return render_search(result, width=width, styled=False)


def _estimate(result: SearchResult, width: int = 120) -> str:
    return render_estimate(result, width=width, styled=False)


def _row(text: str, start: str) -> list[str]:
    """Words of the first line that starts so, indentation left out."""
    return next(line for line in text.splitlines() if line.strip().startswith(start)).split()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12.3456, "12.35"), (0.0123456, "0.01235"), (1234567.0, "1,234,567"), (math.nan, "-"), (-2.5, "-2.500")],
)
def test_numbers_have_four_digits_and_thousands_separators(value, text):
    assert number(value) == text


def test_decimals_follow_from_the_reference():
    """12.3 with 4 digits has 4 - 2 = 2 decimals; 0.05 with 3 digits has 4."""
    assert decimals_for(12.3, 4) == 2
    assert decimals_for(0.05, 3) == 4
    assert decimals_for(1e-30, 4) == 7


def test_bytes_are_shown_as_gib_and_counts_as_they_are():
    assert in_unit(91.5 * GIB, "bytes") == "91.5 GiB"
    assert in_unit(0.25 * GIB, "bytes") == "0.250 GiB"
    assert in_unit(128.0, "heads") == "128 heads"
    assert in_unit(1.5, "") == "1.500"


def test_columns_are_aligned():
    lines = table(headers=[("name", "n")], rows=[("a", "1,000"), ("long name", "2")], left=(0,))
    assert lines == ["name           n", "---------  -----", "a          1,000", "long name      2"]


def test_blocks_stand_side_by_side_only_where_both_fit():
    assert side_by_side(["ab", "c"], ["d"], 9) == ["ab      d", "c"]
    assert side_by_side(["ab", "c"], ["d"], 8) == ["ab", "c", "", "d"]


def test_paragraphs_hang_under_their_first_word():
    assert paragraph("one two three", width=16, label="x") == ["  x        one", "           two", "           three"]


def test_long_names_are_cut_after_hyphens_only():
    assert name_lines("tp16-pp16-dp4", width=80, indent="  ") == ["  tp16-pp16-dp4"]
    assert name_lines("tp16-pp16-dp4", width=8, indent="  ") == ["  tp16-", "  pp16-", "  dp4"]


def test_header_says_what_was_asked_and_assumed():
    text = _search(found())
    assert "671.0 B parameters, 37.6 B active (+ 11.5 B in MTP modules)" in text
    assert "61 layers: 3 dense, 58 MoE with 256" in text
    assert "256 x made-up-cluster, 80.0 GiB each" in text
    assert "1,024 sequences (assumed) of 4,096 tokens, bf16 (assumed)" in text
    assert "80.0 GiB per device, 4.0 GiB of it reserved\n" in text
    assert "warning  sizes contradict the stated total" in text


def test_header_names_defaults_of_a_cluster_and_its_fits():
    cluster = replace(CLUSTER, assumed=("reserve_gib",), provenance=(("gemm", "calibrated"), ("dispatch", "default")))
    text = _search(found(cluster=cluster))
    assert re.search(r"^assumed +for the cluster: reserve_gib$", text, re.MULTILINE)
    assert re.search(r"^default +constants not fitted.*: dispatch$", text, re.MULTILINE)


def test_a_dense_model_has_no_experts_in_its_header():
    model = replace(MODEL, moe_layers=(), dense_layers=tuple(range(61)), num_experts=0, top_k=0, params_mtp=0)
    line = next(line for line in _search(found(model=model)).splitlines() if line.startswith("model"))
    assert line.endswith("37.6 B active; 61 layers: 61 dense, 0 MoE")


def test_ranking_shows_figures_with_units_and_the_whole_name():
    slower = priced(rank=2, step_time_s=12.3456, time=times(bubble_s=8.0, expert_s=4.3456))
    text = _search(found(priced(), slower))
    name = priced().name
    assert _row(text, "1 ") == [
        "1",
        "10.00",
        "1,638",
        "412.3",
        "41.7",
        "49.0",
        "of",
        "80.0",
        "experts",
        "40",
        "%",
        name,
    ]
    assert _row(text, "2 ")[:2] == ["2", "12.35"]
    assert _row(text, "2 ")[-4:] == ["bubble", "65", "%", name]
    assert _row(text, "#")[:6] == ["#", "s", "/device", "/device", "%", "GiB"]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_no_line_is_wider_than_the_page(width):
    plans = [priced(rank=rank, plan=interleaved_plan() if rank % 2 else None) for rank in range(1, 21)]
    lines = [line for result in (found(*plans), nothing()) for line in _search(result, width).splitlines()]
    assert max(map(len, lines)) <= min(width, 120)
    assert not any(line != line.rstrip() for line in lines)


def test_names_that_do_not_fit_stand_whole_below_their_figures():
    plan = priced(plan=interleaved_plan())
    lines = _search(found(plan)).splitlines()
    place = next(index for index, line in enumerate(lines) if line.startswith("1 "))
    assert lines[place + 1].strip() == plan.name


def test_time_lists_what_takes_time_the_longest_first():
    text = _search(found(priced(time=times(dispatch_s=1.0, expert_s=6.5, bubble_s=2.5))))
    block = text[text.index("time of the step, critical stage 0") :]
    assert [_row(block, label)[:3] for label in ("experts", "bubble", "dispatch", "step")] == [
        ["experts", "6.500", "65.0"],
        ["bubble", "2.500", "25.0"],
        ["dispatch", "1.000", "10.0"],
        ["step", "10.000", "100.0"],
    ]
    assert block.index("experts") < block.index("bubble") < block.index("dispatch")
    assert "router" not in block


def test_memory_lists_the_fullest_stage_against_the_limit():
    """49 of 80 GiB is 61.25 %, 20 GiB of activations are 25 %."""
    text = _search(found())
    assert "memory: stage 0, backward peak" in text
    assert re.search(r"activations +20\.00 +25\.0$", text, re.MULTILINE)
    assert re.search(r"peak +49\.00 +61\.[23]$", text, re.MULTILINE)
    assert re.search(r"limit +80\.00 +100\.0$", text, re.MULTILINE)
    assert not re.search(r"router +0", text)


def test_stages_with_equal_figures_share_a_row():
    text = _search(found())
    assert _row(text, "0 ")[:4] == ["0", "16", "8.00", "49.0"]
    assert _row(text, "1-2 ")[:4] == ["1-2", "15", "7.00", "39.0"]
    assert _row(text, "3 ")[-1] == "loss"


def test_stage_table_leaves_out_busy_seconds_that_are_unknown():
    text = _search(found(priced(stage_times_s=())))
    assert _row(text, "stage ")[:3] == ["stage", "layers", "GiB"]
    assert _row(text, "0 ")[:3] == ["0", "16", "49.0"]


def test_one_stage_has_no_stage_table():
    text = _search(found(priced(plan=Plan(dp=256, layout=layout_of([61], pp=1, vpp=1)))))
    assert "worst moment" not in text
    assert "memory: backward peak" in text
    assert "critical stage" not in text


def test_effective_values_are_named():
    text = " ".join(_search(found(priced(plan=interleaved_plan()))).split())
    assert "tp 2, cp 2, pp 2, vpp 2, dp 32, ep 16, etp 2, edp 4" in text
    assert "micro-batches of 2 sequences, 16 per replica and step" in text
    assert "recompute selective:core_attn+moe_act+layernorm, dispatcher hybridep, schedule interleaved" in text
    assert "sequence parallel on" in text
    assert "16+15x3 on the virtual stages" in text


def test_traffic_is_in_gib_and_leaves_out_what_is_not_sent():
    text = " ".join(_search(found()).split())
    assert "GiB per step by the busiest device: dispatch 800, combine 1,600, pp 1.00, dp 12.0" in text


def test_search_tells_how_far_it_went_and_how_sure_it_is():
    text = " ".join(_search(found()).split())
    assert "123,456 candidates, 12,345 priced, 2 feasible, in 1.23 s" in text
    assert "every legal plan was priced; no plan is faster than 9.500 s, the best plan is 5.3 % above it" in text


def test_without_a_bound_only_the_statement_is_told():
    optimality = replace(search_summary().optimality, lower_bound_s=None, gap_ratio=None)
    text = _search(found(search=search_summary(optimality=optimality)))
    assert "optimal  every legal plan was priced\n" in text


def test_rejections_are_grouped_by_rule_the_most_frequent_first():
    text = _search(found())
    memory, experts = text.index("3,456    memory.limit: a stage"), text.index("   12    experts.ep: experts")
    assert memory < experts
    assert "e.g. tp1-pp2\n" in text


def test_nothing_feasible_tells_nearest_plan_clash_levers_and_smallest_count():
    """The nearest plan: 29 + 62 = 91 of 80 GiB."""
    text = _search(nothing())
    assert "Nothing feasible: all 12,345 legal plans need more memory than a device has" in text
    assert "stage 0, backward peak: 91.0 of 80.0 GiB (11.0 GiB too many)" in text
    assert re.search(r"expert optimizer +6\.00$", text, re.MULTILINE)
    assert "experts.ep: experts must divide by ep" in text
    assert "recompute=full: -18.0 GiB on stage 0" in text
    assert "Smallest device count on which something fits: 48" in text
    assert "optimal" not in text


def test_estimate_tells_broken_rules_before_the_price():
    text = _estimate(found(priced(rank=0, feasible=False, violations=(MEMORY_VIOLATION,))))
    assert text.index("not feasible") < text.index("needs 91.5 GiB, allowed 80.0 GiB") < text.index("step 10.00 s")
    assert "recompute=full: -18.0 GiB on stage 0" in text


def test_estimate_of_a_feasible_plan_is_its_price_alone():
    text = _estimate(found(priced(rank=0)))
    assert "step 10.00 s, 1,638 tokens/s/device, 412.3 TFLOP/s/device, MFU 41.7 %, peak memory 49.0 of 80.0 GiB" in text
    assert "not feasible" not in text
    assert "candidates" not in text


def test_estimate_without_a_price_tells_the_reasons():
    memory = replace(priced().memory, stages=())
    plan = priced(feasible=False, step_time_s=math.nan, memory=memory, violations=(MEMORY_VIOLATION,))
    text = _estimate(found(plan))
    assert "memory.limit" in text
    assert "tp 1, cp 1, pp 4" in text
    assert "nan" not in text


def test_colours_only_where_asked():
    assert ESCAPE in render_search(found(), width=120, styled=True)
    assert ESCAPE not in render_search(found(), width=120, styled=False)


def test_brackets_in_names_are_not_markup():
    model = replace(MODEL, name="[bold]x[/bold]", warnings=("[red]",))
    text = render_search(found(model=model), width=120, styled=False)
    assert "[bold]x[/bold]" in text
    assert "[red]" in text


def test_models_are_listed_with_their_sizes():
    text = render_models([MODEL], width=120, styled=False)
    assert _row(text, "made-up-moe") == ["made-up-moe", "671.0", "B", "37.6", "B", "11.5", "B", "3", "58", "256", "8"]


def test_sizes_of_models_are_in_the_largest_unit_of_which_there_is_one():
    """999,994 K is a billion to three digits; a count below a thousand has no unit."""
    given = (512, 1_000, 460_864, 239_999, 999_994_000, 999_996_000, 7_248_023_552, 30_532_122_624, 671_026_419_200)
    texts = ["512", "1.00 K", "461 K", "240 K", "1.00 B", "1.00 B", "7.25 B", "30.5 B", "671.0 B"]
    assert [size(params) for params in given] == texts


def test_figures_per_device_say_whose_devices_they_are_of():
    """A plan of 256 devices in a job of 256 says nothing; in a job of 64 it does."""
    result = found()
    own = result.plans[0].plan
    count = own.dp * own.cp * own.tp * own.pp
    same = replace(result, cluster=replace(result.cluster, devices=count))
    other = replace(result, cluster=replace(result.cluster, devices=count // 4))
    assert "occupies" not in " ".join(render_estimate(same, width=120, styled=False).split())
    said = f"per device of the {count:,} that this plan occupies, not of the job's {count // 4:,}"
    assert said in " ".join(render_estimate(other, width=120, styled=False).split())


def test_clusters_are_listed_in_their_usual_units():
    """900e9 bytes/s are 900 GB/s; 50e9 bytes/s are 400 Gbit/s."""
    row = ClusterRow(
        name="h",
        device="H100",
        memory_bytes=80 * GIB,
        peak_bf16_flops_per_s=989e12,
        devices_per_domain=8,
        scale_up_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
        sources=21,
    )
    text = render_clusters([row], width=120, styled=False)
    assert _row(text, "h ") == ["h", "H100", "80.0", "989", "8", "450", "400", "21"]


def test_software_profiles_are_listed_with_their_descriptions():
    text = render_software([SoftwareRow(name="default", description="what a trainer does")], width=120, styled=False)
    assert text == "default\n  what a trainer does\n"


def test_answers_say_what_to_expect_and_where_figures_are_from():
    band = Band(rows=12, median_ratio=1.0, p10_ratio=0.9, p90_ratio=1.2)
    origins = (("step_time", "derived"), ("memory", "analytic"), ("flops", "analytic"))
    expected = Expectation(
        hardware="x", kind="moe", step_time=band, memory=None, date="2026", provenance=origins, statement="time: so"
    )
    result = replace(found(), fidelity=expected)
    seconds = result.plans[0].step_time_s
    ends = f"{number(0.9 * seconds)} to {number(1.2 * seconds)} s"
    assert f"expect   the first plan's step from {ends}; time: so" in _search(result)
    assert "origin   step time: derived; memory, flops: analytic" in _search(result)
    unknown = replace(found(), fidelity=replace(expected, step_time=None))
    assert "expect   time: so" in _search(unknown)
    assert unknown.step_time_band_s(unknown.plans[0]) is None
    assert "expect" not in _search(found())
