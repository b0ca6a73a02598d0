"""Small models and plans for runs on four processes."""

from typing import Any

from ap_search.plan.layout import balanced_layout
from ap_search.plan.plan import Layout, Plan
from ap_search.plan.text import parse_plan
from ap_search.runtime.settings import RunSettings
from ap_search.spec.blocks import Model
from ap_search.spec.model import read_model_file

RANKS = 4
SETTINGS = RunSettings(seq_len=8, dtype="float64", vocab_divisor=16)

BASE: dict[str, Any] = {
    "name": "small",
    "hidden_size": 32,
    "vocab_size": 60,
    "num_layers": 2,
    "attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "ffn": {"width": 64},
    "moe": {"num_experts": 8, "top_k": 2, "expert_width": 32, "first_dense_layers": 1},
}
MOE: dict[str, Any] = BASE["moe"]


def model(**changes: Any) -> Model:
    """The small model with other values; `moe` and `attention` are merged into the base."""
    data = {**BASE, **changes}
    for part in ("moe", "attention"):
        if data.get(part) is not None:
            data[part] = {**BASE[part], **data[part]}
    return read_model_file(data, name="small", where="small.yaml")


def plan(text: str, of: Model, *, batch: int = 8) -> Plan:
    """A plan for four ranks."""

    def uneven(pp: int, vpp: int) -> Layout:
        return balanced_layout(weights=[1.0] * of.num_layers, first_extra=0.0, last_extra=0.0, pp=pp, vpp=vpp)

    return parse_plan(text, devices=RANKS, global_batch=batch, default_layout=uneven, model=of)
