"""Keys of a recorded plan that nobody wrote down: which values they may have had."""

from dataclasses import replace
from itertools import product

from ap_search.spec.run import Run

# Values that a trainer would try for a key that a record does not state.
CANDIDATES: dict[str, tuple[str, ...]] = {
    "mbs": ("1", "2", "4"),
    "vpp": ("1", "2", "4"),
    "dispatcher": ("alltoall", "deepep", "hybridep"),
    "recompute": ("none", "selective:core_attn", "selective:layernorm+moe_act", "full"),
}


def alternatives(run: Run) -> tuple[Run, ...]:
    """List a run once per combination of values of its unknown keys.

    Parameters
    ----------
    run : Run
        `unknown` names keys of `CANDIDATES`.

    Returns
    -------
    tuple of Run
        With plans that state those keys, and `unknown` empty; the run itself where nothing is unknown. What the plan's
        text has for an unknown key comes first.

    Notes
    -----
    A1. Who publishes a speed has tried: of what is not stated, the fastest that fits was run.
    """
    if not run.unknown:
        return (run,)
    stated = dict(pair.split("=", 1) for pair in run.plan.split(","))
    choices = []
    for key in run.unknown:
        usual = stated.get(key, CANDIDATES[key][0])
        choices.append((usual, *(value for value in CANDIDATES[key] if value != usual)))
    texts = (_completed(stated | dict(zip(run.unknown, values, strict=True))) for values in product(*choices))
    plans = (",".join(f"{key}={value}" for key, value in text.items()) for text in texts)
    return tuple(replace(run, plan=plan, unknown=()) for plan in plans)


def _completed(plan: dict[str, str]) -> dict[str, str]:
    """Give virtual stages the schedule that runs them."""
    return plan if plan.get("vpp", "1") == "1" else plan | {"schedule": "interleaved"}


def said(run: Run, chosen: Run) -> tuple[str, ...]:
    """Say which values were taken for unknown keys, one line each."""
    values = dict(pair.split("=", 1) for pair in chosen.plan.split(","))
    return tuple(f"{key}: not stated, {values[key]} as the fastest that fits" for key in run.unknown)
