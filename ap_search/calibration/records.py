"""What calibration found: each constant with its fate, errors before and after, the files."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ap_search.calibration.json import calibration_json
from ap_search.fidelity.records import ErrorStats
from ap_search.spec.constants import Effect, Home


class Fate(StrEnum):
    """What became of a constant: moved; left because the runs do not tell; left because the fit was not adopted."""

    FITTED = "fitted"
    NOT_IDENTIFIED = "not identified"
    NOT_ADOPTED = "not adopted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantResult:
    """One constant.

    `before` and `after` are its values in the file's own unit at `keys[0]`, `gain_ratio` how many times as fast it
    became, `known_ratio` the share of its uncertainty that the runs take away, `largest_share_ratio` the most of a step
    that it drives. `at_bound` says that physics stopped it. `reason` says why it was left.
    """

    name: str
    home: Home
    keys: tuple[str, ...]
    effect: Effect
    fate: Fate
    before: float
    after: float
    gain_ratio: float
    known_ratio: float
    largest_share_ratio: float
    at_bound: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Errors of seconds of a step over the runs, and the order inside groups: median rank correlation, None without."""

    step: ErrorStats
    spearman: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """Errors on runs that the fit did not see: every unit (group, source, ...) priced by a fit on all others.

    `level` fits the level alone, `full` all constants that the runs identify.
    """

    leave_out: str
    units: int
    before: Fidelity
    level: Fidelity
    full: Fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedRun:
    """A run that was not fitted on, and why; `refused` where what it measured cannot be."""

    id: str
    reason: str
    refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A run that the fitted constants still miss by over three times the scatter, predicted over measured minus 1."""

    id: str
    error_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The answer of `calibrate`.

    `chosen` is `full`, `level` or `none`; `statement` says why. `cluster_text` and `software_text` are whole files,
    empty where that file was not fitted or nothing was adopted. `combinations` of `candidates` constants are identified
    by the runs together (singular values at 1 or above). `fitted` are errors on the runs of the fit itself.
    """

    files: tuple[str, ...]
    clusters: tuple[str, ...]
    profiles: tuple[str, ...]
    rows: int
    groups: int
    chosen: str
    statement: str
    constants: tuple[ConstantResult, ...]
    combinations: int
    singular_values: tuple[float, ...]
    scatter_ratio: float
    before: Fidelity
    fitted: Fidelity
    cross_validation: CrossValidation | None
    unused: tuple[UnusedRun, ...]
    outliers: tuple[Outlier, ...]
    reserve_bytes: int | None
    reserve_statement: str
    cluster_text: str
    software_text: str

    @property
    def adopted(self) -> bool:
        """Whether constants were changed."""
        return self.chosen != "none"

    def to_json(self) -> dict[str, Any]:
        """Build the documented JSON object: `schema_version` 1, units in the names, strictly numbers (never NaN)."""
        return calibration_json(self)
