"""Plans that users reported as refused (or wrongly accepted) by frameworks: the rule against each is the one named.

Each case is a public report in our own form: the plan, the rule, and where it was reported. Reports of plans that run
are here too: nothing may be refused that is known to be legal.
"""

from dataclasses import dataclass

import pytest

from ap_search.plan.plan import Plan
from ap_search.search.rules import RuleContext, violations
from ap_search.spec.blocks import Model
from tests.search_cases import Target, context, deepseek_v3, dense_model, moe_model, plan

QWEN3_235B = moe_model(layers=94, heads=64, kv_heads=4, hidden=4096, num_experts=128, top_k=8, expert_width=1536)
QWEN3_30B = moe_model(layers=48, heads=32, kv_heads=4, hidden=2048, num_experts=128, top_k=8, expert_width=768)
QWEN35_35B = moe_model(layers=40, heads=16, kv_heads=2, hidden=2048, num_experts=256, top_k=8, expert_width=512)
GPT_OSS_20B = moe_model(layers=24, heads=64, kv_heads=8, hidden=2880, num_experts=32, top_k=4, expert_width=2880)
DISTILL_QWEN_7B = dense_model(layers=28, heads=28, kv_heads=4, hidden=3584, width=18944)
MIXTRAL = moe_model()


@dataclass(frozen=True)
class Report:
    source: str
    model: Model
    devices: int
    axes: dict[str, int]
    rules: tuple[str, ...]
    global_batch: int = 1024
    seq_len: int = 4096
    target: Target = Target.ANY
    layout_given: bool = True

    def context(self) -> RuleContext:
        return context(
            self.model,
            self.devices,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            target=self.target,
            explicit_layout=self.layout_given,
        )

    def plan(self) -> Plan:
        return plan(self.context(), **self.axes)


REFUSED = [
    # 30 % 4 = 2: the framework silently built 28 of 30 layers.
    Report("NVIDIA/Megatron-LM#1304", dense_model(layers=30), 4, {"pp": 4}, ("stage_layers",), layout_given=False),
    # 80 % (16*2) = 16: a 64-layer model ran silently.
    Report(
        "NVIDIA/Megatron-LM#468",
        dense_model(layers=80),
        16,
        {"pp": 16, "vpp": 2},
        ("stage_layers",),
        layout_given=False,
    ),
    # 128 / (4*32) = 1 micro-batch, fewer than pp = 2.
    Report(
        "NVIDIA/Megatron-LM#5022",
        dense_model(),
        64,
        {"pp": 2, "vpp": 2, "mbs": 4},
        ("vpp_microbatches",),
        global_batch=128,
    ),
    # 2 key/value heads, tp = 4: torchtitan does not replicate them.
    Report(
        "pytorch/torchtitan#2574, #2577",
        QWEN35_35B,
        8,
        {"tp": 4, "ep": 8, "sharding": 3},
        ("torchtitan_kv_heads",),
        target=Target.TORCHTITAN,
    ),
    # 28 % 8 = 4.
    Report("THU-KEG/AdaptThink#1", DISTILL_QWEN_7B, 8, {"tp": 8}, ("heads_tp",)),
    # 20 % 8 = 4, of query heads and of as many key/value heads.
    Report(
        "marin-community/marin#6367",
        dense_model(heads=20, kv_heads=20, hidden=2560),
        8,
        {"tp": 8},
        ("heads_tp", "kv_heads_tp"),
    ),
    # 64 % 3 = 1 and 256 % 3 = 1: two rules, the heads first.
    Report(
        "vllm-project/vllm#52435",
        moe_model(heads=64, kv_heads=3, hidden=3072, num_experts=256, expert_width=1536),
        3,
        {"tp": 3, "ep": 3},
        ("heads_tp", "experts_ep"),
        seq_len=4098,
    ),
    # ep = 8 does not divide dp*cp*tp = 4, and 4 % 8 devices are none.
    Report(
        "pytorch/torchtitan#4258",
        MIXTRAL,
        4,
        {"ep": 8, "sharding": 3},
        ("world_expert", "torchtitan_ep"),
        target=Target.TORCHTITAN,
    ),
    # 128 experts do not divide over ep = 6, though 6 devices do.
    Report(
        "pytorch/torchtitan#4258",
        QWEN3_30B,
        6,
        {"ep": 6, "sharding": 3},
        ("experts_ep",),
        global_batch=1026,
        target=Target.TORCHTITAN,
    ),
    # 4 % (1*4*2) = 4.
    Report("NVIDIA-NeMo/Speech#14838", GPT_OSS_20B, 4, {"pp": 2, "ep": 4}, ("world_expert",)),
    Report("NVIDIA/Megatron-LM#1587", MIXTRAL, 2, {"tp": 2, "ep": 2, "sp": 0}, ("moe_needs_sequence_parallel",)),
    # (tp*dp) % (ep*etp) = 2*1 % 4 where context parallelism takes half of the devices, an axis that DeepSpeed lacks.
    Report(
        "deepspeedai/DeepSpeed#8064",
        MIXTRAL,
        4,
        {"tp": 2, "cp": 2, "ep": 4},
        ("deepspeed_cp", "deepspeed_ep"),
        target=Target.DEEPSPEED,
    ),
    # 4 devices, ep = 8.
    Report(
        "facebookresearch/FAMBench#103, deepspeedai/DeepSpeed#1838",
        MIXTRAL,
        4,
        {"ep": 8},
        ("world_expert", "deepspeed_ep"),
        target=Target.DEEPSPEED,
    ),
]

RUNS = [
    # 9 micro-batches over pp = 2: 1152 / (4*32) = 9 >= 2.
    Report("NVIDIA/Megatron-LM#5022", dense_model(), 64, {"pp": 2, "vpp": 2, "mbs": 4}, (), global_batch=1152),
    # Old versions refused pp = 2 interleaving, newer ones allow it.
    Report("NVIDIA/Megatron-LM#750", dense_model(), 8, {"pp": 2, "vpp": 2}, ()),
    # Megatron replicates key/value heads where torchtitan refuses.
    Report("pytorch/torchtitan#2574", QWEN35_35B, 8, {"tp": 4, "ep": 8}, ()),
    Report("THU-KEG/AdaptThink#1", DISTILL_QWEN_7B, 4, {"tp": 4}, ()),
    # Dense parameters fsdp 4 x tp 2, experts efsdp 2 x ep 4.
    Report("pytorch/torchtitan#3461", QWEN3_30B, 8, {"tp": 2, "ep": 4, "sharding": 3}, (), target=Target.TORCHTITAN),
    Report("NVIDIA-NeMo/Speech#14838", GPT_OSS_20B, 4, {"pp": 2, "ep": 2}, ()),
    # 1*4*1 = 4: valid, and failed only because etp was taken from tp.
    Report("NVIDIA-NeMo/Megatron-Bridge#546", QWEN3_30B, 4, {"tp": 4, "ep": 4}, ()),
    # A fork wrongly asked dense models for sequence parallelism too.
    Report("ROCm/Megatron-LM#85", dense_model(), 2, {"tp": 2, "sp": 0}, ()),
    Report("NVIDIA/Megatron-LM#1459", MIXTRAL, 8, {"cp": 2, "ep": 4}, ()),
    Report("mlc-ai/pith-train#93", MIXTRAL, 32, {"cp": 4, "ep": 8}, ()),
    # 94 / 2 = 47 layers per stage; 64 devices are the least.
    Report("verl-project/verl#1467", QWEN3_235B, 64, {"tp": 2, "pp": 2, "ep": 32}, (), layout_given=False),
    Report(
        "NVIDIA-NeMo/Megatron-Bridge#1549", deepseek_v3(), 256, {"pp": 16, "ep": 16, "tp": 1}, ()
    ),  # 61 layers over 16 stages, laid out
    Report("NVIDIA-NeMo/Megatron-Bridge#4754 (first fix)", MIXTRAL, 16, {"tp": 2, "ep": 8, "etp": 2}, ()),
]

# The infeasible and the feasible examples of the domain reference's oracle 29.
ORACLE_REFUSED = [
    Report("E=8 ep=3", MIXTRAL, 3, {"ep": 3}, ("experts_ep", "batch")),
    Report(
        "40 query heads, tp=16",
        dense_model(heads=40, kv_heads=8, hidden=5120, width=13824),
        16,
        {"tp": 16},
        ("heads_tp",),
    ),
    Report(
        "8 key/value heads, tp=3",
        dense_model(heads=32, kv_heads=8, hidden=4098, width=14334),
        3,
        {"tp": 3},
        ("heads_tp", "kv_heads_tp"),
        seq_len=4098,
    ),
    Report(
        "sequence 4097, cp=2", MIXTRAL, 8, {"cp": 2}, ("sequence_cp", "sequence_tp", "token_dispatch"), seq_len=4097
    ),
    Report("24 devices, tp=4 pp=4", MIXTRAL, 24, {"tp": 4, "pp": 4}, ("world_dense",)),
    Report("3 micro-batches, pp=4 vpp=2", MIXTRAL, 8, {"pp": 4, "vpp": 2}, ("vpp_microbatches",), global_batch=6),
    Report("MoE, tp=2 without SP", MIXTRAL, 8, {"tp": 2, "sp": 0}, ("moe_needs_sequence_parallel",)),
    Report("dense, ep=2", dense_model(), 8, {"ep": 2}, ("ep_needs_experts",)),
]
ORACLE_RUNS = [
    Report(
        "8 key/value heads, tp=16, 128 query heads",
        dense_model(heads=128, kv_heads=8, hidden=16384, width=53248),
        16,
        {"tp": 16},
        (),
    )
]


def named(report: Report) -> str:
    return report.source


@pytest.mark.parametrize("report", REFUSED + ORACLE_REFUSED, ids=named)
def test_the_named_rules_are_the_ones_reported(report: Report) -> None:
    found = violations(report.context(), report.plan())
    assert tuple(violation.rule_id for violation in found) == report.rules


@pytest.mark.parametrize("report", RUNS + ORACLE_RUNS, ids=named)
def test_what_runs_is_not_refused(report: Report) -> None:
    assert violations(report.context(), report.plan()) == ()


def test_heads_report_lists_legal_values() -> None:
    """28 heads: tp = 7 and 14 divide them, but 8 devices only 1, 2 and 4; the nearest that breaks nothing else is 4."""
    report = next(one for one in REFUSED if one.source == "THU-KEG/AdaptThink#1")
    (violation,) = violations(report.context(), report.plan())
    assert (violation.demand, violation.bound, violation.unit) == (8, 28, "query heads")
    assert [lever.change for lever in violation.levers] == ["tp=4"]
    assert "28 % 8 = 4" in violation.message
