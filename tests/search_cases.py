"""Small models, machines and contexts for the tests of rules, solver and candidates."""

from ap_search.plan.plan import Dispatcher, Plan, Recompute, Schedule, Sharding
from ap_search.search.rules import RuleContext
from ap_search.search.rules.columns import simple_layout
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, Model, MoeFfn
from ap_search.spec.job import Job, Target
from ap_search.spec.machine import AttentionFit, DispatchFit, GemmFit, GroupedGemmFit, Level, Machine

GIB = 2**30


def machine(devices_per_domain: int = 8) -> Machine:
    gemm = GemmFit(efficiency_ratio=0.8, hbm_efficiency_ratio=0.8, launch_s=0.0, wgrad_ratio=1.0)
    grouped = GroupedGemmFit(
        efficiency_ratio=0.7,
        rows_half=100.0,
        hbm_efficiency_ratio=0.8,
        launch_s=0.0,
        wgrad_rows=(1.0,),
        wgrad_ratios=(1.0,),
    )
    level = {"efficiency_ratio": 0.8, "latency_s": 1e-6}
    return Machine(
        name="test",
        device="test",
        device_memory_bytes=80 * GIB,
        peak_bf16_flops_per_s=1e15,
        peak_fp8_flops_per_s=2e15,
        hbm_bytes_per_s=3e12,
        sm_count=132,
        devices_per_domain=devices_per_domain,
        levels=(
            Level(name="scale-up", size=devices_per_domain, bytes_per_s=4.5e11, pair_bytes_per_s=4.5e11, **level),
            Level(name="network", size=0, bytes_per_s=5e10, pair_bytes_per_s=5e10, **level),
        ),
        gemm=gemm,
        gemm_fp8=gemm,
        grouped_gemm=grouped,
        grouped_gemm_fp8=grouped,
        attention=AttentionFit(
            efficiency_ratio=0.7, seq_half=100.0, work_half=1.0, launch_s=0.0, backward_time_ratio=2.5
        ),
        dispatch=DispatchFit(
            scale_up_bytes_per_s=1.5e11,
            network_bytes_per_s=4.4e10,
            dispatch_latency_s=0.0,
            combine_latency_s=0.0,
            sms=20,
        ),
        collectives=(),
        reserve_bytes=GIB,
    )


def job(devices: int, **changes: object) -> Job:
    given: dict[str, object] = {
        "global_batch": 1024,
        "seq_len": 4096,
        "memory_limit_bytes": 80 * GIB,
        "reserve_bytes": GIB,
    }
    return Job(devices=devices, **(given | changes))  # type: ignore[arg-type]


def gqa(num_heads: int, num_kv_heads: int, head_dim: int = 128) -> Attention:
    return Attention(num_heads=num_heads, num_kv_heads=num_kv_heads, qk_head_dim=head_dim, v_head_dim=head_dim)


def dense_model(
    *, layers: int = 32, heads: int = 32, kv_heads: int = 8, hidden: int = 4096, width: int = 14336
) -> Model:
    kind = LayerKind(mixer=gqa(heads, kv_heads), ffn=DenseFfn(width=width))
    return Model(
        name="dense",
        hidden_size=hidden,
        vocab_size=32000,
        tied_embeddings=False,
        kinds=(kind,),
        layers=(0,) * layers,
    )


def moe_model(
    *,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 4096,
    num_experts: int = 8,
    top_k: int = 2,
    expert_width: int = 14336,
    shared_width: int = 0,
    first_dense: int = 0,
    **routing: int,
) -> Model:
    mixer = gqa(heads, kv_heads)
    experts = MoeFfn(
        num_experts=num_experts, top_k=top_k, expert_width=expert_width, shared_width=shared_width, **routing
    )
    kinds = (LayerKind(mixer=mixer, ffn=experts), LayerKind(mixer=mixer, ffn=DenseFfn(width=4 * hidden)))
    return Model(
        name="moe",
        hidden_size=hidden,
        vocab_size=32000,
        tied_embeddings=False,
        kinds=kinds if first_dense else kinds[:1],
        layers=(1,) * first_dense + (0,) * (layers - first_dense),
    )


def deepseek_v3() -> Model:
    mla = Attention(
        kind=AttentionKind.MLA,
        num_heads=128,
        num_kv_heads=128,
        qk_head_dim=192,
        v_head_dim=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    experts = MoeFfn(
        num_experts=256, top_k=8, expert_width=2048, shared_width=2048, num_groups=8, topk_groups=4, score_bias=True
    )
    return Model(
        name="deepseek-v3",
        hidden_size=7168,
        vocab_size=129280,
        tied_embeddings=False,
        kinds=(LayerKind(mixer=mla, ffn=DenseFfn(width=18432)), LayerKind(mixer=mla, ffn=experts)),
        layers=(0,) * 3 + (1,) * 58,
        mtp_layers=1,
    )


def context(
    model: Model, devices: int, *, devices_per_domain: int = 8, explicit_layout: bool = True, **changes: object
) -> RuleContext:
    return RuleContext(
        model=model,
        machine=machine(devices_per_domain),
        job=job(devices, **changes),
        explicit_layout=explicit_layout,
    )


def plan(where: RuleContext, **axes: int) -> Plan:
    """A plan as `--plan` reads it: absent axes are 1; dp, edp and micro-batches follow; layers are spread."""
    tp, cp, pp, vpp = (axes.get(axis, 1) for axis in ("tp", "cp", "pp", "vpp"))
    ep, etp, mbs = (axes.get(axis, 1) for axis in ("ep", "etp", "mbs"))
    dp = axes.get("dp", max(where.job.devices // (tp * cp * pp), 1))
    return Plan(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        ep=ep,
        etp=etp,
        edp=max(dp * cp * tp // (ep * etp), 1),
        mbs=mbs,
        num_microbatches=max(where.job.global_batch // (mbs * dp), 1),
        sequence_parallel=bool(axes.get("sp", tp > 1)),
        sharding=Sharding(axes.get("sharding", Sharding.ZERO1)),
        recompute=Recompute(axes.get("recompute", Recompute.NONE)),
        dispatcher=Dispatcher(axes.get("dispatcher", Dispatcher.ALLTOALL)),
        schedule=Schedule(axes.get("schedule", Schedule.INTERLEAVED if vpp > 1 else Schedule.ONE_F_ONE_B)),
        layout=simple_layout(where.model.num_layers, pp, vpp),
    )


__all__ = ["Target", "context", "deepseek_v3", "dense_model", "gqa", "job", "machine", "moe_model", "plan"]
