"""Frozen records of one plan's price: memory, time, traffic, violations; and of why plans were dropped."""

from dataclasses import dataclass

from ap_search.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Model state of one class of parameters on one device, bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one device of a pipeline stage holds at its worst moment, bytes; the parts sum to `total_bytes`.

    `router_bytes` is the router's weights, gradients and optimizer state; `largest` names the largest tensors.
    """

    stage: int
    moment: str
    shared: StateBytes
    expert: StateBytes
    router_bytes: int
    activations_bytes: int
    dispatch_bytes: int
    logits_bytes: int
    buffers_bytes: int
    reserve_bytes: int
    largest: tuple[tuple[str, int], ...] = ()

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return (
            self.shared.total_bytes
            + self.expert.total_bytes
            + self.router_bytes
            + self.activations_bytes
            + self.dispatch_bytes
            + self.logits_bytes
            + self.buffers_bytes
            + self.reserve_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Memory of every pipeline stage against the limit of one device."""

    limit_bytes: int
    stages: tuple[StageMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest stage, bytes."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def peak_stage(self) -> StageMemory:
        """The stage that needs the most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Exposed seconds of one step on its critical stage; the parts sum to the step."""

    attention_s: float
    dense_ffn_s: float
    router_s: float
    dispatch_s: float
    expert_s: float
    combine_s: float
    shared_expert_s: float
    head_s: float
    recompute_s: float
    tp_comm_s: float
    cp_comm_s: float
    pp_comm_s: float
    bubble_s: float
    dp_comm_s: float
    optimizer_s: float
    other_s: float
    imbalance_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTime:
    """Communication seconds of one step that run beside compute on the critical stage, so that no part holds them."""

    ep_comm_s: float = 0.0
    tp_comm_s: float = 0.0
    cp_comm_s: float = 0.0
    dp_comm_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the busiest device of the critical stage sends in one step, itself left out, bytes."""

    dispatch_bytes: int
    combine_bytes: int
    tp_bytes: int
    cp_bytes: int
    pp_bytes: int
    dp_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change that would help, and by how much."""

    change: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rule that one plan breaks: what it demands, what is allowed, and the nearest legal values."""

    rule_id: str
    message: str
    demand: float
    bound: float
    unit: str
    levers: tuple[Lever, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One rule that dropped plans from a search: how many, one example, what would help."""

    rule_id: str
    count: int
    message: str
    example: str
    levers: tuple[Lever, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlacement:
    """The same plan with its experts placed otherwise: seconds of a step and peak bytes that this saves.

    They are negative where it costs more. `worst_rank_ratio_max` is what the busiest rank of any layer receives over
    the mean.
    """

    placement: str
    redundant_experts: int
    worst_rank_ratio_max: float
    gain_s: float
    gain_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImbalanceCost:
    """What an uneven load costs a plan: seconds of a step and peak bytes beyond those at balanced load.

    `placement`, `redundant_experts` and `worst_rank_ratio_max` as the plan was priced; `others` are other placements.
    """

    placement: str
    redundant_experts: int
    worst_rank_ratio_max: float
    cost_s: float
    cost_bytes: int
    others: tuple[OtherPlacement, ...] = ()

    @property
    def eplb_gain_s(self) -> float:
        """Seconds of a step that EPLB would win back, with the copies that serve best; 0 where it would not."""
        gains = [other.gain_s for other in self.others if other.placement == "eplb"]
        return max([0.0, *gains])


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """One plan with its price; `rank` is 1 for the best, 0 outside a ranking.

    `stage_times_s` is the busy time of each pipeline stage in one step (bubbles left out), seconds; empty if unknown.
    `critical_stage` is the one that `time` belongs to. `imbalance` is worked out for the best plan of an uneven load.
    `notes` are sentences on what was asked for and is not in effect.
    """

    rank: int
    name: str
    plan: Plan
    feasible: bool
    violations: tuple[Violation, ...]
    step_time_s: float
    tokens_per_s_per_device: float
    model_flops_per_s_per_device: float
    mfu_ratio: float
    memory: MemoryBreakdown
    time: TimeBreakdown
    traffic: Traffic
    stage_times_s: tuple[float, ...] = ()
    critical_stage: int = 0
    hidden: HiddenTime = HiddenTime()
    imbalance: ImbalanceCost | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_memory_bytes(self) -> int:
        """The largest stage, bytes."""
        return self.memory.peak_bytes
