"""Models of published dimensions, a machine of round figures, and short ways to price plans, for the cost tests."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ap_search.cost.context import CostContext
from ap_search.cost.details import price_plan
from ap_search.cost.step import TablePrice, price_table
from ap_search.plan.layout import layout_of
from ap_search.plan.plan import Layout, Plan
from ap_search.plan.table import PlanTable
from ap_search.plan.text import parse_plan
from ap_search.result import PricedPlan
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, Model, MoeFfn, QkNorm
from ap_search.spec.cluster import load_cluster
from ap_search.spec.job import Job, Load
from ap_search.spec.machine import (
    AttentionFit,
    Collective,
    CollectiveFit,
    DispatchFit,
    GemmFit,
    GroupedGemmFit,
    Level,
    Machine,
)
from ap_search.spec.software import Software

GIB = 2**30
PLAIN = Software(name="plain", description="nothing fused beyond the defaults, nothing hidden")


def gqa(heads: int, kv_heads: int, dim: int = 128, **more: object) -> Attention:
    return Attention(num_heads=heads, num_kv_heads=kv_heads, qk_head_dim=dim, v_head_dim=dim, **more)  # type: ignore[arg-type]


def model(name: str, hidden: int, vocab: int, layers: Sequence[LayerKind], **more: object) -> Model:
    kinds = tuple(dict.fromkeys(layers))
    return Model(
        name=name,
        hidden_size=hidden,
        vocab_size=vocab,
        kinds=kinds,
        layers=tuple(kinds.index(kind) for kind in layers),
        **{"tied_embeddings": False, **more},  # type: ignore[arg-type]
    )


def mixtral_8x7b(layers: int = 32) -> Model:
    kind = LayerKind(mixer=gqa(32, 8), ffn=MoeFfn(num_experts=8, top_k=2, expert_width=14336))
    return model("mixtral-8x7b", 4096, 32000, [kind] * layers)


def qwen3_235b() -> Model:
    kind = LayerKind(mixer=gqa(64, 4, qk_norm=QkNorm.HEAD), ffn=MoeFfn(num_experts=128, top_k=8, expert_width=1536))
    return model("qwen3-235b", 4096, 151936, [kind] * 94)


def qwen3_30b() -> Model:
    kind = LayerKind(mixer=gqa(32, 4, qk_norm=QkNorm.HEAD), ffn=MoeFfn(num_experts=128, top_k=8, expert_width=768))
    return model("qwen3-30b", 2048, 151936, [kind] * 48)


def llama3_8b() -> Model:
    return model("llama3-8b", 4096, 128256, [LayerKind(mixer=gqa(32, 8), ffn=DenseFfn(width=14336))] * 32)


V3_ATTENTION = Attention(
    kind=AttentionKind.MLA,
    num_heads=128,
    num_kv_heads=128,
    qk_head_dim=192,
    v_head_dim=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
)
V3_EXPERTS = MoeFfn(num_experts=256, top_k=8, expert_width=2048, shared_width=2048, num_groups=8, topk_groups=4)
V3_DENSE = LayerKind(mixer=V3_ATTENTION, ffn=DenseFfn(width=18432))
V3_MOE = LayerKind(mixer=V3_ATTENTION, ffn=V3_EXPERTS)


def deepseek_v3(*, dense: int = 3, moe: int = 58, mtp_layers: int = 0) -> Model:
    return model("deepseek-v3", 7168, 129280, [V3_DENSE] * dense + [V3_MOE] * moe, mtp_layers=mtp_layers)


def mimo_v2_flash() -> Model:
    """First of 48 layers dense, 256 experts of width 2048; attention taken alike in all layers."""
    mixer = replace(gqa(64, 8, 192), v_head_dim=128)
    dense = LayerKind(mixer=mixer, ffn=DenseFfn(width=16384))
    moe = LayerKind(mixer=mixer, ffn=MoeFfn(num_experts=256, top_k=8, expert_width=2048))
    return model("mimo-v2-flash", 4096, 152576, [dense] + [moe] * 47)


def small_model(*, layers: int = 8, mtp_layers: int = 1, shared: int = 256, tied: bool = False) -> Model:
    """First layer dense, the others MoE with 8 experts, top-2; every size divides by 8."""
    mixer = gqa(16, 8, 64)
    dense = LayerKind(mixer=mixer, ffn=DenseFfn(width=2048))
    moe = LayerKind(mixer=mixer, ffn=MoeFfn(num_experts=8, top_k=2, expert_width=512, shared_width=shared))
    kinds = [dense] + [moe] * (layers - 1)
    return model("small", 1024, 4096, kinds, mtp_layers=mtp_layers, tied_embeddings=tied)


def round_machine(**changes: object) -> Machine:
    """Peaks and bandwidths of one digit, efficiencies of 1, no latency: seconds can be worked out by hand."""
    gemm = GemmFit(efficiency_ratio=1.0, hbm_efficiency_ratio=1.0, launch_s=0.0, wgrad_ratio=1.0)
    grouped = GroupedGemmFit(
        efficiency_ratio=1.0,
        rows_half=0.0,
        hbm_efficiency_ratio=1.0,
        launch_s=0.0,
        wgrad_rows=(1.0,),
        wgrad_ratios=(1.0,),
    )
    level = {"efficiency_ratio": 1.0, "alltoall_efficiency_ratio": 1.0, "latency_s": 0.0}
    given: dict[str, object] = {
        "name": "round",
        "device": "round",
        "device_memory_bytes": 80 * GIB,
        "peak_bf16_flops_per_s": 1e15,
        "peak_fp8_flops_per_s": 2e15,
        "hbm_bytes_per_s": 1e12,
        "sm_count": 100,
        "devices_per_domain": 8,
        "levels": (
            Level(name="scale-up", size=8, bytes_per_s=1e11, pair_bytes_per_s=1e11, **level),
            Level(name="network", size=0, bytes_per_s=1e10, pair_bytes_per_s=1e10, **level),
        ),
        "gemm": gemm,
        "gemm_fp8": gemm,
        "grouped_gemm": grouped,
        "grouped_gemm_fp8": grouped,
        "attention": AttentionFit(
            efficiency_ratio=1.0, seq_half=0.0, work_half=0.0, launch_s=0.0, backward_time_ratio=2.5
        ),
        "dispatch": DispatchFit(
            scale_up_bytes_per_s=1e11,
            network_bytes_per_s=1e10,
            dispatch_latency_s=0.0,
            combine_latency_s=0.0,
            sms=20,
        ),
        "collectives": tuple(
            CollectiveFit(collective=collective, ranks=ranks, latency_s=0.0, bytes_per_s=1e11, sqrt_s=0.0)
            for collective in Collective
            for ranks in (2, 8)
        ),
        "reserve_bytes": GIB,
    }
    return Machine(**{**given, **changes})  # type: ignore[arg-type]


@lru_cache
def h100() -> Machine:
    return load_cluster("h100-sxm")


def context(
    which: Model,
    devices: int,
    *,
    machine: Machine | None = None,
    software: Software = PLAIN,
    shares: Sequence[Sequence[float]] | None = None,
    **job: object,
) -> CostContext:
    """A context with nothing reserved; `shares` is the load, one row for all MoE layers or one per MoE layer."""
    load = Load() if shares is None else Load(name="given", shares=np.array(shares, dtype=np.float64))
    given: dict[str, object] = {"memory_limit_bytes": 80 * GIB, "reserve_bytes": 0, "global_batch": 64, "load": load}
    return CostContext(
        model=which,
        machine=machine or h100(),
        software=software,
        job=Job(devices=devices, **{**given, **job}),  # type: ignore[arg-type]
    )


def spread(layers: int, pp: int, vpp: int) -> Layout:
    """Layers as evenly as they go, earlier virtual stages first."""
    whole, rest = divmod(layers, pp * vpp)
    return layout_of([whole + (index < rest) for index in range(pp * vpp)], pp=pp, vpp=vpp)


def plan(where: CostContext, text: str) -> Plan:
    return parse_plan(
        text,
        devices=where.job.devices,
        global_batch=where.job.global_batch,
        default_layout=lambda pp, vpp: spread(where.model.num_layers, pp, vpp),
        model=where.model,
    )


def price(where: CostContext, text: str) -> PricedPlan:
    return price_plan(where, plan(where, text))


def price_all(where: CostContext, texts: Sequence[str]) -> TablePrice:
    return price_table(where, PlanTable.from_plans([plan(where, text) for text in texts]))
