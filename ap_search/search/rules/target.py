"""Rules of single frameworks: what a plan must obey besides, where the user names a target."""

import numpy as np

from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.plan.table import IntArray, PlanTable
from ap_search.plan.text import knob_text
from ap_search.search.rules.base import Broken, MeshPoster, Rule, RuleContext, not_multiple, unless, worst
from ap_search.search.rules.sizes import kv_heads, moe_kinds
from ap_search.spec.job import Target

_TITAN_DIMS = "pytorch/torchtitan torchtitan/distributed/parallel_dims.py"
_HYPER = "mindspore-ai/hyper-parallel docs/guide/trainer (components_distributed_tutorial.md section 7)"
_DEEPSPEED_FOLDING = "deepspeedai/DeepSpeed pull request 8064 (AutoEP folding)"


def _one_of(target: Target, axis: str, legal: tuple[int, ...], *, source: str, why: str) -> Rule:
    """Make the rule that a framework knows only some values of a knob."""
    names = " ".join(knob_text(axis, value) for value in legal)

    def margin(context: RuleContext, table: PlanTable) -> IntArray:
        return unless(np.isin(getattr(table, axis), legal), table)

    def describe(context: RuleContext, plan: Plan) -> Broken:
        text = f"{target} has no {axis}={knob_text(axis, getattr(plan, axis))}: {why}"
        return Broken(text=text, demand=float(getattr(plan, axis)), bound=float(max(legal)), unit=axis)

    return Rule(
        id=f"{target}_{axis}",
        sentence=f"{target} runs {axis} {names}: {why}",
        source=source,
        reads=(axis,),
        margin=margin,
        describe=describe,
        levers=(axis,),
        target=target,
    )


def _degree_one(target: Target, axis: str, *, source: str, why: str) -> Rule:
    """Make the rule that a framework has no such axis: its degree is 1."""

    def describe(context: RuleContext, plan: Plan) -> Broken:
        degree = getattr(plan, axis)
        return Broken(text=f"{target} runs {axis}=1 only, not {degree}: {why}", demand=degree, bound=1, unit="devices")

    return Rule(
        id=f"{target}_{axis}",
        sentence=f"{target} has {axis} = 1: {why}",
        source=source,
        reads=(axis,),
        margin=lambda context, table: np.asarray(1 - getattr(table, axis), dtype=np.int64),
        describe=describe,
        levers=(axis,),
        post=lambda context, poster: poster.keep(axis, lambda degree: degree == 1),
        target=target,
    )


def _tiles(target: Target, *, axes: tuple[str, ...], whole: tuple[str, ...], source: str) -> Rule:
    """Make the rule that the expert group tiles a group of the dense mesh."""
    part_name, whole_name = "*".join(axes), "*".join(whole)

    def product(table: PlanTable, names: tuple[str, ...]) -> IntArray:
        return np.asarray(np.prod([getattr(table, name) for name in names], axis=0), dtype=np.int64)

    def describe(context: RuleContext, plan: Plan) -> Broken:
        table = PlanTable.from_plans([plan])
        part, around = int(product(table, axes)[0]), int(product(table, whole)[0])
        text = f"{target}: {part_name} = {part} does not divide {whole_name} = {around}"
        return Broken(text=text, demand=part, bound=around, unit="devices")

    return Rule(
        id=f"{target}_ep",
        sentence=f"{target} lays experts over the dense ranks: {part_name} divides {whole_name}",
        source=source,
        reads=(*axes, *whole),
        margin=lambda context, table: not_multiple(product(table, whole), product(table, axes)),
        describe=describe,
        levers=axes,
        post=lambda context, poster: poster.tile(axes, whole),
        target=target,
    )


def _titan_kv_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return worst([not_multiple(count, table.tp) for count, _ in kv_heads(context.model)], table)


def _titan_kv_describe(context: RuleContext, plan: Plan) -> Broken:
    count = max((count for count, _ in kv_heads(context.model)), key=lambda one: one % plan.tp)
    text = f"torchtitan: {count} key/value heads do not divide over tp={plan.tp} (it does not replicate them)"
    return Broken(text=text, demand=plan.tp, bound=count, unit="key/value heads")


def _titan_kv_post(context: RuleContext, poster: MeshPoster) -> None:
    for count, _ in kv_heads(context.model):
        poster.divide(("tp",), count)


def _titan_rounds(table: PlanTable) -> IntArray:
    return np.asarray(np.maximum(table.num_microbatches // table.pp, 1))


def _titan_rounds_margin(context: RuleContext, table: PlanTable) -> IntArray:
    rest = not_multiple(table.num_microbatches, _titan_rounds(table))
    return np.where(table.schedule == Schedule.INTERLEAVED, rest, 0)


def _titan_rounds_describe(context: RuleContext, plan: Plan) -> Broken:
    rounds = int(_titan_rounds(PlanTable.from_plans([plan]))[0])
    text = f"torchtitan: {plan.num_microbatches} micro-batches do not divide into {rounds} rounds over pp={plan.pp}"
    return Broken(text=text, demand=rounds, bound=plan.num_microbatches, unit="micro-batches")


def _hyper_pipeline_margin(context: RuleContext, table: PlanTable) -> IntArray:
    return unless((table.ep == 1) | (table.pp == 1) | (not moe_kinds(context.model)), table)


def _hyper_pipeline_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"hyperparallel's trainer does not take pp={plan.pp} together with ep={plan.ep} yet"
    return Broken(text=text, demand=plan.pp, bound=1, unit="pipeline stages")


def _zero_needs_one(axis: str, refused: tuple[Sharding, ...], *, id: str, source: str, why: str) -> Rule:
    """Make a rule of DeepSpeed: these sharding stages do not run beside that axis."""
    names = ", ".join(knob_text("sharding", stage) for stage in refused)

    def margin(context: RuleContext, table: PlanTable) -> IntArray:
        return unless((getattr(table, axis) == 1) | ~np.isin(table.sharding, refused), table)

    def describe(context: RuleContext, plan: Plan) -> Broken:
        degree = getattr(plan, axis)
        text = f"deepspeed: {knob_text('sharding', plan.sharding)} does not run with {axis}={degree}: {why}"
        return Broken(text=text, demand=degree, bound=1, unit="devices")

    return Rule(
        id=id,
        sentence=f"deepspeed runs {names} with {axis} = 1 only: {why}",
        source=source,
        reads=(axis, "sharding"),
        margin=margin,
        describe=describe,
        levers=("sharding", axis),
        target=Target.DEEPSPEED,
    )


TARGET_MESH_RULES: tuple[Rule, ...] = (
    _degree_one(Target.TORCHTITAN, "etp", source=_TITAN_DIMS, why="it has no expert tensor axis"),
    Rule(
        id="torchtitan_kv_heads",
        sentence="torchtitan has tp divide the key/value heads: it does not replicate them",
        source="pytorch/torchtitan issues 2574 and 2577",
        reads=("tp",),
        margin=_titan_kv_margin,
        describe=_titan_kv_describe,
        levers=("tp",),
        post=_titan_kv_post,
        target=Target.TORCHTITAN,
    ),
    _tiles(
        Target.TORCHTITAN,
        axes=("ep",),
        whole=("dp", "cp", "tp"),
        source=f"{_TITAN_DIMS}; pytorch/torchtitan issue 4258",
    ),
    _degree_one(Target.HYPERPARALLEL, "etp", source=_HYPER, why="each rank holds whole experts"),
    _tiles(Target.HYPERPARALLEL, axes=("ep",), whole=("dp", "cp", "tp"), source=_HYPER),
    Rule(
        id="hyperparallel_ep_pipeline",
        sentence="hyperparallel's trainer takes ep > 1 only with pp = 1",
        source=f"{_HYPER}: the first version",
        reads=("ep", "pp"),
        margin=_hyper_pipeline_margin,
        describe=_hyper_pipeline_describe,
        levers=("pp", "ep"),
        target=Target.HYPERPARALLEL,
    ),
    _degree_one(Target.DEEPSPEED, "cp", source=_DEEPSPEED_FOLDING, why="its meshes have no context-parallel axis"),
    _tiles(Target.DEEPSPEED, axes=("ep", "etp"), whole=("tp", "dp"), source=_DEEPSPEED_FOLDING),
)

TARGET_PIPELINE_RULES: tuple[Rule, ...] = (
    _one_of(
        Target.MEGATRON,
        "schedule",
        (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
        source="Megatron-LM megatron/core/pipeline_parallel/schedules.py (get_forward_backward_func)",
        why="the others are not in Megatron-Core",
    ),
    _one_of(
        Target.TORCHTITAN,
        "schedule",
        (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE),
        source="PyTorch torch/distributed/pipelining/schedules.py",
        why="PyTorch has ZB-V and DualPipe-V, not zb_h1 and dualpipe",
    ),
    Rule(
        id="torchtitan_rounds",
        sentence="torchtitan's interleaved schedule splits micro-batches into max(1, micro-batches // pp) equal rounds",
        source="PyTorch torch/distributed/pipelining/schedules.py (ScheduleInterleaved1F1B)",
        reads=("pp", "dp", "mbs", "schedule"),
        margin=_titan_rounds_margin,
        describe=_titan_rounds_describe,
        levers=("vpp", "mbs", "pp"),
        target=Target.TORCHTITAN,
    ),
    _one_of(
        Target.HYPERPARALLEL,
        "schedule",
        (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE),
        source="mindspore-ai/hyper-parallel docs/guide/pipeline_parallel.md, docs/feature_status.md",
        why="zero-bubble schedules are not there yet",
    ),
    _one_of(
        Target.DEEPSPEED,
        "schedule",
        (Schedule.ONE_F_ONE_B,),
        source="deepspeedai/DeepSpeed deepspeed/runtime/pipe/schedule.py (TrainSchedule)",
        why="its pipeline engine knows one order",
    ),
)

TARGET_SHARDING_RULES: tuple[Rule, ...] = (
    _one_of(
        Target.TORCHTITAN,
        "sharding",
        (Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3, Sharding.HSDP),
        source="pytorch/torchtitan torchtitan/distributed/fsdp.py (reshard_after_forward)",
        why="FSDP2 always shards gradients with the optimizer",
    ),
    _zero_needs_one(
        "pp",
        (Sharding.ZERO2, Sharding.ZERO3, Sharding.HSDP),
        id="deepspeed_sharding_pipeline",
        source="deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py (asserts ZeRO stage < 2)",
        why="gradients must stay whole between micro-batches",
    ),
    _zero_needs_one(
        "tp",
        (Sharding.ZERO3, Sharding.HSDP),
        id="deepspeed_sharding_tensor",
        source="deepspeedai/DeepSpeed docs (AutoTP trains with ZeRO stages 0, 1 and 2); pull request 8167",
        why="AutoTP does not train with stage 3",
    ),
)

TARGET_DISPATCHER_RULES: tuple[Rule, ...] = (
    _one_of(
        Target.TORCHTITAN,
        "dispatcher",
        (Dispatcher.ALLTOALL, Dispatcher.DEEPEP, Dispatcher.HYBRIDEP),
        source="pytorch/torchtitan torchtitan/distributed/deepep (expert_parallel_comm_backend)",
        why="it does not gather all tokens",
    ),
    _one_of(
        Target.HYPERPARALLEL,
        "dispatcher",
        (Dispatcher.ALLTOALL,),
        source="mindspore-ai/hyper-parallel docs/expert_parallel.md",
        why="its expert-parallel style is an all-to-all",
    ),
    _one_of(
        Target.DEEPSPEED,
        "dispatcher",
        (Dispatcher.ALLTOALL, Dispatcher.DEEPEP),
        source="deepspeedai/DeepSpeed pull requests 7938 and 8213 (AutoEP)",
        why="AutoEP has a plain and a DeepEP transport",
    ),
)

TARGET_RECOMPUTE_RULES: tuple[Rule, ...] = (
    _one_of(
        Target.TORCHTITAN,
        "recompute",
        (Recompute.NONE, Recompute.FULL),
        source="pytorch/torchtitan torchtitan/distributed/activation_checkpoint.py",
        why="its selective mode goes by operator, not by Megatron's modules",
    ),
)
