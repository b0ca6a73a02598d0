"""Judge plans by the rules: which hold, what one plan breaks, what a search dropped and why."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.plan.plan import Plan
from ap_search.plan.table import IntArray, PlanTable
from ap_search.plan.text import plan_name
from ap_search.result import Rejection, Violation
from ap_search.search.rules.base import Rule, RuleContext, applicable
from ap_search.search.rules.every import RULES
from ap_search.search.rules.nearest import levers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuleMatrix:
    """Which rules hold for which plans.

    Attributes
    ----------
    rules : tuple of Rule
        The rules that apply, in order.
    holds : array of bool, shape (rules, plans)
    """

    rules: tuple[Rule, ...]
    holds: NDArray[np.bool_]

    @property
    def legal(self) -> NDArray[np.bool_]:
        """Whether all rules hold, shape (plans,)."""
        return np.asarray(self.holds.all(axis=0))

    @property
    def first_blocker(self) -> IntArray:
        """Index into `rules` of the first broken rule, `len(rules)` where none is, shape (plans,)."""
        first = np.argmin(self.holds, axis=0) if self.rules else np.zeros(self.holds.shape[1], dtype=np.int64)
        return np.where(self.legal, len(self.rules), first).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dropped:
    """What one rule dropped from a search as the first that was broken: how many candidates, and one of them."""

    rule: Rule
    count: int
    example: Plan


def check(context: RuleContext, table: PlanTable, rules: tuple[Rule, ...] = RULES) -> RuleMatrix:
    """Evaluate rules over a table of plans.

    Parameters
    ----------
    context : RuleContext
        What the plans are judged against; rules of other targets than the job's are left out.
    table : PlanTable
        Plans.
    rules : tuple of Rule
        In the order of explanation.

    Returns
    -------
    RuleMatrix
    """
    chosen = applicable(rules, context)
    holds = np.array([rule.margin(context, table) >= 0 for rule in chosen], dtype=np.bool_)
    return RuleMatrix(rules=chosen, holds=holds.reshape(len(chosen), len(table)))


def explain(context: RuleContext, rule: Rule, plan: Plan, *, rules: tuple[Rule, ...] = RULES) -> Violation:
    """Say how a plan breaks a rule, with the nearest legal values.

    Parameters
    ----------
    context : RuleContext
        What the plan is judged against.
    rule : Rule
        A rule that the plan breaks.
    plan : Plan
        The plan.
    rules : tuple of Rule
        All rules, so that the values named break as few others as can be.

    Returns
    -------
    Violation
    """
    broken = rule.describe(context, plan)
    found = levers(context, rule, plan, rules=rules)
    tail = f"; nearest legal: {', or '.join(lever.change for lever in found)}" if found else ""
    return Violation(
        rule_id=rule.id,
        message=broken.text + tail,
        demand=broken.demand,
        bound=broken.bound,
        unit=broken.unit,
        levers=found,
    )


def violations(context: RuleContext, plan: Plan, rules: tuple[Rule, ...] = RULES) -> tuple[Violation, ...]:
    """Report every rule that a plan breaks, in the order of the rules.

    Parameters
    ----------
    context : RuleContext
        What the plan is judged against.
    plan : Plan
        The plan.
    rules : tuple of Rule
        In the order of explanation.

    Returns
    -------
    tuple of Violation
        Empty for a legal plan. Whether it fits into memory is not asked here.
    """
    matrix = check(context, PlanTable.from_plans([plan]), rules)
    broken = [rule for rule, holds in zip(matrix.rules, matrix.holds[:, 0], strict=True) if not holds]
    return tuple(explain(context, rule, plan, rules=rules) for rule in broken)


def rejections(
    context: RuleContext, dropped: tuple[Dropped, ...], rules: tuple[Rule, ...] = RULES
) -> tuple[Rejection, ...]:
    """Turn what rules dropped from a search into reasons, the largest count first.

    Parameters
    ----------
    context : RuleContext
        What the plans were judged against.
    dropped : tuple of Dropped
        Counts by first broken rule.
    rules : tuple of Rule
        All rules, for the levers.

    Returns
    -------
    tuple of Rejection
        The message is the rule's sentence, then what the example does.
    """
    reasons = []
    for one in sorted(dropped, key=lambda each: -each.count):
        violation = explain(context, one.rule, one.example, rules=rules)
        reasons.append(
            Rejection(
                rule_id=one.rule.id,
                count=one.count,
                message=f"{one.rule.sentence} (example: {violation.message})",
                example=plan_name(one.example),
                levers=violation.levers,
            )
        )
    return tuple(reasons)
