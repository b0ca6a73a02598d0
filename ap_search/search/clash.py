"""Why no plan is legal: the smallest set of rules and settings that cannot hold together, and what would part them."""

import math
from dataclasses import dataclass, replace
from itertools import islice, product

from ap_search.plan.plan import Schedule
from ap_search.plan.text import knob_text
from ap_search.result import ClashingRule, Lever
from ap_search.search.degrees import DegreeModel, smallest_hitting_set
from ap_search.search.domains import SearchDomains, default_domains, search_domains
from ap_search.search.rules import MESH_AXES, RULES, STAGES, Rule, RuleContext, applicable
from ap_search.search.solver import mesh_candidates
from ap_search.search.tables import settle_free_knobs

_MAX_TRIES = 12

_JOB_REASONS = (
    ("global_batch", {"batch", "vpp_microbatches", "dualpipe"}),
    ("seq_len", {"sequence_cp", "sequence_tp", "token_dispatch"}),
    ("devices", {"world_dense", "world_expert"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Rules and settings that cannot hold together, none of which can be left out, and changes that would help.

    A setting is named `set:ep`, its sentence is what the user wrote. Empty where some plan is legal.
    """

    clash: tuple[ClashingRule, ...]
    levers: tuple[Lever, ...]


def smallest_clash(context: RuleContext, domains: SearchDomains, rules: tuple[Rule, ...] = RULES) -> Clash:
    """Find the fewest rules and settings that cannot hold together.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    domains : SearchDomains
        Candidates; those of the axes that the user fixed are settings, the others are given.
    rules : tuple of Rule
        In the order of explanation.

    Returns
    -------
    Clash

    Notes
    -----
    A1. Each rule and setting is posted to CP-SAT under a literal. A set of literals that hits every set that some
    solution leaves false, and that CP-SAT's assumptions refute, is a smallest clash (implicit hitting sets).
    """
    names, model = _posted(context, domains, applicable(rules, context))
    if model.clash(range(len(names))) is None:
        return Clash(clash=(), levers=())
    relaxed: list[tuple[int, ...]] = []
    chosen: tuple[int, ...] = ()
    while model.clash(chosen) is None:
        relaxed.append(model.unmet(chosen))
        chosen = smallest_hitting_set(relaxed)
    members = tuple(names[number] for number in chosen)
    return Clash(clash=members, levers=_levers(context, domains, members=members, rules=rules))


def _posted(
    context: RuleContext, domains: SearchDomains, rules: tuple[Rule, ...]
) -> tuple[list[ClashingRule], DegreeModel]:
    """Post every rule and setting; name them in the order of their literals."""
    candidates = settle_free_knobs(context, _open_candidates(context, domains), rules, fixed=domains.fixed)
    model = DegreeModel(candidates, devices=context.job.devices)
    names: list[ClashingRule] = []
    for axis in domains.fixed:
        model.restrict(f"set:{axis}", axis, getattr(domains, axis))
        names.append(ClashingRule(rule_id=f"set:{axis}", sentence=f"--set {domains.text(axis)}"))
    for rule in rules:
        model.post(context, rule)
        names.append(ClashingRule(rule_id=rule.id, sentence=rule.sentence))
    return names, model


def _open_candidates(context: RuleContext, domains: SearchDomains) -> dict[str, tuple[int, ...]]:
    """List the candidates of every axis, those that the user replaced among them."""
    defaults = default_domains(context)
    meshes = mesh_candidates(context, replace(defaults, dp=()))
    schedules = (int(Schedule.ONE_F_ONE_B), int(Schedule.INTERLEAVED))
    knobs = {axis: getattr(defaults, axis) or schedules for axes in STAGES[1:] for axis in axes}
    given = {axis: getattr(domains, axis, ()) for axis in (*meshes, *knobs)}
    return {axis: tuple(dict.fromkeys((*given[axis], *values))) for axis, values in (meshes | knobs).items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question:
    """A clash in need of a change: what was asked, and which part of it the change must mend."""

    context: RuleContext
    domains: SearchDomains
    rules: tuple[Rule, ...]

    def answered(self) -> bool:
        """Tell whether some plan obeys the rules with these candidates."""
        meshes = mesh_candidates(self.context, self.domains)
        defaults = _open_candidates(self.context, self.domains)
        knobs = {axis: getattr(self.domains, axis) or defaults[axis] for axes in STAGES[1:] for axis in axes}
        rules = applicable(self.rules, self.context)
        candidates = settle_free_knobs(self.context, meshes | knobs, rules, fixed=self.domains.fixed)
        model = DegreeModel(candidates, devices=self.context.job.devices)
        numbers = [model.post(self.context, rule) for rule in rules]
        return model.clash(numbers) is None

    def with_values(self, axis: str, value: int) -> "_Question":
        """Ask the same with one value of an axis."""
        return replace(self, domains=replace(self.domains, **{axis: (value,)}, fixed=self.domains.fixed))

    def with_job(self, name: str, value: int) -> "_Question":
        """Ask the same of another batch, sequence or device count; candidates that nobody fixed follow from it."""
        figures = {each: getattr(self.context.job, each) for each in ("devices", "global_batch", "seq_len")}
        figures[name] = value
        job = replace(
            self.context.job,
            devices=figures["devices"],
            global_batch=figures["global_batch"],
            seq_len=figures["seq_len"],
        )
        context = replace(self.context, job=job)
        fixed = [(axis, getattr(self.domains, axis)) for axis in self.domains.fixed]
        return replace(self, context=context, domains=search_domains(context, fixed))


def _levers(
    context: RuleContext, domains: SearchDomains, *, members: tuple[ClashingRule, ...], rules: tuple[Rule, ...]
) -> tuple[Lever, ...]:
    """Name the nearest change of each setting, and of the job, that makes a plan legal, or at least ends this clash."""
    named = {one.rule_id for one in members}
    settings = [axis for axis in domains.fixed if f"set:{axis}" in named]
    free = [(axis, getattr(domains, axis)) for axis in settings]
    whole = _Question(context=context, domains=domains, rules=rules)
    part = _Question(
        context=context,
        domains=search_domains(context, free),
        rules=tuple(rule for rule in rules if rule.id in named),
    )
    for question, effect in ((whole, "some plan is legal"), (part, "this clash is gone, another remains")):
        found = [_setting_change(question, axis) for axis in settings]
        found += [_job_change(question, name) for name, reasons in _JOB_REASONS if reasons & named]
        if any(found):
            return tuple(Lever(change=change, effect=effect) for change in found if change)
    return ()


def _setting_change(question: _Question, axis: str) -> str:
    """Name the two values of a fixed axis, nearest to those given, that answer the question; empty where none does."""
    given = getattr(question.domains, axis)
    others = [value for value in _open_candidates(question.context, question.domains)[axis] if value not in given]
    others.sort(key=lambda value: min(abs(value - one) for one in given))
    values = (value for value in others[:_MAX_TRIES] if question.with_values(axis, value).answered())
    return " or ".join(f"--set {axis}={knob_text(axis, value)}" for value in sorted(islice(values, 2)))


def _job_change(question: _Question, name: str) -> str:
    """Name the two figures of the job, nearest to the one given, that answer the question; empty where none does."""
    value = getattr(question.context.job, name)
    multiples = {each // unit * unit for unit in _units(question, name) for each in (value, value + unit)} - {0, value}
    nearest = sorted(multiples, key=lambda each: abs(each - value))[:_MAX_TRIES]
    figures = (each for each in nearest if question.with_job(name, each).answered())
    return " or ".join(f"{name}={figure}" for figure in sorted(islice(figures, 2)))


def _units(question: _Question, name: str) -> set[int]:
    """List the numbers that a figure of the job may have to be a multiple of."""
    axis = mesh_candidates(question.context, question.domains)
    if name == "global_batch":
        return {mbs * dp for mbs in question.domains.mbs for dp in axis["dp"]}
    if name == "seq_len":
        return {2 * cp * tp for cp in axis["cp"] for tp in axis["tp"]}
    fixed = {each: getattr(question.domains, each) if each in question.domains.fixed else (1,) for each in MESH_AXES}
    dense, expert = (
        product(*(fixed[each] for each in axes)) for axes in (("tp", "cp", "pp", "dp"), ("ep", "etp", "pp"))
    )
    return {math.lcm(math.prod(one), math.prod(two)) for one, two in product(dense, expert)}
