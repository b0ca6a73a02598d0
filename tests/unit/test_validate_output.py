"""What validation prints and writes: terminal, JSON, plot, Markdown; exit codes and bad flags."""

import json
import re
from xml.etree import ElementTree

import pytest
import yaml

from ap_search import validate
from ap_search.cli import main

RUN = {"model": "llama-3.1-8b", "devices": 8, "plan": "tp=2,pp=2", "global_batch": 64, "seq_len": 4096}


@pytest.fixture
def write(tmp_path):
    """Write runs to a file and return its path."""

    def written(*runs, **defaults):
        file = tmp_path / "runs.yaml"
        rows = [{"id": f"r{number}", **run} for number, run in enumerate(runs)]
        file.write_text(yaml.safe_dump({"defaults": RUN | defaults, "runs": rows}), encoding="utf-8")
        return file

    return written


def test_json_has_the_documented_keys(write):
    answer = validate([write({"measured": {"step_time_s": 1.0}}, {"plan": "tp=3"})]).to_json()
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    wanted = "id status reason measured_step_time_s predicted_step_time_s step_error_ratio measured_peak_bytes"
    wanted += " predicted_peak_bytes memory_error_ratio limit_bytes assumed software"
    assert set(wanted.split()) <= set(answer["rows"][0])
    assert set(answer["rows"][0]) == set(answer["rows"][1])
    wanted = "priced refused skipped step_median_abs_error_ratio step_p90_abs_error_ratio memory_median_abs_error_ratio"
    assert set(wanted.split()) <= set(answer["summary"])
    assert (answer["summary"]["priced"], answer["summary"]["refused"]) == (1, 1)
    assert {"schema_version", "groups", "per_source", "per_hardware", "per_kind", "per_software"} <= set(answer)


def test_groups_in_json(write):
    rows = [{"plan": f"tp={tp}", "measured": {"step_time_s": float(tp)}} for tp in (1, 2, 4, 8)]
    (group,) = validate([write(*rows, group="g")]).to_json()["groups"]
    assert {"group", "rows", "spearman", "top1_regret_ratio"} <= set(group)


def test_the_command_line_prints_runs_and_summary(write, capsys):
    file = str(write({"measured": {"step_time_s": 1.0}}, {"plan": "tp=3"}, {"oom": True}))
    assert main(["validate", file]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^r0 +1\.000 ", out, re.MULTILINE)
    assert "1 refused, such as r1: heads_tp:" in out
    assert "out of memory" in out
    assert "2 of 3 priced (66.7 %), 1 refused, 0 skipped" in out
    assert max(map(len, out.splitlines())) <= 120
    assert main(["validate", file, "--summary"]) == 0
    assert not re.search(r"^r0 ", capsys.readouterr().out, re.MULTILINE)


def test_nothing_priced_is_exit_code_1(write, capsys):
    assert main(["validate", str(write({"plan": "tp=3"}))]) == 1
    assert "0 of 1 priced" in capsys.readouterr().out


def test_json_alone_on_stdout(write, capsys):
    assert main(["validate", str(write({})), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["priced"] == 1


def test_template_and_bad_flags(write, capsys):
    assert main(["validate", "--template"]) == 0
    assert "runs:" in capsys.readouterr().out
    assert main(["validate", str(write({})), "--only", "sparse", "--devices", "8", "--seq-len", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["--devices", "--seq-len", "--only", "--seq-len"]
    assert main(["validate", "--megatron-log", "x.log", "--quality", "A"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["--quality", "--model", "--devices", "--plan"]


def test_the_plot_needs_nothing_beside_itself(write, tmp_path):
    """Well-formed drawings, one mark per run and figure, no address to fetch, names of users escaped."""
    runs = [
        {"id": '<b>"x"&', "measured": {"step_time_s": 2.0}, "memory": {"peak_gib": 30.0}},
        {"id": "moe", "model": "toy-moe", "plan": "ep=2", "measured": {"step_time_s": 0.02}},
        {"id": "dead", "oom": True, "measured": {"step_time_s": 9.0}},
    ]
    page = tmp_path / "runs.html"
    assert main(["validate", str(write(*runs)), "--plot", str(page), "--summary"]) == 0
    text = page.read_text(encoding="utf-8")
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 2
    marks = [len(re.findall(r"data-tip=", drawing)) for drawing in drawings]
    assert marks == [2, 1]
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert not re.search(r"(src|href)=|https?://", text)
    assert "<b>" not in text


def test_tables_as_markdown(write, tmp_path):
    page = tmp_path / "tables.md"
    file = str(write({"measured": {"step_time_s": 1.0}, "source": "mine; p. 3"}, {"plan": "tp=3"}))
    assert main(["validate", file, "--markdown", str(page), "--summary"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "| mine | 1 | 1 |" in text
    assert "1 of 2 runs priced (50.0 %), 1 refused, 0 skipped." in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)
