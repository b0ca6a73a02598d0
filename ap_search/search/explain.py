"""Why a search came back empty, and what would help: clash of rules, nearest plan, levers, smallest device count."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from ap_search.cost.context import CostContext
from ap_search.cost.state import ShardDegrees, param_bytes
from ap_search.cost.step import price_table
from ap_search.limits import MAX_DEVICES
from ap_search.plan.plan import Recompute
from ap_search.plan.table import PlanTable
from ap_search.result import ClashingRule, Infeasibility, Lever
from ap_search.search.clash import smallest_clash
from ap_search.search.domains import SearchDomains, search_domains
from ap_search.search.engine import Progress, Ranking
from ap_search.search.layouts import LayoutMaker, layout_maker
from ap_search.search.levers import choices_outside, job_levers, plan_levers
from ap_search.search.rules import RuleContext
from ap_search.search.space import legal_plans
from ap_search.spec.parameters import params_mtp, params_total
from ap_search.units import GIB, bytes_to_gib

MAX_DEVICES_FACTOR = 64
COUNTS_ONE_BY_ONE = 48
STEPS_PER_DOUBLING = 16
PROBE_ROWS = 8192
MEMORY_HEADROOM_GIB = 0.1


def explain_empty(
    rules: RuleContext, context: CostContext, domains: SearchDomains, *, ranking: Ranking, progress: Progress
) -> Infeasibility:
    """Explain a search that found nothing that fits.

    Parameters
    ----------
    rules : RuleContext
        What makes a plan legal.
    context : CostContext
        What plans are priced with.
    domains : SearchDomains
        Candidates that were searched.
    ranking : Ranking
        What the search found.
    progress : callable
        Told what is being done and which share of it is done, 0..1.

    Returns
    -------
    Infeasibility
        Where no plan is legal: the smallest set of rules that clash. Otherwise the plan nearest to fitting, what would
        make it smaller, and the smallest device count on which something fits.
    """
    smallest = _smallest_devices(rules, context, domains, progress=progress)
    if ranking.nearest is None:
        found = smallest_clash(rules, domains)
        return Infeasibility(
            message="no plan is legal: the rules below cannot hold together",
            clash=tuple(ClashingRule(rule_id=one.rule_id, sentence=one.sentence) for one in found.clash),
            levers=found.levers,
            smallest_devices=smallest,
        )
    need, limit = ranking.nearest.memory.peak_bytes, context.job.memory_limit_bytes
    missing = bytes_to_gib(need - limit)
    return Infeasibility(
        message=(
            f"none of {len(ranking.table):,} legal plans fits: the nearest needs {bytes_to_gib(need):.1f} GiB, "
            f"{missing:.1f} GiB more than the limit of {bytes_to_gib(limit):.1f} GiB"
        ),
        nearest=ranking.nearest,
        levers=(
            *plan_levers(rules, context, ranking.nearest, choices=choices_outside(rules, domains)),
            *job_levers(rules, context, ranking.nearest),
            _limit_lever(need, limit),
        ),
        smallest_devices=smallest,
    )


def _limit_lever(need: int, limit: int) -> Lever:
    """Name the memory limit on which the nearest plan would fit."""
    wanted = need / GIB + MEMORY_HEADROOM_GIB
    return Lever(
        change=f"devices with {wanted:.1f} GiB (--memory-limit-gib {wanted:.1f})",
        effect=f"the nearest plan fits: {bytes_to_gib(need - limit):.1f} GiB more per device",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Probe:
    """Asks whether anything fits on a number of devices, with the most saving values of the knobs that are open."""

    rules: RuleContext
    context: CostContext
    domains: SearchDomains

    def fits(self, devices: int) -> bool:
        """Whether the sparing plans on `devices` devices include one that fits."""
        job = replace(self.context.job, devices=devices)
        rules = replace(self.rules, job=job)
        context = replace(self.context, job=job)
        table = legal_plans(rules, self._sparing(rules), layout_for=self._layouts())
        parts = (table.take(np.arange(start, min(start + PROBE_ROWS, len(table)))) for start in _starts(len(table)))
        return any(_some_fit(context, part) for part in parts)

    @property
    def state_bytes(self) -> float:
        """Bytes of model state in all if nothing is held twice: no plan needs less over all its devices."""
        model, software = self.context.model, self.context.software
        kept = param_bytes(software, ShardDegrees(weights=1, gradients=1, optimizer=1))
        return (params_total(model) + params_mtp(model)) * float(kept.total)

    def _layouts(self) -> LayoutMaker:
        return layout_maker(self.context)

    def _sparing(self, rules: RuleContext) -> SearchDomains:
        """Keep what the user fixed; of the rest the smallest micro-batch, one chunk per stage, full recompute."""
        fresh = search_domains(rules)
        kept = {axis: getattr(self.domains, axis) for axis in self.domains.fixed}
        sparing = {
            "mbs": fresh.mbs[:1],
            "vpp": (1,),
            "recompute": (int(Recompute.FULL),),
        }
        return replace(fresh, **{**sparing, **kept}, fixed=self.domains.fixed)


def _starts(rows: int) -> range:
    """List where parts of a table begin."""
    return range(0, rows, PROBE_ROWS)


def _some_fit(context: CostContext, table: PlanTable) -> bool:
    """Tell whether a plan fits; none is timed."""
    peak = price_table(context, table, limit_bytes=0.0).peak_bytes
    return bool((peak <= context.job.memory_limit_bytes).any())


def _smallest_devices(
    rules: RuleContext, context: CostContext, domains: SearchDomains, *, progress: Progress
) -> int | None:
    """Find the smallest number of devices on which a sparing plan fits, whatever number was asked about, or None.

    Every count is tried from the least that could hold the model's state; after `COUNTS_ONE_BY_ONE` of them whole
    scale-up domains, in steps of a sixteenth.
    """
    probe = _Probe(rules=rules, context=context, domains=domains)
    room = context.job.memory_limit_bytes - context.job.reserve_bytes
    if room <= 0:
        return None
    least = max(1, ceil(probe.state_bytes / room))
    for count in _counts(least, context.machine.devices_per_domain):
        progress(f"trying {count} devices", 0.8)
        if count != context.job.devices and probe.fits(count):
            return count
    return None


def _counts(least: int, domain: int) -> Iterator[int]:
    """List device counts to try, ascending."""
    yield from range(least, least + COUNTS_ONE_BY_ONE)
    count = -(-(least + COUNTS_ONE_BY_ONE) // domain) * domain
    while count <= min(least * MAX_DEVICES_FACTOR, MAX_DEVICES):
        yield count
        count += max(1, count // (STEPS_PER_DOUBLING * domain)) * domain
