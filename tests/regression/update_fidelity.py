"""Rewrite the committed errors, the bands of errors that answers show, and the tables of docs/fidelity.md.

`python -m tests.regression.update_fidelity`

Files of runs that are named besides, `update_fidelity more-runs.jsonl`, get tables of their own on the page. Where the
best measured plans stand is worked out for groups of MoE models: a search each.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from ap_search import validate
from ap_search.fidelity.bands import bands_of
from ap_search.fidelity.records import ValidationResult
from ap_search.report.validation_markdown import markdown_tables
from tests.regression import bands
from tests.regression.fidelity import FILE, changes, recorded, snapshot, written

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fidelity.md"
QUALITY = "A,B"
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def main(files: Sequence[str]) -> int:
    """Validate, say what changed, rewrite."""
    own = validate()
    now = snapshot(own)
    found = list(changes(recorded(), now))
    for worse, line in found:
        print(f"{'worse' if worse else 'better'}  {line}")
    FILE.write_text(written(now), encoding="utf-8")
    today = date.today().isoformat()
    bands.FILE.write_text(bands.written(bands_of(own), today), encoding="utf-8")
    parts = [_tables("The sets that ship", own, [], date=today)]
    for name in files:
        parts.append(_tables(Path(name).name, validate([name], quality=QUALITY), [name], date=today))
    _rewrite_page("\n".join(parts))
    if any(worse for worse, _ in found):
        print("Say in docs/changelog.md what got worse, and why that is right.")
    return 0


def _tables(title: str, result: ValidationResult, files: Sequence[str], *, date: str) -> str:
    """Write one section: all tables, those of best plans for MoE groups."""
    best = validate(files, quality=QUALITY if files else None, only="moe", best_plans=True).best_plans
    command = " ".join(["ap-search validate", *(f"{Path(name).name} --quality {QUALITY}" for name in files)])
    commands = f"{command}` and, for the best plans, `{command} --only moe --best-plans"
    return f"### {title}\n\n{markdown_tables(replace(result, best_plans=best), date=date, command=commands)}"


def _rewrite_page(tables: str) -> None:
    """Put the tables between their marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
