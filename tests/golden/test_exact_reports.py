"""Published reports that state exact bytes or parameters of a stage.

Each test names its source. Attention widths do not enter the figures that are asserted unless a docstring says so.
"""

from dataclasses import replace

import pytest

from ap_search.plan.plan import Sharding
from ap_search.spec.blocks import Attention, DenseFfn, LayerKind, Model, MoeFfn
from ap_search.spec.parameters import params_total
from tests.cost_cases import GIB, PLAIN, context, deepseek_v3, mimo_v2_flash, mixtral_8x7b, model, price, qwen3_235b


@pytest.mark.parametrize(
    ("axes", "weights_bytes"),
    [
        ("tp=2,ep=8", [75_698_798_592]),
        ("tp=2,ep=8,etp=2", [37_849_399_296]),
        ("pp=2,ep=8", [37_044_092_928, 38_654_705_664]),
        ("tp=2,pp=2,ep=4,etp=2", [37_044_092_928, 38_654_705_664]),
    ],
    ids=["etp left at 1", "etp 2", "two stages", "two stages, etp 2"],
)
def test_mimo_v2_flash_experts_on_16_devices(axes: str, weights_bytes: list[int]) -> None:
    """47 MoE layers x 256 experts x 3 x 4096 x 2048 x 2 bytes / 8 = 75.70e9 bytes per rank: more than 70 GiB.

    ETP stayed 1 although tp was 2, which is the trap: etp 2 or two stages halve it. Layer 0 is dense, so two stages
    hold 23 and 24 MoE layers.

    Source: NVIDIA-NeMo/Megatron-Bridge issue 4754.
    """
    stages = price(context(mimo_v2_flash(), 16, global_batch=16), axes).memory.stages
    assert [stage.expert.weights_bytes for stage in stages] == weights_bytes
    assert sum(weights_bytes) in (75_698_798_592, 37_849_399_296)


def test_qwen3_235b_experts_at_ep8_pp2() -> None:
    """94/2 layers x 128/8 experts x 3 x 4096 x 1536 x 2 bytes = 28,387,049,472 bytes = 26.4375 GiB on each stage."""
    stages = price(context(qwen3_235b(), 64), "pp=2,ep=8").memory.stages
    assert [stage.expert.weights_bytes / GIB for stage in stages] == [26.4375, 26.4375]


def test_expert_optimizer_state_shards_over_expert_replicas() -> None:
    """Four DeepSeek-V3 MoE layers, ep 32 on 64 devices: edp = 64/32 = 2.

    4 x 8 experts x 3 x 7168 x 2048 = 1,409,286,144 parameters x (2 + 4 + 12/2) = 16.9e9 bytes; dividing by dp = 64
    would leave out most of the optimizer state.

    Source: estimator of mindspore-ai/hyper-parallel, whose stored versions divide by dp.
    """
    stage = price(context(deepseek_v3(dense=0, moe=4), 64), "ep=32").memory.stages[0]
    assert stage.expert.total_bytes == 1_409_286_144 * 12 == 16_911_433_728
    assert stage.expert.optimizer_bytes == 1_409_286_144 * 6


def tiny(moe_layers: tuple[int, ...]) -> Model:
    """Hidden 16, 4 heads of 4, feed-forward 64 without gate, LayerNorm, 32 tied embeddings; 8 layers.

    A dense layer has 4 x 16 x 16 + 2 x 16 x 64 + 2 x 32 = 3,136 parameters, the dense part of a MoE layer 1,088.
    """
    mixer = Attention(num_heads=4, num_kv_heads=4, qk_head_dim=4, v_head_dim=4)
    dense = LayerKind(mixer=mixer, ffn=DenseFfn(width=64, gated=False))
    moe = LayerKind(mixer=mixer, ffn=MoeFfn(num_experts=4, top_k=1, expert_width=32, gated=False))
    layers = [moe if index in moe_layers else dense for index in range(8)]
    return model("tiny", 16, 32, layers, tied_embeddings=True, norm_params_per_element=2)


@pytest.mark.parametrize(
    ("moe_layers", "heaviest", "averaged"), [((), 9952, 6792), ((1, 3, 5, 7), 5856, 4744)], ids=["dense", "mixed"]
)
def test_uneven_stages_are_counted_layer_by_layer(moe_layers: tuple[int, ...], heaviest: int, averaged: int) -> None:
    """Layers [1, 2, 2, 3]: the last stage holds three, the final norm (32) and its copy of the embedding (512).

    Dense: 3 x 3,136 + 32 + 512 = 9,952. Mixed, every other layer MoE: 2 x 1,088 + 3,136 + 544 = 5,856 beside experts
    and router. Averaging over stages gives 6,792 and 4,744.

    Source: NVIDIA-NeMo/Megatron-Bridge pull request 5077; the model is the one of that repository's
    `test_theoretical_memory_utils.py`, with tp 1 and pp 4, which the figures pin down.
    """
    where = context(tiny(moe_layers), 4, software=replace(PLAIN, vocab_divisor=1), global_batch=4)
    stages = price(where, "pp=4,stage_layers=1+2+2+3").memory.stages
    dense_params = [stage.shared.weights_bytes // 2 for stage in stages]
    assert max(dense_params) == dense_params[-1] == heaviest
    layers = sum(dense_params) - 2 * 512 - 32
    assert layers / 4 + 512 + 32 / 4 == averaged


def test_fully_sharded_qwen3_235b_on_64_devices() -> None:
    """18 bytes x 235,093,634,560 parameters / 64 = 66.1e9 bytes of state, with experts over ep 8 and edp 8.

    Source: THUDM/slime issue 280 (235 x (2 + 4 + 12)/64 = 66.09 GB).
    """
    which = qwen3_235b()
    answer = price(context(which, 64), "ep=8,sharding=zero3")
    stage = answer.memory.stages[0]
    state = stage.shared.total_bytes + stage.router_bytes + stage.expert.total_bytes
    assert answer.plan.sharding is Sharding.ZERO3
    assert params_total(which) == 235_093_634_560
    assert state == 235_093_634_560 * 18 // 64
    assert state / 1e9 == pytest.approx(66.09, rel=1e-3)


def test_memory_of_a_mixtral_release_run() -> None:
    """Mixtral 8x7B with a vocabulary of 256 k, tp2 pp4 ep4 etp2 on 128 devices: 16.49 GiB steady, 24.68 GiB peak.

    The last rank is logged; its stage holds half of a 256 k x 4096 head. Steady memory is model state. The world size
    is inferred, and we leave out what the allocator and the process hold besides: 16.2 and 23.3 GiB.

    Source: NVIDIA/Megatron-LM d98e8a64 functional test mixtral_8x7b_alltoall_tp2pp4ep4_release on H100.
    """
    base = mixtral_8x7b()
    which = model("mixtral-256k", 4096, 256_000, [base.kinds[0]] * 32)
    stage = price(context(which, 128, global_batch=1024), "tp=2,pp=4,ep=4,etp=2").memory.stages[-1]
    state = stage.shared.total_bytes + stage.router_bytes + stage.expert.total_bytes
    assert state / GIB == pytest.approx(16.49, rel=0.025)
    assert stage.total_bytes / GIB == pytest.approx(24.68, rel=0.07)
