"""What was found: frozen records, and the documented JSON."""

from ap_search.result.explanation import CommunicationGroup, Explanation, PathStep
from ap_search.result.found import (
    ClashingRule,
    ClusterRow,
    ClusterSummary,
    Infeasibility,
    JobSummary,
    ModelSummary,
    Optimality,
    SearchResult,
    SearchSummary,
    SoftwareRow,
)
from ap_search.result.records import (
    HiddenTime,
    Lever,
    MemoryBreakdown,
    PricedPlan,
    Rejection,
    StageMemory,
    StateBytes,
    TimeBreakdown,
    Traffic,
    Violation,
)

__all__ = [
    "ClashingRule",
    "ClusterRow",
    "ClusterSummary",
    "CommunicationGroup",
    "Explanation",
    "HiddenTime",
    "Infeasibility",
    "JobSummary",
    "Lever",
    "MemoryBreakdown",
    "ModelSummary",
    "Optimality",
    "PathStep",
    "PricedPlan",
    "Rejection",
    "SearchResult",
    "SearchSummary",
    "SoftwareRow",
    "StageMemory",
    "StateBytes",
    "TimeBreakdown",
    "Traffic",
    "Violation",
]
