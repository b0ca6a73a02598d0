"""A band of errors as a plain value: measured over predicted on some recorded runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Measured over predicted on some recorded runs: their number, median, 10th and 90th percentile, ratios."""

    rows: int
    median_ratio: float
    p10_ratio: float
    p90_ratio: float
