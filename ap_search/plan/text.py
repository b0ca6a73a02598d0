"""Plans as text: short names, `axis=value` lists, the words of each knob, candidate lists."""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from ap_search.errors import Fault, SpecError
from ap_search.plan.layout import layout_text, padded_layout, parse_layout
from ap_search.plan.plan import Dispatcher, Layout, Plan, Recompute, Schedule, Sharding
from ap_search.spec.blocks import Model

MAX_DEGREE = 10**6
MAX_VIRTUAL_STAGES = 10**5

AXES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "mbs")
KNOBS = ("sharding", "recompute", "dispatcher", "schedule")
SETTABLE = (*AXES, *KNOBS)
PLAN_KEYS = (*SETTABLE, "sp", "stage_layers")

# Each word stands at its enumeration's value.
SHARDING_VALUES = ("none", "zero1", "zero2", "zero3", "hsdp")
DISPATCHER_VALUES = ("allgather", "alltoall", "deepep", "hybridep")
SCHEDULE_VALUES = ("1f1b", "interleaved", "gpipe", "zb_h1", "dualpipe")
# Each module stands at its flag's bit.
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")

_SELECTIVE = "selective:"
_RECOMPUTE_LEGAL = f"none full {_SELECTIVE}a+b with a, b of {' '.join(RECOMPUTE_MODULES)}"
_DERIVED = ("edp", "num_microbatches", "devices")
_DEGREE_TOKEN = re.compile(rf"({'|'.join(sorted(AXES, key=len, reverse=True))})([0-9]+)")
_WORD_TOKENS = {
    **{word: ("sharding", word) for word in SHARDING_VALUES},
    **{word: ("dispatcher", word) for word in DISPATCHER_VALUES},
    **{word: ("schedule", word) for word in SCHEDULE_VALUES},
    "full": ("recompute", "full"),
    "nosp": ("sp", "0"),
}


def sharding_text(value: Sharding) -> str:
    """Write a sharding as one of `SHARDING_VALUES`."""
    return SHARDING_VALUES[value]


def dispatcher_text(value: Dispatcher) -> str:
    """Write a dispatcher as one of `DISPATCHER_VALUES`."""
    return DISPATCHER_VALUES[value]


def schedule_text(value: Schedule) -> str:
    """Write a schedule as one of `SCHEDULE_VALUES`."""
    return SCHEDULE_VALUES[value]


def recompute_text(value: Recompute) -> str:
    """Write recomputation as `none`, `full`, or `selective:` and its modules in the order of `RECOMPUTE_MODULES`."""
    if Recompute.FULL in value:
        return "full"
    modules = [module for bit, module in enumerate(RECOMPUTE_MODULES) if value & (1 << bit)]
    return _SELECTIVE + "+".join(modules) if modules else "none"


def knob_text(key: str, value: int) -> str:
    """Write the value of an axis or knob as `--set` and `--plan` take it."""
    if key == "recompute":
        return recompute_text(Recompute(value))
    words = {"sharding": SHARDING_VALUES, "dispatcher": DISPATCHER_VALUES, "schedule": SCHEDULE_VALUES}.get(key)
    return words[value] if words else str(value)


def parse_sharding(text: str, *, path: str = "sharding") -> Sharding:
    """Read one of `SHARDING_VALUES`; SpecError names them otherwise."""
    return Sharding(_word_index(text, SHARDING_VALUES, path=path))


def parse_dispatcher(text: str, *, path: str = "dispatcher") -> Dispatcher:
    """Read one of `DISPATCHER_VALUES`; SpecError names them otherwise."""
    return Dispatcher(_word_index(text, DISPATCHER_VALUES, path=path))


def parse_schedule(text: str, *, path: str = "schedule") -> Schedule:
    """Read one of `SCHEDULE_VALUES`; SpecError names them otherwise."""
    return Schedule(_word_index(text, SCHEDULE_VALUES, path=path))


def parse_recompute(text: str, *, path: str = "recompute") -> Recompute:
    """Read `none`, `full` or `selective:a+b`; SpecError names every unknown module."""
    if text in ("none", "full"):
        return Recompute.FULL if text == "full" else Recompute.NONE
    if not text.startswith(_SELECTIVE):
        raise SpecError(path, f"unknown value {_shown(text)}", _RECOMPUTE_LEGAL)
    modules = text.removeprefix(_SELECTIVE).split("+")
    unknown = [module for module in modules if module not in RECOMPUTE_MODULES]
    if unknown:
        reasons = (f"unknown module {_shown(module)}{_nearest(module, RECOMPUTE_MODULES)}" for module in unknown)
        raise SpecError.of(Fault(path=path, reason=reason, legal=" ".join(RECOMPUTE_MODULES)) for reason in reasons)
    value = Recompute.NONE
    for module in modules:
        value |= Recompute(1 << RECOMPUTE_MODULES.index(module))
    return value


def _word_index(text: str, words: tuple[str, ...], *, path: str) -> int:
    """Find a word among the legal ones."""
    if text not in words:
        raise SpecError(path, f"unknown value {_shown(text)}{_nearest(text, words)}", " ".join(words))
    return words.index(text)


def _parse_degree(text: str, *, path: str) -> int:
    """Read a positive integer up to `MAX_DEGREE`, written in plain digits."""
    digits = text.lstrip("0") if re.fullmatch("[0-9]+", text) else ""
    if not digits:
        raise SpecError(path, f"{_shown(text)} is no positive integer", f"1 to {MAX_DEGREE}")
    if len(digits) > len(str(MAX_DEGREE)) or int(digits) > MAX_DEGREE:
        raise SpecError(path, f"{_shown(text)} is too large", f"1 to {MAX_DEGREE}")
    return int(digits)


def _parse_switch(text: str, *, path: str) -> int:
    """Read 0 or 1."""
    return _word_index(text, ("0", "1"), path=path)


def _parse_value(key: str, text: str, *, path: str) -> int:
    """Read the value of an axis or knob as an integer, knobs as their enumeration's value."""
    readers: dict[str, Callable[..., int]] = {
        "sharding": parse_sharding,
        "recompute": parse_recompute,
        "dispatcher": parse_dispatcher,
        "schedule": parse_schedule,
        "sp": _parse_switch,
    }
    return int(readers.get(key, _parse_degree)(text, path=path))


def _shown(text: str) -> str:
    """Quote what the user wrote, cut to a length that fits a line."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _nearest(text: str, options: Iterable[str]) -> str:
    """Name the most similar legal word, where one is similar."""
    near = get_close_matches(text[:40], options, n=1, cutoff=0.55)
    return f", nearest is {near[0]!r}" if near else ""


def parse_knob_values(axis: str, text: str, *, path: str = "--set") -> tuple[int, ...]:
    """Read the candidates of one axis or knob.

    Parameters
    ----------
    axis : str
        One of `SETTABLE`.
    text : str
        Values joined by commas, such as `8,16` or `none,selective:moe_act+layernorm`.
    path : str
        Where the text came from, for the error.

    Returns
    -------
    tuple of int
        Distinct values in the order given; knobs as their enumeration's value.

    Raises
    ------
    SpecError
        The axis is unknown, or values are: all faults at once.
    """
    if axis not in SETTABLE:
        raise SpecError.of([_unknown_axis(axis, SETTABLE, path=path)])
    values: list[int] = []
    faults: list[Fault] = []
    for piece in text.split(","):
        try:
            values.append(_parse_value(axis, piece.strip(), path=f"{path} {axis}"))
        except SpecError as error:
            faults.extend(error.faults)
    if faults:
        raise SpecError.of(faults)
    return tuple(dict.fromkeys(values))


def _unknown_axis(axis: str, legal: tuple[str, ...], *, path: str) -> Fault:
    """Say that an axis or knob does not exist, or follows from the others."""
    if axis in _DERIVED:
        return Fault(path=path, reason=f"{axis} follows from the other axes and cannot be given", legal=" ".join(legal))
    return Fault(path=path, reason=f"unknown axis {_shown(axis)}{_nearest(axis, legal)}", legal=" ".join(legal))


def plan_name(plan: Plan) -> str:
    """Write the short name of a plan, such as `tp2-pp8-vpp2-dp16-ep8-mbs1-zero1-alltoall`.

    Parameters
    ----------
    plan : Plan
        Any plan whose `edp` and `num_microbatches` follow from the device count and the batch.

    Returns
    -------
    str
        Distinct for distinct plans of one device count and batch; `parse_plan` reads it back.

    Notes
    -----
    A1. Left out where they say nothing new: degrees of 1 but for tp, pp, dp, mbs; recomputation `none`; the dispatcher
    `alltoall` without expert parallelism; the schedule that vpp implies; the even layout; sequence parallelism with
    tp > 1.
    """
    parts = [f"tp{plan.tp}", f"cp{plan.cp}" if plan.cp > 1 else "", f"pp{plan.pp}"]
    parts += [f"vpp{plan.vpp}" if plan.vpp > 1 else "", f"dp{plan.dp}"]
    parts += [f"{axis}{degree}" for axis, degree in (("ep", plan.ep), ("etp", plan.etp)) if degree > 1]
    parts += [f"mbs{plan.mbs}", sharding_text(plan.sharding), *_optional_parts(plan)]
    return "-".join(part for part in parts if part)


def _optional_parts(plan: Plan) -> list[str]:
    """Write the knobs that a name holds only where they differ from what a reader would expect."""
    parts = []
    if plan.recompute != Recompute.NONE:
        parts.append(recompute_text(plan.recompute).replace(_SELECTIVE, "sel:"))
    if plan.ep * plan.etp > 1 or plan.dispatcher != Dispatcher.ALLTOALL:
        parts.append(dispatcher_text(plan.dispatcher))
    if plan.schedule != _default_schedule(plan.vpp):
        parts.append(schedule_text(plan.schedule))
    if not plan.layout.even:
        parts.append("L" + layout_text(plan.layout))
    if plan.tp > 1 and not plan.sequence_parallel:
        parts.append("nosp")
    return parts


def _default_schedule(vpp: int) -> Schedule:
    """Give the schedule of a plan that names none."""
    return Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B


def parse_plan(
    text: str, *, devices: int, global_batch: int, default_layout: Callable[[int, int], Layout | None], model: Model
) -> Plan:
    """Read a plan from `axis=value,...` or from its short name.

    Parameters
    ----------
    text : str
        Keys of `PLAN_KEYS`, each at most once; or what `plan_name` wrote.
    devices, global_batch : int
        Devices of the job, and sequences per step.
    default_layout : callable
        Gives the layout of (pp, vpp), no more virtual stages than layers, where no `stage_layers` is given.
    model : Model
        Its layer counts.

    Returns
    -------
    Plan
        Whether the numbers divide is for the rules to judge: quotients are rounded down, to at least 1.

    Raises
    ------
    SpecError
        The text cannot be read: all faults at once.

    Notes
    -----
    A1. Absent axes are 1, etp included; dp is devices/(tp*cp*pp), edp is dp*cp*tp/(ep*etp), micro-batches are
    global_batch/(mbs*dp). Absent knobs: mbs=1 sharding=zero1 recompute=none dispatcher=alltoall, schedule 1f1b, or
    interleaved with vpp > 1. Sequence parallelism is on where tp > 1 unless `sp=0`, and off where tp = 1.
    A2. More virtual stages than layers give one layer each to the first ones, so that the plan can be priced (a rule
    refuses it).
    """
    if not isinstance(text, str):
        raise SpecError("--plan", f"{_shown(str(text))} is no text", "axis=value,... or a name such as tp2-pp4-dp8")
    faults: list[Fault] = []
    pairs = _assignments(text, faults) if "=" in text else _name_tokens(text, faults)
    values = _read_values(pairs, faults)
    layout = _read_layout(dict(pairs), values, faults, default_layout=default_layout, model=model)
    if faults or layout is None:
        raise SpecError.of(faults)
    return _complete(values, layout, devices=devices, global_batch=global_batch)


def names_layout(text: str) -> bool:
    """Tell whether a plan's text names its stage layout (`stage_layers=...`, or `L...` in a short name).

    Parameters
    ----------
    text : str
        As for `parse_plan`.

    Returns
    -------
    bool
    """
    pairs = _assignments(text, []) if "=" in text else _name_tokens(text, [])
    return any(key == "stage_layers" for key, _ in pairs)


def _assignments(text: str, faults: list[Fault]) -> list[tuple[str, str]]:
    """Split `axis=value,...`; add a fault for each piece that is none, or whose key is unknown or repeated."""
    pairs: dict[str, str] = {}
    for piece in text.split(","):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals:
            faults.append(Fault(path="--plan", reason=f"{_shown(piece.strip())} is no axis=value"))
        elif key not in PLAN_KEYS:
            faults.append(_unknown_axis(key, PLAN_KEYS, path="--plan"))
        elif key in pairs:
            faults.append(Fault(path=f"--plan {key}", reason="is given twice"))
        else:
            pairs[key] = value
    return list(pairs.items())


def _name_tokens(text: str, faults: list[Fault]) -> list[tuple[str, str]]:
    """Split a short name into the assignments it stands for; add a fault for each unknown or repeated part."""
    pairs: dict[str, str] = {}
    for token in text.strip().split("-"):
        pair = _token_pair(token)
        if pair is None:
            reason = f"{_shown(token)} is no part of a plan's short name{_nearest(token, _WORD_TOKENS)}"
            faults.append(Fault(path="--plan", reason=reason, legal="axis=value,... or a name such as tp2-pp4-dp8"))
        elif pair[0] in pairs:
            faults.append(Fault(path=f"--plan {pair[0]}", reason="is given twice"))
        else:
            pairs[pair[0]] = pair[1]
    return list(pairs.items())


def _token_pair(token: str) -> tuple[str, str] | None:
    """Read one part of a short name as key and value, or None where it is no such part."""
    degree = _DEGREE_TOKEN.fullmatch(token)
    if degree:
        return degree[1], degree[2]
    if token.startswith("sel:"):
        return "recompute", _SELECTIVE + token.removeprefix("sel:")
    if token.startswith("L"):
        return "stage_layers", token.removeprefix("L")
    return _WORD_TOKENS.get(token)


def _read_values(pairs: list[tuple[str, str]], faults: list[Fault]) -> dict[str, int]:
    """Read every value but the layout; add the faults of those that cannot be read."""
    values: dict[str, int] = {}
    for key, text in pairs:
        if key == "stage_layers":
            continue
        try:
            values[key] = _parse_value(key, text, path=f"--plan {key}")
        except SpecError as error:
            faults.extend(error.faults)
    return values


def _read_layout(
    texts: dict[str, str],
    values: dict[str, int],
    faults: list[Fault],
    *,
    default_layout: Callable[[int, int], Layout | None],
    model: Model,
) -> Layout | None:
    """Read or derive the layout; None, with a fault, where it or the stages it needs cannot be read."""
    if any(key in texts and key not in values for key in ("pp", "vpp")):
        return None
    pp, vpp = values.get("pp", 1), values.get("vpp", 1)
    if pp * vpp > MAX_VIRTUAL_STAGES:
        faults.append(Fault(path="--plan pp", reason=f"pp*vpp = {pp * vpp}", legal=f"at most {MAX_VIRTUAL_STAGES}"))
        return None
    if "stage_layers" not in texts:
        if pp * vpp > model.num_layers:
            return padded_layout(model.num_layers, pp, vpp)
        return default_layout(pp, vpp)
    numbers = {"num_layers": model.num_layers, "mtp_layers": model.mtp_layers, "pp": pp, "vpp": vpp}
    try:
        return parse_layout(texts["stage_layers"], **numbers, path="--plan stage_layers")
    except SpecError as error:
        faults.extend(error.faults)
        return None


def _complete(values: dict[str, int], layout: Layout, *, devices: int, global_batch: int) -> Plan:
    """Fill in what was left out and what follows."""
    axes = {axis: values.get(axis, 1) for axis in AXES}
    tp, cp, vpp = axes["tp"], axes["cp"], axes["vpp"]
    axes["dp"] = values.get("dp", max(1, devices // (tp * cp * axes["pp"])))
    return Plan(
        **axes,
        edp=max(1, axes["dp"] * cp * tp // (axes["ep"] * axes["etp"])),
        num_microbatches=max(1, global_batch // (axes["mbs"] * axes["dp"])),
        sequence_parallel=tp > 1 and bool(values.get("sp", 1)),
        sharding=Sharding(values.get("sharding", Sharding.ZERO1)),
        recompute=Recompute(values.get("recompute", Recompute.NONE)),
        dispatcher=Dispatcher(values.get("dispatcher", Dispatcher.ALLTOALL)),
        schedule=Schedule(values.get("schedule", _default_schedule(vpp))),
        layout=layout,
    )
