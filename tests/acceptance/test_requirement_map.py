"""The table "Requirements, line by line" names tests, rules and flags that exist."""

import re
from pathlib import Path

from ap_search.cli_flags import JOB_FLAGS
from ap_search.search.rules import MEMORY_LIMIT_ID, RULES

ROOT = Path(__file__).resolve().parents[2]


def _table() -> list[tuple[str, str]]:
    """Rows of the table: a line of a requirement, and what shows it."""
    page = (ROOT / "docs" / "ep-modelling.md").read_text(encoding="utf-8")
    section = page.split("## Requirements, line by line\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (00[12], .*?) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) > 20
    return rows


def test_every_named_test_exists() -> None:
    """`AP-EP-nn`, a file, or a file and a function."""
    acceptance = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "acceptance").glob("test_ap_ep*.py"))
    for line, shown in _table():
        for number in re.findall(r"AP-EP-(\d\d)", shown):
            assert f"def test_ap_ep_{number}_" in acceptance, line
            for ids in re.findall(rf"AP-EP-{number}, ids? ([0-9a-z, ]+)", shown):
                for one in re.findall(r"\b0\d\b", ids):
                    assert f"def test_ap_ep_{number}_{one}_" in acceptance, f"{line}: {number}-{one}"
        for path, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown):
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in text, f"{line}: {path}::{function}"


def test_every_named_rule_and_flag_exists() -> None:
    known = {rule.id for rule in RULES} | {MEMORY_LIMIT_ID}
    flags = {flag for flag, *_ in JOB_FLAGS}
    for line, shown in _table():
        for words in re.findall(r"\brules? ((?:`\w+`(?:, )?)+)", shown):
            assert set(re.findall(r"`(\w+)`", words)) <= known, line
        assert set(re.findall(r"`(--[a-z-]+)`", shown)) <= flags, line


def test_every_acceptance_id_is_in_the_table() -> None:
    shown = " ".join(text for _, text in _table())
    assert set(re.findall(r"AP-EP-(\d\d)", shown)) == {f"0{number}" for number in range(1, 8)}
