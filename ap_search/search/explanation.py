"""What `--explain` adds to a priced plan: which ranks talk to each other, and where a MoE layer's seconds go."""

from typing import get_args

import numpy as np

from ap_search.cost.context import CostContext
from ap_search.cost.parts import BlockTime, Exchange, ExpertStep, Part, Wire
from ap_search.cost.prepared import Prepared, prepare
from ap_search.cost.stages import stage_runs
from ap_search.plan.mesh import Group, group_ranks
from ap_search.plan.plan import Plan, Recompute
from ap_search.plan.table import PlanTable
from ap_search.result import CommunicationGroup, Explanation, PathStep, PricedPlan
from ap_search.spec.machine import Machine

GROUPS: tuple[Group, ...] = get_args(Group)
EXPERT_GROUPS = ("ep", "etp", "edp", "tp-ep")
INSIDE = "inside"
# Sums of seconds in another order may differ by less than this.
ROUNDING_S = 1e-12


def communication_groups(
    machine: Machine, plan: Plan, *, devices: int, has_experts: bool
) -> tuple[CommunicationGroup, ...]:
    """List the groups of a plan that have more than one member, and how the worst of each kind lies on domains.

    Parameters
    ----------
    machine : Machine
        Its scale-up domain, and the level beyond it.
    plan : Plan
        Both meshes; empty where one of them does not fill the devices.
    devices : int
        Devices of the job.
    has_experts : bool
        Whether the model has routed experts: without them nothing travels over the groups of the expert mesh.

    Returns
    -------
    tuple of CommunicationGroup
        In the order tp, cp, dp, dp-cp, pp, ep, etp, edp, tp-ep.

    Notes
    -----
    The worst group spans the most domains and, of those, has the most members away from its first.
    """
    dense, expert = plan.tp * plan.cp * plan.dp * plan.pp, plan.etp * plan.ep * plan.edp * plan.pp
    if dense != devices or expert != devices:
        return ()
    kinds = [name for name in GROUPS if has_experts or name not in EXPERT_GROUPS]
    found = (_group(machine, plan, name, devices) for name in kinds)
    return tuple(group for group in found if group.size > 1)


def _group(machine: Machine, plan: Plan, name: Group, devices: int) -> CommunicationGroup:
    """Count one kind of groups from the lists of their ranks, which ascend."""
    ranks = group_ranks(plan, group=name)
    domain = ranks // machine.domain_size(devices)
    domains = 1 + (domain[:, 1:] != domain[:, :-1]).sum(axis=1)
    leaving = (domain != domain[:, :1]).sum(axis=1)
    worst = np.lexsort((leaving, domains))[-1]
    return CommunicationGroup(
        name=name,
        groups=len(ranks),
        size=ranks.shape[1],
        first_ranks=tuple(ranks[0].tolist()),
        domains=int(domains[worst]),
        leaving=int(leaving[worst]),
        level=machine.network.name if domains[worst] > 1 else INSIDE,
    )


def moe_path(time: BlockTime, *, repeats: bool) -> tuple[PathStep, ...]:
    """Read the data path of one MoE layer out of its priced block, seconds and bytes per micro-batch.

    Parameters
    ----------
    time : BlockTime
        The layer under one plan.
    repeats : bool
        Whether recompute repeats the whole MoE forward, its exchanges included.

    Returns
    -------
    tuple of PathStep
        In the order of the forward pass; what the busiest rank takes longer, and what is recomputed, only where it
        is not 0.

    Notes
    -----
    Backward mirrors forward: what dispatch does backward is a combine, and the other way round.
    """
    forward, backward, alone = time.forward[:, 0], time.backward[:, 0], time.exchange[:, 0]
    sent = time.sent_forward_bytes[:, 0]
    again = sent if repeats else np.zeros_like(sent)
    back = time.sent_backward_bytes[:, 0] - again
    dispatch = alone[Exchange.DISPATCH], alone[Exchange.DISPATCH_BACKWARD]
    combine = alone[Exchange.COMBINE], alone[Exchange.COMBINE_BACKWARD]
    steps = [
        _step("router", forward[Part.ROUTER], backward[Part.ROUTER]),
        _step("permute", forward[Part.DISPATCH] - dispatch[0], backward[Part.DISPATCH] - dispatch[1]),
        _step("dispatch", *dispatch, sent=sent[Wire.DISPATCH], back=back[Wire.DISPATCH]),
        *_expert_steps(time),
        _step("combine", *combine, sent=sent[Wire.COMBINE], back=back[Wire.COMBINE]),
        _step("unpermute", forward[Part.COMBINE] - combine[0], backward[Part.COMBINE] - combine[1]),
        _step("shared experts", forward[Part.SHARED_EXPERT], backward[Part.SHARED_EXPERT]),
    ]
    twice = again[Wire.DISPATCH] + again[Wire.COMBINE]
    extra = [
        _step("imbalance", forward[Part.IMBALANCE], backward[Part.IMBALANCE]),
        _step("recompute of the layer", 0.0, backward[Part.RECOMPUTE], back=twice),
    ]
    return (*steps, *(step for step in extra if step.forward_s + step.backward_s > 0))


def _expert_steps(time: BlockTime) -> list[PathStep]:
    """Read the steps of the routed experts; casts are theirs, padded copies and latent projections stand apart."""
    each = time.experts[:, :, 0]
    steps = [_step(f"expert {step.name.lower()}", *each[:, step]) for step in ExpertStep]
    rest = np.array([time.forward[Part.EXPERT, 0], time.backward[Part.EXPERT, 0]]) - each.sum(axis=1)
    return [*steps, *([_step("expert padding, projections", *rest)] if rest.sum() > ROUNDING_S else [])]


def _step(name: str, forward_s: float, backward_s: float, *, sent: float = 0.0, back: float = 0.0) -> PathStep:
    """Make a step of whole bytes; differences of seconds may miss 0 by rounding."""
    return PathStep(
        name=name,
        forward_s=max(float(forward_s), 0.0),
        backward_s=max(float(backward_s), 0.0),
        sent_forward_bytes=round(float(sent)),
        sent_backward_bytes=round(float(back)),
    )


def explain_plan(context: CostContext, priced: PricedPlan) -> Explanation:
    """Explain one priced plan: its communication groups, and its slowest MoE layer step by step (seconds, bytes).

    Parameters
    ----------
    context : CostContext
        What the plan was priced with.
    priced : PricedPlan
        The plan.

    Returns
    -------
    Explanation
        The layer is the slowest of the critical stage, or of the first stage that has any.
    """
    plan, job = priced.plan, context.job
    prepared = prepare(context, PlanTable.from_plans([plan]))
    stage, block = _slowest_moe(prepared, priced)
    repeats = bool(plan.recompute & (Recompute.FULL | Recompute.MOE))
    return Explanation(
        plan=priced.name,
        groups=communication_groups(
            context.machine, plan, devices=job.devices, has_experts=context.model.moe is not None
        ),
        moe_stage=stage,
        moe_path=() if block is None else moe_path(prepared.blocks.times[block], repeats=repeats),
    )


def _slowest_moe(prepared: Prepared, priced: PricedPlan) -> tuple[int | None, int | None]:
    """Find a stage with MoE layers, the critical one if it has any, and the slowest kind of them."""
    model, plan = prepared.model, priced.plan
    seconds = (prepared.forward_s + prepared.backward_s)[:, 0]
    moe = np.array([kind.is_moe for kind in model.kinds], dtype=np.bool_)
    runs = stage_runs(model, plan.layout, schedule=plan.schedule, every=True)
    for run in sorted(runs, key=lambda run: run.stage != priced.critical_stage):
        present = np.flatnonzero(moe & (run.counts[: len(moe)] > 0))
        if len(present):
            return run.stage, int(present[seconds[present].argmax()])
    return None, None
