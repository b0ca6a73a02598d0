"""Frozen records of one answer: what was asked (model, cluster, job), how it was searched, what came out."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ap_search.result.explanation import Explanation
from ap_search.result.fidelity import Expectation
from ap_search.result.json import JSON_SCHEMA_VERSION, expectation_json, plan_json, strict_json
from ap_search.result.records import Lever, PricedPlan, Rejection
from ap_search.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A model in numbers: parameters (count), layer indices, routed experts (0 for a dense model).

    `params_total` leaves MTP modules out (they are `params_mtp`); `params_active` is what one token passes, both
    embeddings counted.
    """

    name: str
    params_total: int
    params_active: int
    params_mtp: int
    num_layers: int
    dense_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """The devices of a job; `assumed` names keys filled by a default, `provenance` says where each fit comes from."""

    name: str
    devices: int
    device_memory_bytes: int
    assumed: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """One training step as priced; `assumed` names the fields that nobody gave."""

    global_batch: int
    seq_len: int
    precision: str
    memory_limit_bytes: int
    reserve_bytes: int
    software: str
    load: str
    target: str
    assumed: tuple[str, ...] = ()
    placement: str = "contiguous"
    redundant_experts: int = 0
    capacity_factor: float = 0.0
    pad_to_capacity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimality:
    """How sure the first plan is the best of the space: a sentence, and where known a bound on any plan's step.

    `gap_ratio` is the best step over `lower_bound_s`, minus 1; None where no bound is known.
    """

    statement: str
    exhaustive: bool
    lower_bound_s: float | None = None
    gap_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """How many plans were looked at, priced and found feasible, in how many seconds, and why the others fell out."""

    candidates: int
    priced: int
    feasible: int
    elapsed_s: float
    optimality: Optimality
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClashingRule:
    """One rule of the smallest set that cannot hold together."""

    rule_id: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasibility:
    """Why nothing was found, and what would help.

    Attributes
    ----------
    message : str
        One sentence.
    nearest : PricedPlan or None
        The legal plan that needs the least memory, None where no legal plan exists.
    clash : tuple of ClashingRule
        The smallest set of rules that cannot hold together, empty where plans exist and memory is what lacks.
    levers : tuple of Lever
        Changes that would help, the strongest first.
    smallest_devices : int or None
        Smallest device count on which something fits, None where none was found.
    """

    message: str
    nearest: PricedPlan | None = None
    clash: tuple[ClashingRule, ...] = ()
    levers: tuple[Lever, ...] = ()
    smallest_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The answer of `search` (plans best first) and of `estimate` (its one plan, feasible or not).

    `explanation` belongs to the first plan, and is None unless it was asked for. `fidelity` says how far recorded runs
    on this machine were from their predictions.
    """

    model: ModelSummary
    cluster: ClusterSummary
    job: JobSummary
    search: SearchSummary
    plans: tuple[PricedPlan, ...]
    infeasibility: Infeasibility | None = None
    explanation: Explanation | None = None
    fidelity: Expectation | None = None

    def step_time_band_s(self, plan: PricedPlan) -> tuple[float, float] | None:
        """Seconds between which eight of ten such steps are expected; None without recorded runs on this machine."""
        return None if self.fidelity is None else self.fidelity.step_time_band_s(plan.step_time_s)

    @property
    def feasible(self) -> bool:
        """Whether a plan was found that can run."""
        return any(plan.feasible for plan in self.plans)

    def to_json(self) -> dict[str, Any]:
        """Build the documented JSON object: `schema_version` 1, units in the names, strictly numbers (never NaN)."""
        answer: dict[str, Any] = {"schema_version": JSON_SCHEMA_VERSION, "tool_version": __version__}
        answer |= {name: asdict(getattr(self, name)) for name in ("model", "cluster", "job", "search")}
        answer["fidelity"] = None if self.fidelity is None else expectation_json(self.fidelity)
        answer["plans"] = [plan_json(plan) | {"step_time_band_s": self.step_time_band_s(plan)} for plan in self.plans]
        if self.infeasibility is not None:
            nearest = self.infeasibility.nearest
            entry = None if nearest is None else plan_json(nearest)
            answer["infeasibility"] = asdict(self.infeasibility) | {"nearest": entry}
        if self.explanation is not None:
            answer["explain"] = asdict(self.explanation)
        strict: dict[str, Any] = strict_json(answer)
        return strict

    def to_json_text(self) -> str:
        """Write the JSON object as text that ends with a newline."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    """One line of `ap-search clusters`: specification figures per device, and how many values name their source."""

    name: str
    device: str
    memory_bytes: int
    peak_bf16_flops_per_s: float
    devices_per_domain: int
    scale_up_bytes_per_s: float
    network_bytes_per_s: float
    sources: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRow:
    """One line of `ap-search software`."""

    name: str
    description: str
