"""Candidate values of every axis and knob: the user's where given, otherwise documented defaults."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ap_search.errors import SpecError
from ap_search.plan.plan import Dispatcher, Recompute, Sharding
from ap_search.plan.text import SETTABLE, dispatcher_text, knob_text
from ap_search.search.rules import RuleContext
from ap_search.search.rules.sizes import expert_widths, experts, moe_kinds
from ap_search.search.rules.state import recompute_modules
from ap_search.spec.blocks import Model
from ap_search.spec.machine import Machine

MAX_TP = 16
MAX_CP = 16
MIN_TOKENS_PER_CP_RANK = 2048
MIN_EXPERT_SLICE = 1024
DEEPEP_DOMAIN = 8
VPP_VALUES = (1, 2, 3, 4, 5, 6, 8, 10)
MBS_VALUES = (1, 2, 4, 8)
SHARDING_VALUES = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.HSDP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchDomains:
    """Candidate values per axis and knob; knobs hold their enumeration's value.

    `dp` and `schedule` are empty where nobody named candidates: dp then follows from the devices, the schedule from
    vpp. `fixed` names the axes whose candidates the user gave: nothing outside them is ever returned.
    """

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    mbs: tuple[int, ...]
    vpp: tuple[int, ...]
    sharding: tuple[int, ...]
    dispatcher: tuple[int, ...]
    recompute: tuple[int, ...]
    dp: tuple[int, ...] = ()
    schedule: tuple[int, ...] = ()
    fixed: tuple[str, ...] = ()

    def text(self, axis: str) -> str:
        """Write the candidates of one axis as `--set` takes them."""
        return f"{axis}={','.join(knob_text(axis, value) for value in getattr(self, axis))}"


def search_domains(context: RuleContext, chosen: Sequence[tuple[str, tuple[int, ...]]] = ()) -> SearchDomains:
    """Build the candidates of a search.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.
    chosen : sequence of (axis, values)
        What the user set, values as `parse_knob_values` reads them; each axis at most once.

    Returns
    -------
    SearchDomains
        The user's candidates replace the defaults entirely.

    Raises
    ------
    SpecError
        An axis is unknown, given twice, or given without a value.
    """
    names = [axis for axis, _ in chosen]
    for axis, values in chosen:
        if axis not in SETTABLE:
            raise SpecError(f"--set {axis}", "unknown axis or knob", " ".join(SETTABLE))
        if names.count(axis) > 1:
            raise SpecError(f"--set {axis}", "is given twice", f"one list, such as {axis}=V,V")
        if not values:
            raise SpecError(f"--set {axis}", "has no value", f"{axis}=V[,V...]")
    given = {axis: tuple(dict.fromkeys(values)) for axis, values in chosen}
    return replace(default_domains(context), **given, fixed=tuple(axis for axis in SETTABLE if axis in given))


def default_domains(context: RuleContext) -> SearchDomains:
    """Choose candidates for a search in which the user set nothing.

    Parameters
    ----------
    context : RuleContext
        Model, machine and job.

    Returns
    -------
    SearchDomains

    Notes
    -----
    A1. tp: divisors of the devices up to the scale-up domain, at most 16.
    A2. cp: divisors of the devices up to 16 that leave a rank 2,048 tokens of a sequence (1 always).
    A3. pp: divisors of the devices up to the number of layers. ep: divisors of the experts, at most the devices.
    A4. etp: the candidates of tp that divide the experts' width and leave a slice 1,024 wide (1 always).
    A5. vpp: 1 2 3 4 5 6 8 10, as far as two stages have the layers. mbs: 1 2 4 8.
    A6. Sharding zero1 zero2 zero3 hsdp; sharding none only where the user names it.
    A7. Dispatchers for MoE: alltoall, allgather, and the deduplicating one made for the scale-up domain: deepep up to 8
    devices, hybridep beyond, if the devices have its kernels. Dense models: alltoall, which is not used.
    A8. Recompute none, full, and up to three selective sets, see `recompute_sets`.
    A9. Schedules 1f1b and, with vpp > 1, interleaved; gpipe, zb_h1 and dualpipe only where the user names them.
    """
    devices, layers, domain = context.job.devices, context.model.num_layers, context.machine.devices_per_domain
    tp = divisors(devices, limit=min(domain, MAX_TP))
    moe = bool(moe_kinds(context.model))
    return SearchDomains(
        tp=tp,
        cp=divisors(devices, limit=min(MAX_CP, context.job.seq_len // MIN_TOKENS_PER_CP_RANK)),
        pp=divisors(devices, limit=layers),
        ep=divisors(math.gcd(*(count for count, _ in experts(context.model))), limit=devices) if moe else (1,),
        etp=_expert_slices(context.model, tp) if moe else (1,),
        mbs=MBS_VALUES,
        vpp=tuple(value for value in VPP_VALUES if value == 1 or 2 * value <= layers),
        sharding=tuple(int(value) for value in SHARDING_VALUES),
        dispatcher=tuple(
            int(value) for value in (_moe_dispatchers(context.machine) if moe else (Dispatcher.ALLTOALL,))
        ),
        recompute=tuple(int(value) for value in recompute_sets(context)),
    )


def _expert_slices(model: Model, degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the degrees that cut every expert into equal slices that are not too thin for a GEMM."""
    width = math.gcd(*(each for each, _ in expert_widths(model)))
    return tuple(
        degree for degree in degrees if degree == 1 or (width % degree == 0 and width >= degree * MIN_EXPERT_SLICE)
    )


def _moe_dispatchers(machine: Machine) -> tuple[Dispatcher, ...]:
    """List the dispatchers worth a look for a scale-up domain of this size, those that the devices have."""
    fused = Dispatcher.DEEPEP if machine.devices_per_domain <= DEEPEP_DOMAIN else Dispatcher.HYBRIDEP
    present = (fused,) if dispatcher_text(fused) in machine.fused_dispatchers else ()
    return (Dispatcher.ALLTOALL, Dispatcher.ALLGATHER, *present)


def recompute_sets(context: RuleContext) -> tuple[Recompute, ...]:
    """List the recompute sets worth a look for this model.

    Parameters
    ----------
    context : RuleContext
        The model.

    Returns
    -------
    tuple of Recompute
        none and full; MoE: moe_act, moe_act with layernorm (and mla_up_proj), moe with mlp; dense: mlp, and for MLA
        layernorm with mla_up_proj.

    Notes
    -----
    A1. `core_attn` is left out: with fused attention it saves next to nothing (Megatron-LM warns so itself).
    """
    present = recompute_modules(context.model)
    norms = (Recompute.LAYERNORM | Recompute.MLA_UP_PROJ) & present
    mlp = Recompute.MLP & present
    moe = bool(Recompute.MOE & present)
    if moe:
        selective = [Recompute.MOE_ACT, Recompute.MOE_ACT | norms, Recompute.MOE | mlp]
    else:
        selective = [mlp, norms] if Recompute.MLA_UP_PROJ in present else [mlp]
    return tuple(dict.fromkeys([Recompute.NONE, *selective, Recompute.FULL]))


def divisors(number: int, *, limit: int) -> tuple[int, ...]:
    """List the divisors of a positive number up to a limit, ascending (1 always)."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    both = {*small, *(number // value for value in small)}
    return tuple(sorted(value for value in both if value <= max(limit, 1)))
