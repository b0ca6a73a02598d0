"""Answers made up for tests of what is printed: round numbers, so that every printed figure can be checked by hand."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.plan.text import plan_name
from ap_search.result import (
    ClashingRule,
    ClusterRow,
    ClusterSummary,
    Infeasibility,
    JobSummary,
    Lever,
    MemoryBreakdown,
    ModelSummary,
    Optimality,
    PricedPlan,
    Rejection,
    SearchResult,
    SearchSummary,
    SoftwareRow,
    StageMemory,
    StateBytes,
    TimeBreakdown,
    Traffic,
    Violation,
)
from ap_search.units import GIB

MODEL = ModelSummary(
    name="made-up-moe",
    params_total=671_026_419_200,
    params_active=37_552_297_984,
    params_mtp=11_500_000_000,
    num_layers=61,
    dense_layers=(0, 1, 2),
    moe_layers=tuple(range(3, 61)),
    num_experts=256,
    top_k=8,
    warnings=("sizes contradict the stated total: 671.0 against 700.0 B",),
)
CLUSTER = ClusterSummary(name="made-up-cluster", devices=256, device_memory_bytes=80 * GIB)
JOB = JobSummary(
    global_batch=1024,
    seq_len=4096,
    precision="bf16",
    memory_limit_bytes=80 * GIB,
    reserve_bytes=4 * GIB,
    software="default",
    load="balanced",
    target="any",
    assumed=("global_batch", "precision"),
)


def stage(number: int = 0, *, activations_gib: int = 20, moment: str = "backward peak") -> StageMemory:
    """GiB: 1+2+3 shared, 4+5+6 expert, no router, the activations, 1 dispatch, 2 logits, 1 buffers, 4 reserve."""
    return StageMemory(
        stage=number,
        moment=moment,
        shared=StateBytes(weights_bytes=1 * GIB, gradients_bytes=2 * GIB, optimizer_bytes=3 * GIB),
        expert=StateBytes(weights_bytes=4 * GIB, gradients_bytes=5 * GIB, optimizer_bytes=6 * GIB),
        router_bytes=0,
        activations_bytes=activations_gib * GIB,
        dispatch_bytes=1 * GIB,
        logits_bytes=2 * GIB,
        buffers_bytes=1 * GIB,
        reserve_bytes=4 * GIB,
        largest=(("expert optimizer", 6 * GIB), ("fc1 of experts", 5 * GIB)),
    )


def times(**seconds: float) -> TimeBreakdown:
    """Parts of a step, 0 where not named."""
    return TimeBreakdown(**{field.name: seconds.get(field.name, 0.0) for field in fields(TimeBreakdown)})


def priced(*, rank: int = 1, plan: Plan | None = None, **changes: Any) -> PricedPlan:
    """Price a plan at 10 s: 4 s experts, 3 s attention, 2 s bubble, 1 s dispatch; stages of 49, 39, 39, 34 GiB."""
    plan = plan or Plan(
        pp=4,
        dp=64,
        ep=32,
        edp=2,
        num_microbatches=16,
        sharding=Sharding.ZERO1,
        dispatcher=Dispatcher.DEEPEP,
        layout=layout_of([16, 15, 15, 15], pp=4, vpp=1),
    )
    memory = MemoryBreakdown(
        limit_bytes=80 * GIB,
        stages=(
            stage(0),
            stage(1, activations_gib=10),
            stage(2, activations_gib=10),
            stage(3, activations_gib=5, moment="loss"),
        )[: plan.pp],
    )
    built = PricedPlan(
        rank=rank,
        name=plan_name(plan),
        plan=plan,
        feasible=True,
        violations=(),
        step_time_s=10.0,
        tokens_per_s_per_device=1638.4,
        model_flops_per_s_per_device=412.3e12,
        mfu_ratio=0.4169,
        memory=memory,
        time=times(expert_s=4.0, attention_s=3.0, bubble_s=2.0, dispatch_s=1.0),
        traffic=Traffic(
            dispatch_bytes=800 * GIB,
            combine_bytes=1600 * GIB,
            tp_bytes=0,
            cp_bytes=0,
            pp_bytes=1 * GIB,
            dp_bytes=12 * GIB,
        ),
        stage_times_s=(8.0, 7.0, 7.0, 7.5)[: plan.pp],
    )
    return replace(built, **changes)


def interleaved_plan() -> Plan:
    """A plan of two stages with two chunks each and a long name."""
    return Plan(
        tp=2,
        cp=2,
        pp=2,
        vpp=2,
        dp=32,
        ep=16,
        etp=2,
        edp=4,
        mbs=2,
        num_microbatches=16,
        sequence_parallel=True,
        recompute=Recompute.CORE_ATTN | Recompute.MOE_ACT | Recompute.LAYERNORM,
        dispatcher=Dispatcher.HYBRIDEP,
        schedule=Schedule.INTERLEAVED,
        layout=layout_of([16, 15, 15, 15], pp=2, vpp=2),
    )


MEMORY_VIOLATION = Violation(
    rule_id="memory.limit",
    message="stage 0 needs more than a device holds",
    demand=91.5 * GIB,
    bound=80.0 * GIB,
    unit="bytes",
    levers=(Lever(change="recompute=full", effect="-18.0 GiB on stage 0"),),
)
REJECTIONS = (
    Rejection(rule_id="experts.ep", count=12, message="experts must divide by ep", example="tp1-pp1-dp256-mbs1-zero1"),
    Rejection(rule_id="memory.limit", count=3456, message="a stage needs more than a device holds", example="tp1-pp2"),
)


def search_summary(**changes: Any) -> SearchSummary:
    """A finished search that proved its best plan."""
    built = SearchSummary(
        candidates=123_456,
        priced=12_345,
        feasible=2,
        elapsed_s=1.2345,
        optimality=Optimality(
            statement="every legal plan was priced", exhaustive=True, lower_bound_s=9.5, gap_ratio=0.0526
        ),
        rejections=REJECTIONS,
    )
    return replace(built, **changes)


def found(*plans: PricedPlan, **changes: Any) -> SearchResult:
    """A result with plans, one priced plan by default."""
    built = SearchResult(model=MODEL, cluster=CLUSTER, job=JOB, search=search_summary(), plans=plans or (priced(),))
    return replace(built, **changes)


def nothing() -> SearchResult:
    """A result without plans: memory lacks, two rules clash, 48 devices would do."""
    nearest = priced(rank=0, feasible=False, violations=(MEMORY_VIOLATION,))
    fullest = replace(nearest.memory, stages=(stage(0, activations_gib=62), *nearest.memory.stages[1:]))
    reason = Infeasibility(
        message="all 12,345 legal plans need more memory than a device has",
        nearest=replace(nearest, memory=fullest),
        clash=(ClashingRule(rule_id="experts.ep", sentence="experts must divide by ep"),),
        levers=(Lever(change="recompute=full", effect="-18.0 GiB on stage 0"),),
        smallest_devices=48,
    )
    return replace(found(), search=search_summary(feasible=0), plans=(), infeasibility=reason)


class FakeApi(SimpleNamespace):
    """Stands in for `ap_search.api`: remembers its arguments, returns or raises what it was given."""

    def __init__(self) -> None:
        super().__init__(outcome=found(), arguments={})

    def _outcome(self, arguments):
        self.arguments = arguments
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def search(self, **arguments):
        return self._outcome(arguments)

    def estimate(self, **arguments):
        return self._outcome(arguments)

    def list_models(self):
        return (MODEL,)

    def list_clusters(self):
        return (
            ClusterRow(
                name="c",
                device="d",
                memory_bytes=1,
                peak_bf16_flops_per_s=1.0,
                devices_per_domain=8,
                scale_up_bytes_per_s=1.0,
                network_bytes_per_s=1.0,
                sources=1,
            ),
        )

    def list_software(self):
        return (SoftwareRow(name="default", description="as most do"),)
