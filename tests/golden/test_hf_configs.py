"""Real configurations of the reference folder against its independent facts."""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ap_search.spec.blocks import Model
from ap_search.spec.model import load_model
from ap_search.spec.parameters import layer_params, params_active, params_mtp, params_total

pytestmark = pytest.mark.shared

SHARED = Path(os.environ.get("AP_SEARCH_SHARED") or Path(__file__).resolve().parents[3] / "shared")
FOLDER = SHARED / "data" / "hf_configs"
TRUTH_FILE = FOLDER / "TRUTH.yaml"
TRUTH: dict[str, Any] = yaml.safe_load(TRUTH_FILE.read_text())["models"] if TRUTH_FILE.is_file() else {}

if not TRUTH:
    pytest.skip("the reference folder is absent", allow_module_level=True)

GOOD = sorted(name for name, truth in TRUTH.items() if truth["computed"]["exactness"].startswith("good"))
SKETCH = sorted(set(TRUTH) - set(GOOD))
MOE = sorted(name for name, truth in TRUTH.items() if truth["kind"] == "moe")


@cache
def read(name: str) -> Model:
    return load_model(FOLDER / TRUTH[name]["file"])


def expand(spans: list[Any]) -> tuple[int, ...]:
    layers: list[int] = []
    for span in spans:
        first, _, last = str(span).partition("-")
        layers += range(int(first), int(last or first) + 1)
    return tuple(layers)


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_layer_count(name: str) -> None:
    assert read(name).num_layers == TRUTH[name]["num_layers"]


@pytest.mark.parametrize("name", MOE)
def test_layers_and_experts(name: str) -> None:
    truth, model = TRUTH[name], read(name)
    assert model.moe is not None
    assert model.moe_layers == expand(truth["moe_layers"])
    assert len(model.dense_layers) == truth["dense_layer_count"]
    if isinstance(truth["dense_layers"], list):
        assert model.dense_layers == expand(truth["dense_layers"])
    assert (model.moe.num_experts, model.moe.top_k) == (truth["num_experts"], truth["top_k"])
    assert model.moe.shared_width == truth["shared_expert_total_width"]


@pytest.mark.parametrize("name", GOOD)
def test_totals_where_the_independent_count_is_whole(name: str) -> None:
    """Within 0.2 %: the figures have two decimals of a billion, and the count leaves GLM-5's indexer out (0.1 %)."""
    computed = TRUTH[name]["computed"]
    assert params_total(read(name)) / 1e9 == pytest.approx(computed["total_b"], rel=0.002)
    assert params_active(read(name)) / 1e9 == pytest.approx(computed["active_b"], rel=0.02)


@pytest.mark.parametrize("name", SKETCH)
def test_totals_where_only_the_published_figure_counts(name: str) -> None:
    """Within 0.6 % of what the authors publish: state-space, linear attention and latent experts are modelled."""
    assert params_total(read(name)) / 1e9 == pytest.approx(TRUTH[name]["published"]["total_b"], rel=0.006)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Mixtral-8x22B-v0.1", 140_620_634_112),
        ("Qwen3-235B-A22B", 235_093_634_560),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen2-57B-A14B", 57_408_658_944),
        ("DeepSeek-V3", 671_026_404_352),
        ("DeepSeek-R1", 671_026_404_352),
        ("Meta-Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_oracle_totals_from_configurations(name: str, total: int) -> None:
    """O1; Mixtral 8x22B has the vocabulary of its first configuration (domain reference 13.12)."""
    assert params_total(read(name)) == total


def test_oracles_of_deepseek_v3() -> None:
    """O3, O4 (256 of it the bias buffer), O5."""
    model = read("DeepSeek-V3")
    params = layer_params(model, model.kinds[1])
    assert (params.router, params.expert, params.shared_sharded) == (1_835_008, 11_274_289_152, 44_040_192)
    assert params_mtp(model) + 256 == 11_610_068_224
    assert params_active(model) == 37_552_282_624


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("mixtral-8x7b", "Mixtral-8x7B-v0.1"),
        ("deepseek-v2-lite", "DeepSeek-V2-Lite"),
        ("deepseek-v3", "DeepSeek-V3"),
        ("kimi-k2", "Kimi-K2-Instruct"),
        ("qwen2-57b-a14b", "Qwen2-57B-A14B"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("qwen3-235b-a22b", "Qwen3-235B-A22B"),
        ("glm-4.5", "GLM-4.5"),
        ("gpt-oss-120b", "gpt-oss-120b"),
        ("llama-3.1-8b", "Meta-Llama-3.1-8B"),
        ("llama-3.1-70b", "Meta-Llama-3.1-70B"),
        ("llama-3.1-405b", "Meta-Llama-3.1-405B"),
        ("mimo-v2-flash", "MiMo-V2-Flash"),
    ],
)
def test_presets_equal_the_configurations(preset: str, name: str) -> None:
    known = load_model(preset)
    assert replace(read(name), name=known.name, sources=known.sources) == known


def test_mimo_expert_bytes() -> None:
    """8 experts' worth of ranks: 47 layers * 256 * 3*4096*2048 / 8 * 2 bytes = 75.70e9 (Megatron-Bridge issue 4754)."""
    model = read("MiMo-V2-Flash")
    experts = sum(layer_params(model, model.kinds[kind]).expert for kind in model.layers)
    assert experts // 8 * 2 == pytest.approx(75.70e9, rel=1e-4)
    assert experts == 47 * 256 * 3 * 4096 * 2048


def test_sparse_attention_of_minimax_m3() -> None:
    """Indexer on all but the first three layers; 16 blocks of 128 keys."""
    model = read("MiniMax-M3")
    assert [getattr(model.kinds[kind].mixer, "index_heads", 0) for kind in model.layers] == [0] * 3 + [4] * 57
    assert getattr(model.kinds[model.layers[3]].mixer, "index_topk", 0) == 2048


def test_chunked_attention_of_llama_4() -> None:
    """Every fourth layer sees everything; the shared expert is as wide as a routed one."""
    model = read("Llama-4-Scout-17B-16E-Instruct")
    windows = [getattr(model.kinds[kind].mixer, "window", None) for kind in model.layers]
    assert windows[:8] == [8192, 8192, 8192, 0, 8192, 8192, 8192, 0]


def test_mtp_of_a_hybrid_is_attention_and_experts() -> None:
    model = read("Nemotron-3-Super-120B-A12B-FP8")
    assert model.mtp_kind.is_moe
    assert model.mtp_kind.mixer is not None
    assert model.kinds[model.layers[-1]].mixer is None
