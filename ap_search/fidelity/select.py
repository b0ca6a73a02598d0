"""Which recorded runs a call looks at."""

from collections.abc import Iterable
from dataclasses import dataclass

from ap_search.spec.run import Run, RunLabel, UnusableRun

ONLY = ("moe", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Wishes on runs; an empty one wishes nothing. Texts match any part of a word, in any case.

    `hardware` matches the cluster or the source's words for the device, `only` is `moe` or `dense`.
    """

    quality: tuple[str, ...] = ()
    hardware: str = ""
    group: str = ""
    only: str = ""
    source: str = ""

    def wants(self, label: RunLabel) -> bool:
        """Whether a run is one of those."""
        return (
            (not self.quality or label.quality in self.quality)
            and _within(self.hardware, f"{label.hardware} {label.device}")
            and _within(self.group, label.group)
            and (not self.only or label.moe == (self.only == "moe"))
            and _within(self.source, label.source)
        )


def _within(wanted: str, text: str) -> bool:
    """Whether a word stands in a text, in any case."""
    return wanted.lower() in text.lower()


def select(runs: Iterable[Run | UnusableRun], selection: Selection) -> tuple[Run | UnusableRun, ...]:
    """Keep the runs that a call asks for, in their order."""
    return tuple(run for run in runs if selection.wants(run.label))
