"""Errors on the recorded runs that ship may not get worse than the committed ones.

A worse figure may be right: then rewrite the file by the command and say in docs/changelog.md why
(docs/guides/regression.md).
"""

from tests.regression.fidelity import COMMAND, changes, measured_now, recorded


def test_no_error_got_worse() -> None:
    before = recorded()
    assert before, f"fidelity.yaml is missing: {COMMAND}"
    worse = [line for got_worse, line in changes(before, measured_now()) if got_worse]
    assert not worse, "\n".join([f"rewritten by {COMMAND}:", *worse])


def test_the_comparison_sees_what_got_worse() -> None:
    before = {"all": {"coverage": 100.0, "time_median": 10.0}, "groups": {"g": {"spearman": 0.9, "regret": 0.0}}}
    same = {"all": {"coverage": 99.95, "time_median": 10.05}, "groups": {"g": {"spearman": 0.898, "regret": 0.05}}}
    worse = {"all": {"coverage": 98.0, "time_median": 12.0}, "groups": {"h": {"spearman": 1.0, "regret": 0.0}}}
    better = {"all": {"coverage": 100.0, "time_median": 8.0}, "groups": {"g": {"spearman": 1.0, "regret": 0.0}}}
    assert list(changes(before, same)) == []
    assert list(changes(before, worse)) == [
        (True, "all.coverage: 100 -> 98"),
        (True, "all.time_median: 10 -> 12"),
        (True, "groups.g.spearman: 0.9 -> gone"),
        (True, "groups.g.regret: 0 -> gone"),
        (False, "groups.h.spearman: new, 1"),
        (False, "groups.h.regret: new, 0"),
    ]
    assert list(changes(before, better)) == [
        (False, "all.time_median: 10 -> 8"),
        (False, "groups.g.spearman: 0.9 -> 1"),
    ]
