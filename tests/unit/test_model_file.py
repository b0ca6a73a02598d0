"""Our own model files: fields, faults between fields, the stated size."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from ap_search.errors import SpecError
from ap_search.spec.blocks import AttentionKind, DenseFfn, QkNorm
from ap_search.spec.model import load_model, read_model_file
from ap_search.spec.model_file import AttentionFile, FfnFile, ModelFile, MoeFile, PublishedFile, SlidingFile
from ap_search.spec.parameters import params_total
from ap_search.spec.stated import parse_figure

PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 100,
    "num_layers": 4,
    "attention": {"num_heads": 4, "num_kv_heads": 2},
    "ffn": {"width": 96},
}
MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_width": 32}


def read(changes: dict[str, Any], *, drop: str = "") -> Any:
    data = {key: value for key, value in {**PLAIN, **changes}.items() if key != drop}
    return read_model_file(data, name="m", where="m.yaml")


def faults_of(changes: dict[str, Any], *, drop: str = "") -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(changes, drop=drop)
    return [str(fault) for fault in caught.value.faults]


def test_defaults() -> None:
    model = read({})
    assert (model.name, model.num_layers, len(model.kinds)) == ("m", 4, 1)
    assert (model.attention.qk_head_dim, model.attention.v_head_dim) == (16, 16)
    assert model.kinds[0].ffn == DenseFfn(width=96)


def test_latent_attention() -> None:
    latent = {"kind": "mla", "num_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2}
    attention = read({"attention": {**latent, "v_head_dim": 5}}).attention
    assert attention.kind is AttentionKind.MLA
    assert (attention.qk_head_dim, attention.v_head_dim, attention.num_kv_heads) == (8, 5, 4)


@pytest.mark.parametrize(
    ("where", "layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"first_dense_layers": 1}, (1, 2, 3)),
        ({"every": 2}, (1, 3)),
        ({"layer_pattern": [1, 0, 0, 1]}, (0, 3)),
    ],
)
def test_which_layers_have_experts(where: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read({"moe": {**MOE, **where}}).moe_layers == layers


def test_sliding_layers_take_what_they_name() -> None:
    sliding = {"window": 8, "pattern": [1, 0], "num_kv_heads": 4, "sink": True}
    model = read({"sliding": sliding, "attention": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": "head"}})
    slid, full = (kind.mixer for kind in model.kinds)
    assert (slid.window, slid.num_kv_heads, slid.sink, slid.qk_norm) == (8, 4, True, QkNorm.HEAD)
    assert (full.window, full.num_kv_heads, full.sink) == (0, 2, False)
    assert model.layers == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hiden_size": 3}, "m.yaml: hiden_size: is not a known key (legal: hidden_size"),
        ({"hidden_size": 0}, "m.yaml: hidden_size: is 0 (legal: > 0)"),
        ({"hidden_size": -1}, "m.yaml: hidden_size: is -1 (legal: > 0)"),
        ({"hidden_size": "64"}, "m.yaml: hidden_size: is text ('64') (legal: a whole number)"),
        ({"num_layers": 10**9}, "m.yaml: num_layers: is 1000000000 (legal: <= 10000)"),
        ({"attention": {"num_heads": 4, "kind": "gla"}}, "m.yaml: attention.kind: is 'gla' (legal: gqa or mla)"),
        ({"attention": {"num_heads": 5}}, "m.yaml: attention.num_heads: 5 heads do not divide hidden_size 64"),
        ({"attention": {"num_heads": 4, "num_kv_heads": 3}}, "m.yaml: attention.num_kv_heads: 3 key heads"),
        ({"attention": {"num_heads": 4, "kind": "mla"}}, "m.yaml: attention.kv_lora_rank: is required for mla"),
        ({"moe": {**MOE, "top_k": 9}}, "m.yaml: moe.top_k: is 9 of 8 experts (legal: 1 to 8)"),
        ({"moe": {**MOE, "num_groups": 3}}, "m.yaml: moe.num_groups: 3 groups do not divide 8 experts"),
        ({"moe": {**MOE, "layer_pattern": [1]}}, "m.yaml: moe.layer_pattern: has 1 entries (legal: 4, one per layer)"),
        ({"moe": {**MOE, "layer_pattern": [2, 1, 1, 1]}}, "m.yaml: moe.layer_pattern[0]: is 2 (legal: <= 1)"),
        ({"moe": {**MOE, "first_dense_layers": 4}}, "m.yaml: moe: no layer holds experts"),
        ({"moe": {**MOE, "expert_widht": 3}}, "m.yaml: moe.expert_widht: is not a known key (legal: expert_width"),
        ({"published": {"params_total": "big", "source": "x"}}, "m.yaml: published.params_total: is 'big'"),
    ],
)
def test_faults_name_path_and_legal_values(changes: dict[str, Any], expected: str) -> None:
    assert any(line.startswith(expected) for line in faults_of(changes))


def test_dense_layers_need_a_feed_forward() -> None:
    assert faults_of({}, drop="ffn") == ["m.yaml: ffn: is missing: all layers are dense, so ffn is required"]
    moe = {**MOE, "first_dense_layers": 1}
    assert faults_of({"moe": moe}, drop="ffn") == ["m.yaml: ffn: is missing: 1 layers are dense, so ffn is required"]
    assert read({"moe": MOE}, drop="ffn").moe_layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("written", "count", "half"),
    [("671B", 671e9, 0.5e9), ("46.7B", 46.7e9, 0.05e9), ("1T", 1e12, 0.5e12), (46_702_792_704, 46_702_792_704, 0)],
)
def test_figures(written: object, count: float, half: float) -> None:
    figure = parse_figure(written)
    assert figure is not None
    assert figure.count == pytest.approx(count)
    assert figure.half_digit == pytest.approx(half)


@pytest.mark.parametrize("written", [None, True, "big", "B", [1], "-3B", "1e9B"])
def test_what_is_no_figure(written: object) -> None:
    assert parse_figure(written) is None


def test_a_contradicted_size_is_warned_of_and_read() -> None:
    """1.2 % off a figure of six digits warns; 1T stands for anything from 0.5 to 1.5 trillion."""
    count = params_total(read({}))
    (line,) = read({"published": {"params_total": int(count * 1.012), "source": "x"}}).warnings
    assert f"{count:,}" in line
    assert str(int(count * 1.012)) in line
    assert read({"published": {"params_total": int(count * 1.009), "source": "x"}}).warnings == ()
    assert parse_figure("1T").agrees(1_026_000_000_000)  # type: ignore[union-attr]


def test_name_of_a_file_called_config(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = folder / "config.yaml"
    path.write_text("hidden_size: 64\nvocab_size: 8\nnum_layers: 1\nattention: {num_heads: 4}\nffn: {width: 8}\n")
    assert load_model(path).name == "my-model"


def test_a_folder_with_a_configuration(tmp_path: Path) -> None:
    keys = {"model_type": "llama", "hidden_size": 64, "vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**keys, "intermediate_size": 8}))
    assert load_model(tmp_path).name == tmp_path.name
    (tmp_path / "config.json").unlink()
    with pytest.raises(SpecError, match="is a folder"):
        load_model(tmp_path)


def fields_of(schema: type[BaseModel]) -> list[tuple[str, str | None]]:
    return [(name, field.description) for name, field in schema.model_fields.items()]


def test_every_field_is_described_in_the_schema_and_in_the_guide() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "model-files.md").read_text()
    for block in (ModelFile, AttentionFile, SlidingFile, FfnFile, MoeFile, PublishedFile):
        for name, description in fields_of(block):
            assert description, f"{block.__name__}.{name}"
            assert f"`{name}`" in guide, f"{block.__name__}.{name}"
