"""Rules of the knobs: sharding groups, dispatchers, recompute modules."""

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.mesh import plan_placement
from ap_search.plan.plan import Dispatcher, Plan, Recompute, Sharding
from ap_search.plan.table import IntArray, PlanTable
from ap_search.plan.text import knob_text, recompute_text
from ap_search.search.rules.base import Broken, Rule, RuleContext, holds_everywhere, unless
from ap_search.search.rules.sizes import moe_kinds
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, Model

_CONFIG = "Megatron-LM megatron/core/transformer/transformer_config.py"

DEEPEP_GROUP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


def hsdp_replicas(context: RuleContext, table: PlanTable) -> IntArray:
    """Count the replicas of HSDP: the scale-up domains that the dp-cp group spans, shape (plans,)."""
    machine, devices = context.machine, context.job.devices
    return plan_placement(table, group="dp-cp", domain_size=machine.devices_per_domain, world=devices).domains


def _hsdp_margin(context: RuleContext, table: PlanTable) -> IntArray:
    margin = holds_everywhere(table)
    rows = np.flatnonzero(table.sharding == Sharding.HSDP)
    hybrid = table.take(rows)
    replicas = hsdp_replicas(context, hybrid)
    group = hybrid.dp * hybrid.cp
    uneven = (group % replicas > 0).astype(np.int64) + (hybrid.edp % replicas > 0)
    margin[rows] = -(uneven + (replicas == 1) + (group <= replicas))
    return margin


def _hsdp_describe(context: RuleContext, plan: Plan) -> Broken:
    replicas = int(hsdp_replicas(context, PlanTable.from_plans([plan]))[0])
    group = plan.dp * plan.cp
    text = (
        f"hsdp keeps a copy per scale-up domain: dp*cp = {group} spans {replicas} of them, which must be more than one,"
        f" fewer than {group}, and divide it and edp = {plan.edp}"
    )
    return Broken(text=text, demand=replicas, bound=group, unit="replicas")


def _one_sharding_margin(context: RuleContext, table: PlanTable) -> IntArray:
    if context.sharding_of_one is None:
        return holds_everywhere(table)
    alone = (table.dp * table.cp == 1) & (table.edp == 1)
    return unless(~alone | (table.sharding == context.sharding_of_one), table)


def _one_sharding_describe(context: RuleContext, plan: Plan) -> Broken:
    kept = knob_text("sharding", context.sharding_of_one or Sharding.ZERO1)
    text = f"with data-parallel groups of one device, {knob_text('sharding', plan.sharding)} is the same plan as {kept}"
    return Broken(text=text, demand=plan.dp * plan.cp, bound=2, unit="devices per group")


def _expert_group_margin(context: RuleContext, table: PlanTable) -> IntArray:
    needs = (table.dispatcher == Dispatcher.DEEPEP) | (table.dispatcher == Dispatcher.HYBRIDEP)
    return unless(~needs | (table.ep * table.etp > 1), table)


def _expert_group_describe(context: RuleContext, plan: Plan) -> Broken:
    text = f"{knob_text('dispatcher', plan.dispatcher)} needs an expert group: ep*etp = 1"
    return Broken(text=text, demand=2, bound=plan.ep * plan.etp, unit="devices per expert group")


def _deepep_margin(context: RuleContext, table: PlanTable) -> IntArray:
    group = table.ep * table.etp
    distance = np.min([np.abs(group - size) for size in (1, *DEEPEP_GROUP_SIZES)], axis=0)
    return np.where(table.dispatcher == Dispatcher.DEEPEP, -distance, 0)


def _deepep_describe(context: RuleContext, plan: Plan) -> Broken:
    group = plan.ep * plan.etp
    nearest = min(DEEPEP_GROUP_SIZES, key=lambda size: abs(size - group))
    sizes = ", ".join(str(size) for size in DEEPEP_GROUP_SIZES)
    text = f"deepep is tuned for expert groups of {sizes} devices, not for ep*etp = {group}"
    return Broken(text=text, demand=group, bound=nearest, unit="devices per expert group")


def _one_dispatcher_margin(context: RuleContext, table: PlanTable) -> IntArray:
    if context.dispatcher_of_one is None:
        return holds_everywhere(table)
    return unless((table.ep * table.etp > 1) | (table.dispatcher == context.dispatcher_of_one), table)


def _one_dispatcher_describe(context: RuleContext, plan: Plan) -> Broken:
    kept = knob_text("dispatcher", context.dispatcher_of_one or Dispatcher.ALLTOALL)
    text = (
        f"with ep*etp = 1 nothing is dispatched: {knob_text('dispatcher', plan.dispatcher)} is the same plan as {kept}"
    )
    return Broken(text=text, demand=plan.ep * plan.etp, bound=2, unit="devices per expert group")


def recompute_modules(model: Model) -> Recompute:
    """Tell which modules of this model can be recomputed.

    Parameters
    ----------
    model : Model
        Its layer kinds.

    Returns
    -------
    Recompute
        Flags, FULL among them.
    """
    mixers = [kind.mixer for kind in model.kinds if isinstance(kind.mixer, Attention)]
    present = (
        (Recompute.CORE_ATTN, bool(mixers)),
        (Recompute.MLA_UP_PROJ, any(mixer.kind is AttentionKind.MLA for mixer in mixers)),
        (Recompute.MLP, any(isinstance(kind.ffn, DenseFfn) for kind in model.kinds)),
        (Recompute.MOE_ACT | Recompute.MOE, bool(moe_kinds(model))),
        (Recompute.SHARED_EXPERTS, any(moe.shared_width for moe in moe_kinds(model))),
    )
    found = Recompute.FULL | Recompute.LAYERNORM
    for flag, there in present:
        found |= flag if there else Recompute.NONE
    return found


def recompute_breaches(present: Recompute, chosen: IntArray) -> tuple[NDArray[np.bool_], ...]:
    """Tell which of three demands sets of recompute modules miss.

    Parameters
    ----------
    present : Recompute
        Modules that the model has.
    chosen : array of int, shape (plans,)
        Recompute flags.

    Returns
    -------
    tuple of three arrays of bool, shape (plans,)
        A module that is missing; full beside others; moe beside what it contains.
    """
    inside_moe = Recompute.MOE_ACT | Recompute.SHARED_EXPERTS
    return (
        (chosen & ~int(present)) > 0,
        ((chosen & Recompute.FULL) > 0) & (chosen != Recompute.FULL),
        ((chosen & Recompute.MOE) > 0) & ((chosen & inside_moe) > 0),
    )


def _recompute_margin(context: RuleContext, table: PlanTable) -> IntArray:
    breaches = recompute_breaches(recompute_modules(context.model), table.recompute)
    return np.asarray(-np.sum(breaches, axis=0, dtype=np.int64))


def _recompute_describe(context: RuleContext, plan: Plan) -> Broken:
    present = recompute_modules(context.model)
    breaches = recompute_breaches(present, np.array([int(plan.recompute)]))
    missing = recompute_text(plan.recompute & ~present).removeprefix("selective:")
    reasons = (f"{context.model.name} has no {missing}", "full leaves nothing to select", "moe contains the others")
    faults = [reason for reason, breach in zip(reasons, breaches, strict=True) if breach[0]]
    text = f"recompute={recompute_text(plan.recompute)}: {'; '.join(faults)}"
    return Broken(text=text, demand=len(faults), bound=0, unit="faults")


SHARDING_RULES: tuple[Rule, ...] = (
    Rule(
        id="sharding_group",
        sentence="hsdp replicates over scale-up domains: the dp-cp group spans n > 1 of them, n divides dp*cp and edp",
        source="Megatron-LM megatron/core/parallel_state.py (num_distributed_optimizer_instances), megatron_fsdp.md",
        reads=("tp", "cp", "dp", "edp", "sharding"),
        margin=_hsdp_margin,
        describe=_hsdp_describe,
        levers=("sharding",),
    ),
    Rule(
        id="one_sharding_of_one",
        sentence="where every data-parallel group is one device, one sharding stands for all (a search lists it once)",
        source="the same plan: nothing is sharded over a group of one",
        reads=("dp", "cp", "edp", "sharding"),
        margin=_one_sharding_margin,
        describe=_one_sharding_describe,
        levers=("sharding",),
    ),
)

DISPATCHER_RULES: tuple[Rule, ...] = (
    Rule(
        id="dispatcher_needs_group",
        sentence="deepep and hybridep need ep*etp > 1",
        source="Megatron-LM megatron/core/transformer/moe/token_dispatcher.py",
        reads=("ep", "etp", "dispatcher"),
        margin=_expert_group_margin,
        describe=_expert_group_describe,
        levers=("dispatcher", "ep"),
    ),
    Rule(
        id="deepep_group_size",
        sentence="deepep knows expert groups of 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144 or 160 devices",
        source="deepseek-ai/DeepEP deep_ep/buffers/legacy.py (configuration table of V1)",
        reads=("ep", "etp", "dispatcher"),
        margin=_deepep_margin,
        describe=_deepep_describe,
        levers=("ep", "dispatcher"),
    ),
    Rule(
        id="one_dispatcher_of_one",
        sentence="where ep*etp = 1 nothing is dispatched, and one dispatcher stands for all (a search lists it once)",
        source="the same plan: no token leaves its device",
        reads=("ep", "etp", "dispatcher"),
        margin=_one_dispatcher_margin,
        describe=_one_dispatcher_describe,
        levers=("dispatcher",),
    ),
)

RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        id="recompute_module",
        sentence="recomputed modules exist in the model; full stands alone; moe contains moe_act and shared_experts",
        source=f"{_CONFIG} (recompute_modules)",
        reads=("recompute",),
        margin=_recompute_margin,
        describe=_recompute_describe,
        levers=("recompute",),
    ),
)
