"""Records as the documented JSON (`schema_version` 1): keys may be added, never renamed."""

import math
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

from ap_search.plan.plan import Plan
from ap_search.plan.text import dispatcher_text, recompute_text, schedule_text, sharding_text
from ap_search.result.fidelity import Expectation
from ap_search.result.records import ImbalanceCost, MemoryBreakdown, PricedPlan, StageMemory

JSON_SCHEMA_VERSION = 1

_PLAN_NUMBERS = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs", "num_microbatches")


def plan_json(priced: PricedPlan) -> dict[str, Any]:
    """Turn one priced plan into its entry of `plans`."""
    return {
        "rank": priced.rank,
        "name": priced.name,
        "feasible": priced.feasible,
        "violations": [asdict(violation) for violation in priced.violations],
        "plan": _axes_json(priced.plan),
        "step_time_s": priced.step_time_s,
        "tokens_per_s_per_device": priced.tokens_per_s_per_device,
        "model_flops_per_s_per_device": priced.model_flops_per_s_per_device,
        "mfu_ratio": priced.mfu_ratio,
        "peak_memory_bytes": priced.peak_memory_bytes,
        "memory": _memory_json(priced.memory),
        "time": asdict(priced.time),
        "hidden": asdict(priced.hidden),
        "notes": list(priced.notes),
        "critical_stage": priced.critical_stage,
        "stage_times_s": list(priced.stage_times_s),
        "traffic": asdict(priced.traffic),
        "imbalance": None if priced.imbalance is None else _imbalance_json(priced.imbalance),
    }


def expectation_json(expected: Expectation) -> dict[str, Any]:
    """Turn bands of recorded runs into an object, origins by the name of what they are of."""
    return asdict(expected) | {"provenance": dict(expected.provenance)}


def _imbalance_json(cost: ImbalanceCost) -> dict[str, Any]:
    """Turn what imbalance costs into an object, the best gain of EPLB beside it."""
    return asdict(cost) | {"eplb_gain_s": cost.eplb_gain_s}


def _axes_json(plan: Plan) -> dict[str, Any]:
    """Turn a plan's axes and knobs into an object; stages of an interleaved plan also chunk by chunk."""
    axes: dict[str, Any] = {name: getattr(plan, name) for name in _PLAN_NUMBERS}
    axes |= {
        "sequence_parallel": plan.sequence_parallel,
        "sharding": sharding_text(plan.sharding),
        "recompute": recompute_text(plan.recompute),
        "dispatcher": dispatcher_text(plan.dispatcher),
        "schedule": schedule_text(plan.schedule),
        "stage_layers": list(plan.layout.stage_layers),
    }
    if plan.vpp > 1:
        axes["virtual_stage_layers"] = list(plan.layout.chunk_layers)
    return axes


def _memory_json(memory: MemoryBreakdown) -> dict[str, Any]:
    """Turn the memory of every stage into an object; a stage's parts sum to its `total_bytes`."""
    return {"limit_bytes": memory.limit_bytes, "stages": [_stage_json(stage) for stage in memory.stages]}


def _stage_json(stage: StageMemory) -> dict[str, Any]:
    """Turn one stage into an object, its total beside its parts."""
    parts = asdict(stage) | {"total_bytes": stage.total_bytes}
    parts["largest"] = [{"name": name, "bytes": size_bytes} for name, size_bytes in stage.largest]
    return parts


def strict_json(value: Any) -> Any:
    """Reduce a tree to what strict JSON knows: plain numbers, and null for what is not finite."""
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"{type(value).__name__} has no place in JSON")
