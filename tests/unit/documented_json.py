"""The documented JSON (`schema_version` 1) as shapes, and a checker that names every key and value that strays."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "command-line.md"

NUMBER = "number"
NUMBER_OR_NULL = "number or null"

LEVER = {"change": str, "effect": str}
REJECTION = {"rule_id": str, "count": int, "message": str, "example": str, "levers": [LEVER]}
VIOLATION = {"rule_id": str, "message": str, "demand": NUMBER, "bound": NUMBER, "unit": str, "levers": [LEVER]}
STATE = {"weights_bytes": int, "gradients_bytes": int, "optimizer_bytes": int}
STATES = ("shared", "expert")
STAGE_PARTS = (
    "router_bytes",
    "activations_bytes",
    "dispatch_bytes",
    "logits_bytes",
    "buffers_bytes",
    "reserve_bytes",
)
STAGE = {
    "stage": int,
    "moment": str,
    "total_bytes": int,
    **dict.fromkeys(STATES, STATE),
    **dict.fromkeys(STAGE_PARTS, int),
}
COMPUTE = ("attention", "dense_ffn", "router", "expert", "shared_expert", "head", "recompute", "optimizer", "other")
COMMUNICATION = ("dispatch", "combine", "tp_comm", "cp_comm", "pp_comm", "dp_comm")
TIME = (*COMPUTE, *COMMUNICATION, "bubble", "imbalance")
TRAFFIC = ("dispatch", "combine", "tp", "cp", "pp", "dp")
AXES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "mbs", "num_microbatches")
PLAN = {
    "rank": int,
    "name": str,
    "feasible": bool,
    "violations": [VIOLATION],
    "plan": {
        **dict.fromkeys(AXES, int),
        "sequence_parallel": bool,
        "sharding": str,
        "recompute": str,
        "dispatcher": str,
        "schedule": str,
        "stage_layers": [int],
    },
    "step_time_s": NUMBER,
    "tokens_per_s_per_device": NUMBER,
    "model_flops_per_s_per_device": NUMBER,
    "mfu_ratio": NUMBER,
    "peak_memory_bytes": int,
    "memory": {"limit_bytes": int, "stages": [STAGE]},
    "time": {f"{part}_s": NUMBER for part in TIME},
    "traffic": {f"{wire}_bytes": int for wire in TRAFFIC},
}
ANSWER = {
    "schema_version": int,
    "tool_version": str,
    "model": {
        "name": str,
        "params_total": int,
        "params_active": int,
        "params_mtp": int,
        "num_layers": int,
        "dense_layers": [int],
        "moe_layers": [int],
        "num_experts": int,
        "top_k": int,
    },
    "cluster": {"name": str, "devices": int, "device_memory_bytes": int},
    "job": {"global_batch": int, "seq_len": int, "precision": str},
    "plans": [PLAN],
    "search": {
        "candidates": int,
        "priced": int,
        "feasible": int,
        "elapsed_s": NUMBER,
        "optimality": {
            "statement": str,
            "exhaustive": bool,
            "lower_bound_s": NUMBER_OR_NULL,
            "gap_ratio": NUMBER_OR_NULL,
        },
        "rejections": [REJECTION],
    },
}


def strays(value: Any, shape: Any, path: str = "") -> Iterator[str]:
    """Name each documented key that is missing, each value of another kind, and each key that no page names."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path} is no object"
            return
        yield from (f"{path}.{key} is missing" for key in shape if key not in value)
        yield from (f"{path}.{key} is documented nowhere" for key in value if key not in shape and not named(key))
        for key in set(shape) & set(value):
            yield from strays(value[key], shape[key], f"{path}.{key}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{path} is no list"
            return
        for place, item in enumerate(value):
            yield from strays(item, shape[0], f"{path}[{place}]")
    elif not fits(value, shape):
        yield f"{path} is {value!r}, not {shape}"


def fits(value: Any, shape: Any) -> bool:
    """Whether a plain value is of the documented kind; true and false are no numbers."""
    if shape == NUMBER_OR_NULL and value is None:
        return True
    if shape in (NUMBER, NUMBER_OR_NULL):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is shape


def named(key: str) -> bool:
    """Whether the guide names a key that was added to the documented ones."""
    words = GUIDE.read_text(encoding="utf-8").replace("{", " ").replace("}", " ").replace("`", " ").replace(",", " ")
    return key in words.replace(";", " ").replace("[", " ").replace(".", " ").split()
