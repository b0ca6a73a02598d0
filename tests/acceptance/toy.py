"""The toy MoE and short ways to price it, for the acceptance tests.

It has 4 layers, the first one dense: hidden 64, 8 heads of 8, 4 key/value heads, vocabulary 512, dense width 256, 8
experts of width 64, top-2, no shared experts.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ap_search import estimate, search
from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.moe import dispatch_shape
from ap_search.cost.shapes import block_shapes
from ap_search.plan.table import PlanTable
from ap_search.result import Explanation, PathStep, PricedPlan, SearchResult
from ap_search.spec.blocks import Model
from ap_search.spec.model import load_model
from tests import cost_cases as cases

TOKENS = 1024
SHARDINGS = ("none", "zero1", "zero2", "zero3")


def toy(plan: str, devices: int = 8, **more: Any) -> PricedPlan:
    """Price a plan of the toy MoE; 64 sequences of 1,024 tokens unless said otherwise."""
    given: dict[str, Any] = {"global_batch": 64, "seq_len": 1024, **more}
    return estimate(model="toy-moe", devices=devices, plan=plan, **given).plans[0]


def toy_search(devices: int = 8, **chosen: Any) -> SearchResult:
    """Search the toy MoE's plans over all meshes, one value of each knob unless more are chosen."""
    knobs = {"mbs": [1], "vpp": [1], "sharding": ["zero1"], "recompute": ["none"], "dispatcher": ["alltoall"]}
    return search(
        model="toy-moe",
        devices=devices,
        global_batch=48,
        seq_len=1024,
        top=1000,
        set=knobs | chosen.pop("set", {}),
        **chosen,
    )


def broken(priced: PricedPlan) -> set[str]:
    """Rules that a plan breaks."""
    return {violation.rule_id for violation in priced.violations}


def steps(explained: Explanation | None) -> dict[str, PathStep]:
    """Steps of the MoE layer by name."""
    assert explained is not None
    return {step.name: step for step in explained.moe_path}


def with_top_k(model: Model, top_k: int) -> Model:
    """The same model with another top-k."""
    kinds = (replace(kind, ffn=replace(kind.ffn, top_k=top_k)) if kind.is_moe else kind for kind in model.kinds)
    return replace(model, kinds=tuple(kinds))


def shape(where_plan: str, load_ratio: float = 1.0) -> DispatchShape:
    """What a rank of the toy MoE dispatches on 8 devices."""
    where = cases.context(load_model("toy-moe"), 8, seq_len=TOKENS)
    shapes = block_shapes(where.machine, where.job, PlanTable.from_plans([cases.plan(where, where_plan)]))
    assert where.model.moe is not None
    ratio = np.full(1, load_ratio)
    return dispatch_shape(where, where.model.moe, shapes, load_ratio=ratio, kept_ratio=np.ones(1))
