"""What the regression files hold: our own ranking of every model preset, rounded, and how two rankings differ.

The figures are ours, nobody published them: they change with the cost model. They show what a change moves, no more.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ap_search import search
from ap_search.result import PricedPlan, SearchResult, StageMemory
from ap_search.units import bytes_to_gib

FOLDER = Path(__file__).parent / "expected"
COMMAND = "python -m tests.regression.update"
TOP = 5
DIGITS = 6
# Half a unit of the sixth digit is 5e-6 of the smallest number with six digits.
TOLERANCE = 1e-5

# Two sizes of job per preset: one that is tight, one with room. 24 devices are an odd world on purpose.
DEVICES = {
    "deepseek-v2-lite": (8, 64),
    "deepseek-v3": (256, 2048),
    "glm-4.5": (128, 512),
    "gpt-oss-120b": (32, 128),
    "kimi-k2": (256, 1024),
    "llama-3.1-405b": (256, 1024),
    "llama-3.1-70b": (32, 128),
    "llama-3.1-8b": (8, 64),
    "mimo-v2-flash": (128, 512),
    "mixtral-8x22b": (64, 128),
    "mixtral-8x7b": (24, 64),
    "qwen2-57b-a14b": (16, 64),
    "qwen3-235b-a22b": (128, 512),
    "qwen3-30b-a3b": (16, 64),
    "toy-moe": (8, 64),
}
CASES = [(model, devices) for model, counts in DEVICES.items() for devices in counts]


def file_of(model: str, devices: int) -> Path:
    """The committed file of one case."""
    return FOLDER / f"{model}-{devices}.yaml"


def snapshot(model: str, devices: int) -> dict[str, Any]:
    """Search with all defaults, and keep what the regression watches."""
    result = search(model=model, devices=devices, top=TOP)
    counts = result.search
    kept: dict[str, Any] = {
        "model": model,
        "devices": devices,
        "search": {"candidates": counts.candidates, "priced": counts.priced, "feasible": counts.feasible},
        "plans": [_line(plan) for plan in result.plans],
    }
    kept |= {"best": _breakdown(result.plans[0])} if result.plans else {"nothing_fits": _empty(result)}
    return kept


def _line(plan: PricedPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "step_time_s": rounded(plan.step_time_s),
        "peak_memory_gib": rounded(bytes_to_gib(plan.peak_memory_bytes)),
    }


def _breakdown(plan: PricedPlan) -> dict[str, Any]:
    return {
        "time": {part: rounded(seconds) for part, seconds in asdict(plan.time).items()},
        "fullest_stage": _stage(plan.memory.peak_stage),
    }


def _stage(stage: StageMemory) -> dict[str, Any]:
    parts = {
        **{f"shared_{part}": size for part, size in asdict(stage.shared).items()},
        **{f"expert_{part}": size for part, size in asdict(stage.expert).items()},
        "router_bytes": stage.router_bytes,
        "activations_bytes": stage.activations_bytes,
        "dispatch_bytes": stage.dispatch_bytes,
        "logits_bytes": stage.logits_bytes,
        "buffers_bytes": stage.buffers_bytes,
        "reserve_bytes": stage.reserve_bytes,
    }
    sizes = {name.replace("_bytes", "_gib"): rounded(bytes_to_gib(size)) for name, size in parts.items()}
    return {"stage": stage.stage, "moment": stage.moment, **sizes}


def _empty(result: SearchResult) -> dict[str, Any]:
    why = result.infeasibility
    assert why is not None
    return {
        "nearest": None if why.nearest is None else _line(why.nearest),
        "clash": [rule.rule_id for rule in why.clash],
        "smallest_devices": why.smallest_devices,
    }


def rounded(number: float) -> float:
    """Keep six significant digits."""
    return float(f"{number:.{DIGITS}g}")


def written(kept: dict[str, Any]) -> str:
    """The text of a file."""
    head = f"# Our own ranking, not a published figure. Rewritten by {COMMAND} only.\n"
    return head + yaml.safe_dump(kept, sort_keys=False, width=120)


def recorded(model: str, devices: int) -> dict[str, Any] | None:
    """What the committed file of a case says; None where there is none."""
    path = file_of(model, devices)
    kept: dict[str, Any] | None = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    return kept


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Name every value that differs, one line each, with both values and how far they are apart."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in dict.fromkeys([*expected, *actual]):
            yield from differences(expected.get(key), actual.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(expected, list) and isinstance(actual, list):
        for place in range(max(len(expected), len(actual))):
            pair = [values[place] if place < len(values) else None for values in (expected, actual)]
            yield from differences(*pair, f"{path}[{place}]")
    elif not _same(expected, actual):
        yield f"{path}: {expected} -> {actual}{_apart(expected, actual)}"


def _same(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float) and isinstance(actual, float):
        return math.isclose(expected, actual, rel_tol=TOLERANCE, abs_tol=1e-12)
    return type(expected) is type(actual) and bool(expected == actual)


def _apart(expected: Any, actual: Any) -> str:
    numbers = isinstance(expected, int | float) and isinstance(actual, int | float)
    return f" ({actual / expected - 1:+.2%})" if numbers and expected else ""
