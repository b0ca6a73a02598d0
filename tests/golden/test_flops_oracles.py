"""Model FLOPs per token against Megatron-LM's own count.

Source: NVIDIA/Megatron-LM d98e8a64 `megatron/training/training.py` num_floating_point_operations, executed on these
configurations (vocabulary not padded); the published sizes of the models are tested elsewhere.
"""

import pytest

from ap_search.cost.flops import layer_flops_per_token, model_flops_per_token, mtp_flops_per_token
from ap_search.spec.blocks import Model
from tests.cost_cases import context, deepseek_v3, llama3_8b, mixtral_8x7b, price, qwen3_30b, qwen3_235b


@pytest.mark.parametrize(
    ("which", "seq_len", "flops"),
    [
        (mixtral_8x7b(), 4096, 79_706_456_064),
        (qwen3_235b(), 4096, 148_034_813_952),
        (qwen3_30b(), 4096, 23_006_281_728),
        (deepseek_v3(), 4096, 249_812_054_016),
        (deepseek_v3(mtp_layers=1), 4096, 259_992_950_784),
        (llama3_8b(), 8192, 51_470_401_536),
    ],
    ids=["mixtral-8x7b", "qwen3-235b", "qwen3-30b", "deepseek-v3", "deepseek-v3 with MTP", "llama3-8b"],
)
def test_flops_per_token_are_megatrons_to_the_unit(which: Model, seq_len: int, flops: int) -> None:
    assert model_flops_per_token(which, seq_len) == flops


def test_an_mtp_module_is_a_layer_a_head_and_a_projection() -> None:
    """259,992,950,784 - 249,812,054,016 = 10,180,896,768: a layer and 6 (7168 x 129280 + 3 x 7168 + 2 x 7168^2)."""
    v3 = deepseek_v3(mtp_layers=1)
    beside = 6 * (7168 * 129_280 + 3 * 7168 + 2 * 7168**2)
    assert mtp_flops_per_token(v3, 4096) == 10_180_896_768
    assert mtp_flops_per_token(v3, 4096) - layer_flops_per_token(v3, v3.mtp_kind, 4096) == beside


def test_reported_rate_counts_model_flops_only() -> None:
    """Repeating every forward costs time, but is no model FLOP: rate x step stays."""
    where = context(mixtral_8x7b(), 64)
    tokens_per_device = 64 * 4096 / 64
    for text in ("tp=2,pp=4,ep=8", "tp=2,pp=4,ep=8,recompute=full"):
        answer = price(where, text)
        done = answer.model_flops_per_s_per_device * answer.step_time_s
        assert done == pytest.approx(79_706_456_064 * tokens_per_device, rel=1e-12)
        assert answer.mfu_ratio == pytest.approx(answer.model_flops_per_s_per_device / 989e12, rel=1e-12)
