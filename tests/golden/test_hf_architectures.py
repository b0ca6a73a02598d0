"""Architectures at large: configurations in their own spellings against published sizes (data/hf_architectures)."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ap_search.spec.blocks import Attention, LinearMixer, Model
from ap_search.spec.hf import read_hf
from ap_search.spec.parameters import params_active, params_total

ROWS: dict[str, dict[str, Any]] = {
    row["name"]: row for row in yaml.safe_load((Path(__file__).parent / "data" / "hf_architectures.yaml").read_text())
}


def read(name: str) -> Model:
    return read_hf(ROWS[name]["config"], name=name, where="config.json")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "total" in row])
def test_exact_totals(name: str) -> None:
    assert params_total(read(name)) == ROWS[name]["total"]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "total_b" in row])
def test_rounded_totals(name: str) -> None:
    assert params_total(read(name)) / 1e9 == pytest.approx(ROWS[name]["total_b"], rel=0.01)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "active_b" in row])
def test_active(name: str) -> None:
    """Within 6 % between the counts without and with embeddings: authors count both ways, and round."""
    model = read(name)
    active, outer = params_active(model), 2 * model.hidden_size * model.vocab_size
    assert 0.94 * (active - outer) / 1e9 <= ROWS[name]["active_b"] <= 1.06 * active / 1e9


def test_layers_by_period() -> None:
    """Jamba: attention at 4, 12, 20, 28; experts on odd layers; else Mamba."""
    model = read("jamba")
    attention = [i for i, kind in enumerate(model.layers) if isinstance(model.kinds[kind].mixer, Attention)]
    assert attention == [4, 12, 20, 28]
    assert model.moe_layers == tuple(range(1, 32, 2))


def test_layers_by_numbers_from_one() -> None:
    """Kimi-Linear: layers 4, 8 ... 24 and 27, counted from 1, are latent attention."""
    model = read("kimi-linear")
    linear = [i for i, kind in enumerate(model.layers) if isinstance(model.kinds[kind].mixer, LinearMixer)]
    assert [i for i in range(27) if i not in linear] == [3, 7, 11, 15, 19, 23, 26]
    assert model.dense_layers == (0,)


def test_layers_by_text_of_numbers() -> None:
    assert read("step3").moe_layers == tuple(range(4, 60))


def test_layers_by_start_and_interval() -> None:
    assert read("ernie-300b").dense_layers == (0, 1, 2)


def test_letters_for_windows() -> None:
    """LLLG: three sliding layers, then a full one."""
    model = read("exaone4-32b")
    windows = [getattr(model.kinds[kind].mixer, "window", None) for kind in model.layers]
    assert windows[:5] == [4096, 4096, 4096, 0, 4096]


def test_keys_of_a_layer_below() -> None:
    """Hunyuan-Large: every second layer takes keys and values of the layer below."""
    model = read("hunyuan-large")
    below = [getattr(model.kinds[kind].mixer, "kv_from_below", None) for kind in model.layers]
    assert below[:4] == [False, True, False, True]
