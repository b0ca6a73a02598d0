"""Published sizes of the presets, and parameter oracles to the unit."""

from pathlib import Path

import pytest

from ap_search.spec.blocks import Model
from ap_search.spec.model import load_model
from ap_search.spec.parameters import layer_params, mtp_extra_params, params_active, params_mtp, params_total
from ap_search.spec.presets import preset_names

# name, total and active by independent count (own formula, transformers' meta-device count and Megatron-LM's estimator
# agree to the unit; domain reference O1, O5 and section 1), then as published by the authors, billions.
SIZES = [
    ("mixtral-8x7b", 46_702_792_704, 12_879_925_248, 46.7, 12.9),
    ("mixtral-8x22b", 140_630_071_296, 39_161_468_928, 141, 39),
    ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520, 235, 22),
    ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704, 30.5, 3.3),
    ("qwen2-57b-a14b", 57_408_658_944, 14_249_270_784, 57.4, 14),
    ("deepseek-v3", 671_026_404_352, 37_552_282_624, 671, 37),
    ("llama-3.1-8b", 8_030_261_248, 8_030_261_248, 8.03, 8.03),
]

# name, published total and active, billions, and what the published active count leaves out of ours (embeddings).
PUBLISHED = [
    ("deepseek-v2-lite", 15.7, 2.4, 1),
    ("kimi-k2", 1000, 32, 0),
    ("glm-4.5", 355, 32, 1),
    ("gpt-oss-120b", 116.8, 5.1, 1),
    ("llama-3.1-70b", 70.6, 70.6, 0),
    ("llama-3.1-405b", 405, 405, 0),
    ("mimo-v2-flash", 309, 15, 0),
]


def v3() -> Model:
    return load_model("deepseek-v3")


@pytest.mark.parametrize(("name", "total", "active", "total_b", "active_b"), SIZES)
def test_oracle_sizes(name: str, total: int, active: int, total_b: float, active_b: float) -> None:
    model = load_model(name)
    assert (params_total(model), params_active(model)) == (total, active)
    assert params_total(model) / 1e9 == pytest.approx(total_b, rel=0.005)
    # authors round, and DeepSeek's 37 lies between the counts with one and with both embeddings
    assert params_active(model) / 1e9 == pytest.approx(active_b, rel=0.02)
    assert model.warnings == ()


@pytest.mark.parametrize(("name", "total_b", "active_b", "embeddings_left_out"), PUBLISHED)
def test_published_sizes(name: str, total_b: float, active_b: float, embeddings_left_out: int) -> None:
    """Totals within 1 %, but Kimi-K2's, which is published as 1T (1.026e12 by count); active within 5 %."""
    model = load_model(name)
    assert params_total(model) / 1e9 == pytest.approx(total_b, rel=0.03 if name == "kimi-k2" else 0.01)
    active = params_active(model) - embeddings_left_out * model.hidden_size * model.vocab_size
    assert active / 1e9 == pytest.approx(active_b, rel=0.05)
    assert model.warnings == ()


def test_every_preset_has_a_golden_size_and_sources() -> None:
    golden = {row[0] for row in SIZES} | {row[0] for row in PUBLISHED} | {"toy-moe"}
    assert set(preset_names("models")) == golden
    assert all(load_model(name).sources for name in golden)


def test_attention_of_one_layer() -> None:
    """O2: MLA of DeepSeek-V3; GQA(4096, 32, 8, 128); GQA(4096, 64, 4, 128) with q/k norm."""
    for name, expected in (
        ("deepseek-v3", 187_107_328),
        ("mixtral-8x7b", 41_943_040),
        ("qwen3-235b-a22b", 71_303_424),
    ):
        model = load_model(name)
        params = layer_params(model, model.kinds[0])
        assert params.mixer_sharded + params.mixer_replicated == expected


def test_replicated_part_of_mla() -> None:
    """7168*1536 + 7168*(512 + 64) = 15,138,816 (15.14 M, domain reference 3.1) and the latent norms 1536 + 512."""
    assert layer_params(v3(), v3().kinds[0]).mixer_replicated == 15_138_816 + 2_048


def test_deepseek_v3_moe_layer() -> None:
    """O3: router, routed experts, shared expert; the bias buffer of 256 is no parameter."""
    model = v3()
    params = layer_params(model, model.kinds[1])
    assert (params.router, params.expert, params.shared_sharded) == (1_835_008, 11_274_289_152, 44_040_192)
    assert model.moe is not None
    assert model.moe.score_bias


def test_deepseek_v3_mtp() -> None:
    """O4 counts the module's 256 bias buffer: 11,610,068,224, its layer alone 11,507,286,272."""
    model = v3()
    assert params_mtp(model) + 256 == 11_610_068_224
    assert params_mtp(model) - mtp_extra_params(model) + 256 == 11_507_286_272


def test_deepseek_v3_active_without_input_embedding() -> None:
    """O5: 37,552,282,624 - 129,280 * 7,168."""
    assert params_active(v3()) - 129_280 * 7_168 == 36_625_603_584


def test_layers_of_presets() -> None:
    assert v3().dense_layers == (0, 1, 2)
    assert load_model("glm-4.5").dense_layers == (0, 1, 2)
    assert load_model("kimi-k2").dense_layers == (0,)
    assert load_model("toy-moe").moe_layers == (1, 2, 3)
    assert load_model("mixtral-8x7b").dense_layers == ()


def test_toy_moe_by_hand() -> None:
    """Embedding and head 2*512*64, final norm 64; attention 64*16*8 + 64*64 and norms 128 in four layers.

    Dense 3*64*256 once; experts 8*3*64*64 with router 64*8 in three layers: 460,864.
    """
    assert params_total(load_model("toy-moe")) == 65_600 + 4 * (12_288 + 128) + 49_152 + 3 * (98_304 + 512)


def test_gpt_oss_slides_on_even_layers_with_sinks() -> None:
    model = load_model("gpt-oss-120b")
    windows = [getattr(model.kinds[kind].mixer, "window", None) for kind in model.layers]
    assert windows[:4] == [128, 0, 128, 0]
    assert all(getattr(kind.mixer, "sink", False) for kind in model.kinds)


def test_preset_loads_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_model("DeepSeek-V3") == v3()
    assert load_model("configs/models/deepseek-v3.yaml") == v3()
    assert load_model("qwen3-235b-a22b").name == "qwen3-235b-a22b"
