"""What validation found: one record per run, statistics of errors, groups that were ranked."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ap_search.fidelity.json import validation_json
from ap_search.plan.plan import Plan
from ap_search.result import TimeBreakdown
from ap_search.spec.run import MemoryKind, MemoryStage, Run, RunLabel


class Status(StrEnum):
    """Whether a run has a price; refused by a rule or a reader, or skipped for want of a field."""

    PRICED = "priced"
    REFUSED = "refused"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    """One measured peak and what is predicted for the same stage and kind, bytes.

    `stages` has (stage, measured, predicted) where the run names its stages.
    """

    kind: MemoryKind
    stage: MemoryStage
    measured_bytes: int
    predicted_bytes: float
    stages: tuple[tuple[int, int, float], ...] = ()

    @property
    def error_ratio(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One recorded run, measured and predicted.

    `run` and `plan` are None where the row could not be read or its plan not priced. `fullest_bytes` is the fullest
    stage with the reserve, `limit_bytes` what a device holds.
    """

    label: RunLabel
    status: Status
    reason: str = ""
    run: Run | None = None
    plan: Plan | None = None
    plan_name: str = ""
    software: str = ""
    assumed: tuple[str, ...] = ()
    measured_step_time_s: float | None = None
    predicted_step_time_s: float | None = None
    time: TimeBreakdown | None = None
    memory: tuple[MemoryComparison, ...] = ()
    fullest_bytes: float | None = None
    limit_bytes: int | None = None

    @property
    def step_error_ratio(self) -> float | None:
        """Predicted over measured seconds of a step, minus 1; None where one of them is unknown."""
        if self.measured_step_time_s is None or self.predicted_step_time_s is None:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    @property
    def memory_error_ratio(self) -> float | None:
        """Predicted over measured bytes of the reading that stands for the run, minus 1."""
        return self.memory[0].error_ratio if self.memory and not self.ended_early else None

    @property
    def ended_early(self) -> bool:
        """Whether the run ended for want of memory or for an unknown reason, so that its figures are not a step's."""
        return self.run is not None and (self.run.measured.oom or self.run.measured.failed)

    @property
    def room_ratio(self) -> float | None:
        """Share of a device's memory that the prediction leaves free; negative where it needs more than there is."""
        if self.fullest_bytes is None or self.limit_bytes is None:
            return None
        return 1 - self.fullest_bytes / self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStats:
    """Statistics of `predicted / measured - 1` over some runs."""

    rows: int
    bias_ratio: float
    median_abs_error_ratio: float
    p90_abs_error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Errors of the runs that share a source, a cluster, a kind of model or a software profile."""

    name: str
    rows: int
    step: ErrorStats | None
    memory: ErrorStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup:
    """Order inside a group of plans for one job: rank correlation, and what trusting the prediction costs.

    `chosen` and `fastest` are the runs of the plan that ranks first in prediction, and in measurement.
    """

    group: str
    hardware: str
    moe: bool
    rows: int
    plans: int
    spearman: float
    top1_regret_ratio: float
    chosen: str
    fastest: str


class Space(StrEnum):
    """Which plans a measured one is ranked among: all; axes and knobs held where its group's runs agree; as tried."""

    ALL = "all"
    HELD = "held"
    TRIED = "tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Place of a measured plan among the feasible plans of a search, itself included, from 1.

    `kept` is the search's `--set`, `first` the name of the plan that ranks first. `lead_ratio` is what the measured
    plan is predicted to take longer than that one; `left` the same where one knob keeps the measured plan's value, for
    each knob that makes a difference, the largest difference first.
    """

    space: Space
    kept: tuple[str, ...]
    rank: int
    feasible: int
    first: str
    lead_ratio: float
    left: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The plan that was measured to be the fastest of its group, and where the search puts it.

    `fits` says whether it is predicted to fit, seconds are predicted.
    """

    group: str
    moe: bool
    run: str
    plan: str
    predicted_step_time_s: float
    fits: bool
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """What memory says of runs whose fate is known: names of runs.

    `called_safe` ended for want of memory though more than 5 % of it were predicted to stay free; `called_full` ran
    though more than all of it was predicted.
    """

    oom_rows: int
    called_safe: tuple[str, ...]
    ran_rows: int
    called_full: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All runs together.

    `coverage_ratio` is the share of rows that have a price; `memory_kinds` the errors of every reading by its kind;
    `assumed` how many priced rows assume each field, most first.
    """

    rows: int
    priced: int
    refused: int
    skipped: int
    coverage_ratio: float
    step: ErrorStats | None
    memory: ErrorStats | None
    memory_kinds: tuple[tuple[str, ErrorStats], ...]
    feasibility: Feasibility
    assumed: tuple[tuple[str, int], ...]
    group_spearman_median: float | None
    group_regret_median_ratio: float | None
    group_regret_p90_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """The answer of `validate`; `best_plans` is empty unless it was asked for."""

    rows: tuple[RowResult, ...]
    summary: Summary
    sources: tuple[Slice, ...]
    hardware: tuple[Slice, ...]
    kinds: tuple[Slice, ...]
    software: tuple[Slice, ...]
    groups: tuple[RankedGroup, ...]
    best_plans: tuple[BestPlan, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Build the documented JSON object: `schema_version` 1, units in the names, strictly numbers (never NaN)."""
        return validation_json(self)
