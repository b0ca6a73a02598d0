"""Levers on memory: single legal changes of a plan or a job that make its fullest stage smaller, with their effect."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ap_search.cost.context import CostContext
from ap_search.cost.details import price_plan
from ap_search.cost.step import price_table
from ap_search.plan.plan import Plan
from ap_search.plan.text import knob_text
from ap_search.result import Lever, PricedPlan, Violation
from ap_search.search.domains import SearchDomains, search_domains
from ap_search.search.engine import memory_violation
from ap_search.search.rules import RuleContext, check, violations
from ap_search.search.rules.columns import vary
from ap_search.spec.profiles import load_software
from ap_search.units import bytes_to_gib

LEVER_AXES = ("recompute", "sharding", "mbs", "pp", "ep", "etp", "tp", "cp", "dispatcher")
LEAN_SOFTWARE = "megatron-core-graphs"
LEAST_EFFECT_GIB = 0.05
Choices = Iterable[tuple[str, tuple[int, ...]]]


def all_choices(rules: RuleContext) -> Choices:
    """List the default candidates of each axis and knob that bears on memory."""
    everything = search_domains(rules)
    return [(axis, getattr(everything, axis)) for axis in LEVER_AXES]


def choices_outside(rules: RuleContext, domains: SearchDomains) -> Choices:
    """List the default candidates that the user's own --set left out."""
    return [
        (axis, tuple(value for value in values if value not in getattr(domains, axis)))
        for axis, values in all_choices(rules)
    ]


def plan_levers(rules: RuleContext, context: CostContext, priced: PricedPlan, *, choices: Choices) -> tuple[Lever, ...]:
    """Single legal changes of a plan's axes and knobs that shrink its fullest stage, the strongest first (GiB).

    Parameters
    ----------
    rules : RuleContext
        What makes a plan legal.
    context : CostContext
        What plans are priced with.
    priced : PricedPlan
        The plan.
    choices : iterable of (axis, values)
        Values to try, one axis at a time.

    Returns
    -------
    tuple of Lever
        The best value of each axis that helps.
    """
    need = priced.memory.peak_bytes
    found: list[tuple[float, Lever]] = []
    open_rules = replace(rules, explicit_layout=True, sharding_of_one=None, dispatcher_of_one=None)
    for axis, values in choices:
        table = vary(open_rules, priced.plan, axis=axis, values=np.array(values, dtype=np.int64))
        table = table.take(check(open_rules, table).legal)
        if not len(table):
            continue
        peak = price_table(context, table, limit_bytes=0.0).peak_bytes
        best = int(peak.argmin())
        saved = bytes_to_gib(need - float(peak[best]))
        change = f"{axis}={knob_text(axis, int(getattr(table.row(best), axis)))}"
        found.append((saved, Lever(change=change, effect=f"{saved:.1f} GiB less per device")))
    helping = [pair for pair in found if pair[0] >= LEAST_EFFECT_GIB]
    return tuple(lever for _, lever in sorted(helping, key=lambda pair: -pair[0]))


def job_levers(rules: RuleContext, context: CostContext, priced: PricedPlan) -> tuple[Lever, ...]:
    """Changes of the job that shrink a plan's fullest stage: half the sequence, a leaner optimizer (GiB).

    Parameters
    ----------
    rules, context, priced
        As for `plan_levers`.

    Returns
    -------
    tuple of Lever
        Those that help and leave the plan legal.
    """
    half = replace(context.job, seq_len=max(context.job.seq_len // 2, 1))
    lean = load_software(LEAN_SOFTWARE)
    tried = (
        (f"--seq-len {half.seq_len}", replace(context, job=half)),
        (f"--software {lean.name} (bf16 moments)", replace(context, software=lean)),
    )
    found: list[tuple[float, Lever]] = []
    for change, other in tried:
        if violations(replace(rules, job=other.job, explicit_layout=True), priced.plan):
            continue
        saved = bytes_to_gib(priced.memory.peak_bytes - price_plan(other, priced.plan).memory.peak_bytes)
        if saved >= LEAST_EFFECT_GIB:
            found.append((saved, Lever(change=change, effect=f"{saved:.1f} GiB less per device")))
    return tuple(lever for _, lever in sorted(found, key=lambda pair: -pair[0]))


def price_judged(rules: RuleContext, context: CostContext, plan: Plan, *, broken: tuple[Violation, ...]) -> PricedPlan:
    """Price a plan with the rules that it breaks, the memory limit among them and what would help (seconds, bytes).

    Parameters
    ----------
    rules, context
        As for `plan_levers`.
    plan : Plan
        The plan; its layout must place all layers of the model.
    broken : tuple of Violation
        Rules that it breaks, memory left out.

    Returns
    -------
    PricedPlan
        Feasible where nothing is broken.
    """
    priced = price_plan(context, plan, violations=broken)
    if memory_violation(context, priced) is None:
        return priced
    levers = (*plan_levers(rules, context, priced, choices=all_choices(rules)), *job_levers(rules, context, priced))
    over = memory_violation(context, priced, levers=levers)
    return priced if over is None else replace(priced, feasible=False, violations=(*broken, over))
