"""Hugging Face configurations: what is refused, by the name of the key; what is warned of; what keys mean."""

from typing import Any

import pytest

from ap_search.errors import SpecError
from ap_search.spec.blocks import Attention, DenseFfn, LinearMixer, MoeFfn, QkNorm
from ap_search.spec.hf import is_hf, read_hf
from ap_search.spec.parameters import params_total

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "model_type": "unheard_of",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def read(config: dict[str, Any]) -> Any:
    return read_hf(config, name="m", where="config.json")


def faults_of(config: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        read(config)
    return str(caught.value)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    "change",
    [
        {"is_encoder_decoder": True},
        {"add_cross_attention": True},
        {"cross_attention_layers": [3]},
        {"hc_mult": 4},
        {"conv_L_cache": 3},
        {"mamba_d_ssm": 128},
        {"zero_expert_num": 4},
        {"rwkv_head_size": 64},
        {"hyena_order": 2},
        {"ssm_cfg": {"layer": "Mamba2"}},
        {"linear_num_value_heads": 4},
        {"time_mix_extra_dim": 32},
        {"moe_unheard_of_experts": 8},
        {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
        {"layer_types": ["linear_attention", "full_attention"] * 2},
        {"model_type": "mamba"},
    ],
)
def test_what_is_not_modelled_is_refused_by_its_key(change: dict[str, Any]) -> None:
    assert f"config.json: {next(iter(change))}: " in faults_of({**DENSE, **change})


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_key_names_its_spellings(key: str) -> None:
    line = faults_of(without(DENSE, key))
    assert "is required and missing" in line
    assert key in line
    assert "n_" in line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": -64}, "hidden_size: is -64 (legal: 1 to 2147483647)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: is 1000000000 (legal: 1 to 10000)"),
        ({"vocab_size": "100"}, "vocab_size: is text ('100') (legal: a whole number)"),
        ({"vocab_size": True}, "vocab_size: is a true/false value"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "5 heads do not divide hidden_size = 64"),
        ({"num_key_value_heads": 3}, "3 key heads do not divide 4 query heads"),
        ({"attention_bias": 1}, "attention_bias: is a number (1) (legal: true or false)"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types: has 3 entries (legal: 4, one per layer)"),
    ],
)
def test_bad_values(change: dict[str, Any], expected: str) -> None:
    assert expected in faults_of({**DENSE, **change})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_experts_per_tok": 9}, "9 of num_experts = 8 (legal: 1 to 8)"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok: is required and missing"),
        ({"n_group": 3}, "3 groups do not divide 8 experts"),
        ({"moe_layer_freq": [1, 0]}, "moe_layer_freq: has 2 entries"),
        ({"moe_layer_freq": "([0]*1+[1]*3)"}, "moe_layer_freq: is text"),
        ({"num_experts": [8, 8]}, "num_experts: has 2 entries"),
        ({"mlp_layer_types": ["dense", "wide", "sparse", "sparse"]}, "mlp_layer_types: names layers"),
    ],
)
def test_bad_experts(change: dict[str, Any], expected: str) -> None:
    assert expected in faults_of({**EXPERTS, **change})


def test_all_faults_at_once() -> None:
    lines = faults_of({**DENSE, "hidden_size": 0, "hc_mult": 2, "vocab_size": "x"}).splitlines()
    assert len(lines) == 3


def test_null_is_absent_and_quantization_is_not_read() -> None:
    plain = read(DENSE)
    assert read({**DENSE, "head_dim": None, "num_experts": None, "quantization_config": {"bits": 8}}) == plain


@pytest.mark.parametrize(
    ("change", "moe_layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"first_k_dense_replace": 1}, (1, 2, 3)),
        ({"moe_layer_freq": 2}, (0, 2)),
        ({"moe_layer_freq": [0, 1, 0, 1]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [2]}, (0, 1, 3)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 2}, (1, 2)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, (1, 2, 3)),
        ({"moe_layers_enum": "1,3"}, (1, 3)),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, (1, 3)),
        ({"num_nextn_predict_layers": 1, "moe_layer_freq": [0, 1, 1, 1, 1]}, (1, 2, 3)),
        ({"num_experts": 1, "num_experts_per_tok": 1}, ()),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], moe_layers: tuple[int, ...]) -> None:
    assert read({**EXPERTS, **change}).moe_layers == moe_layers


@pytest.mark.parametrize(
    ("change", "width"),
    [
        ({"n_shared_experts": 2}, 64),
        ({"n_shared_experts": None}, 0),
        ({"shared_expert_intermediate_size": 48}, 48),
        ({"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 80}, 80),
        ({"shared_intermediate_size": 0}, 0),
    ],
)
def test_shared_width(change: dict[str, Any], width: int) -> None:
    moe = read({**EXPERTS, **change}).moe
    assert moe.shared_width == width
    assert moe.shared_gate == ("shared_expert_intermediate_size" in change)


def test_expert_width_falls_back_to_the_feed_forwards() -> None:
    assert read(without(EXPERTS, "moe_intermediate_size")).moe.expert_width == 96


def windows(config: dict[str, Any]) -> list[int]:
    model = read(config)
    return [model.kinds[kind].mixer.window for kind in model.layers]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sliding_window": 16}, [16] * 4),
        ({"sliding_window": None}, [0] * 4),
        ({"sliding_window": 16, "use_sliding_window": False}, [0] * 4),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, [0, 0, 16, 16]),
        ({"sliding_window": 16, "sliding_window_pattern": 2}, [16, 0, 16, 0]),
        ({"sliding_window": 16, "sliding_window_pattern": "LLG"}, [16, 16, 0, 16]),
        ({"sliding_window": 16, "hybrid_layer_pattern": [0, 1, 1, 0]}, [0, 16, 16, 0]),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}, [16, 0, 16, 0]),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 1, 0, 1]}, [8, 8, 0, 8]),
    ],
)
def test_windows(change: dict[str, Any], expected: list[int]) -> None:
    assert windows({**DENSE, **change}) == expected


def test_sliding_layers_of_another_make() -> None:
    model = read({**DENSE, "hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window": 8, "swa_num_key_value_heads": 4})
    assert [kind.mixer.num_kv_heads for kind in model.kinds] == [2, 4]


def test_either_mixer_or_feed_forward() -> None:
    config = {
        **EXPERTS,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "mlp_hidden_act": "relu2",
    }
    model = read(config)
    found = [(type(kind.mixer).__name__, type(kind.ffn).__name__, kind.num_norms) for kind in model.kinds]
    assert found == [
        ("LinearMixer", "NoneType", 1),
        ("NoneType", "MoeFfn", 1),
        ("Attention", "NoneType", 1),
        ("NoneType", "DenseFfn", 1),
    ]


def test_gated_delta_net_by_hand() -> None:
    """In: q 16, k 16, v 32, z 32, b 4, a 4 = 104; convolution (16+16+32)*4, dt and A 8, norm 8."""
    model = read({**DENSE, **HYBRID, "model_type": "qwen3_next", "head_dim": 16})
    mixer = model.kinds[0].mixer
    assert isinstance(mixer, LinearMixer)
    assert (mixer.in_width, mixer.out_width, mixer.small_params) == (104, 32, 256 + 8 + 8)
    assert [isinstance(model.kinds[kind].mixer, Attention) for kind in model.layers] == [False, False, False, True]


def test_a_hybrid_without_its_keys_is_refused() -> None:
    assert "linear_num_key_heads: is required and missing" in faults_of({**DENSE, "model_type": "qwen3_next"})
    assert "layer_types: is required and missing" in faults_of({**DENSE, "model_type": "bamba"})


def test_wrapper_around_the_language_model() -> None:
    wrapper = {"model_type": "seeing", "text_config": DENSE, "vision_config": {"hidden_size": 7}, "image_token_id": 9}
    model = read(wrapper)
    assert params_total(model) == params_total(read(DENSE))
    assert model.warnings == ("vision_config left out: only the language model is read",)


def test_blocks_given_one_by_one() -> None:
    """ffn_mult 1.5 * 64 * 2/3 = 64, rounded up to 256."""
    part = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}}
    empty = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    model = read({**without(DENSE, "intermediate_size", "num_key_value_heads"), "block_configs": [part, empty] * 2})
    assert model.layers == (0, 1, 0, 1)
    assert (model.kinds[0].mixer.num_kv_heads, model.kinds[0].ffn) == (1, DenseFfn(width=256))
    assert (model.kinds[1].mixer, model.kinds[1].ffn, model.kinds[1].num_norms) == (None, None, 0)


def test_blocks_with_a_linear_part_are_refused() -> None:
    part = {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}}
    assert "block_configs[0].attention.replace_with_linear" in faults_of({**DENSE, "block_configs": [part] * 4})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "qwen3"}, QkNorm.HEAD),
        ({"model_type": "olmoe"}, QkNorm.WIDTH),
        ({"model_type": "llama4_text", "use_qk_norm": True}, QkNorm.NONE),
        ({"use_qk_norm": True, "qk_norm_type": "per_layer"}, QkNorm.WIDTH),
        ({"use_qk_norm": False}, QkNorm.NONE),
    ],
)
def test_qk_norm(change: dict[str, Any], expected: QkNorm) -> None:
    assert read({**DENSE, **change}).attention.qk_norm is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (False, False)),
        ({"attention_bias": True}, (True, True)),
        ({"attention_bias": True, "model_type": "glm4_moe"}, (True, False)),
        ({"model_type": "qwen2"}, (True, False)),
        ({"attention_bias": True, "attention_out_bias": False}, (True, False)),
        ({"no_bias": True}, (False, False)),
        ({"use_bias": True}, (True, True)),
    ],
)
def test_biases(change: dict[str, Any], expected: tuple[bool, bool]) -> None:
    attention = read({**DENSE, **change}).attention
    assert (attention.qkv_bias, attention.out_bias) == expected


def test_tied_by_key_by_architecture_or_assumed() -> None:
    open_question = without(DENSE, "tie_word_embeddings")
    assert read({**open_question, "model_type": "gemma", "head_dim": 16}).tied_embeddings
    assert not read(open_question).tied_embeddings
    assert read({**open_question, "tie_embeddings": True}).tied_embeddings
    assert "tie_word_embeddings" in read({**open_question, "model_type": "unheard_of"}).warnings[0]


@pytest.mark.parametrize("stated", [{"num_parameters": 5_000_000}, {"total_params": "7B"}, {"params_b": 70.6}])
def test_a_stated_total_that_contradicts_the_count_is_warned_of(stated: dict[str, Any]) -> None:
    (line,) = read({**DENSE, **stated}).warnings
    assert f"{params_total(read(DENSE)):,}" in line
    assert str(next(iter(stated.values()))) in line


def test_a_stated_total_that_agrees_is_silent() -> None:
    count = params_total(read(DENSE))
    assert read({**DENSE, "num_parameters": int(count * 1.009)}).warnings == ()


def test_two_spellings_that_disagree_are_warned_of() -> None:
    model = read({**DENSE, "num_layers": 3})
    assert model.num_layers == 4
    assert model.warnings == ("num_layers = 3 contradicts num_hidden_layers = 4; the latter is read",)


def test_keys_that_may_shape_layers_are_named() -> None:
    assert "adapter_rank" in read({**DENSE, "adapter_rank": 8}).warnings[0]


def test_architecture_from_its_class_where_no_type_is_given() -> None:
    model = read({**without(DENSE, "model_type"), "architectures": ["Qwen3ForCausalLM"], "head_dim": 16})
    assert model.attention.qk_norm is QkNorm.HEAD


def test_two_matrices_and_layer_norm() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 100}
    model = read(config)
    assert model.kinds[0].ffn == DenseFfn(width=256, gated=False, bias=True)
    assert (model.norm_params_per_element, model.learned_positions, model.tied_embeddings) == (2, 32, True)


def test_experts_per_layer_may_differ() -> None:
    model = read({**EXPERTS, "num_experts_per_tok": [2, 2, 1, 1]})
    assert [kind.ffn.top_k for kind in model.kinds if isinstance(kind.ffn, MoeFfn)] == [2, 1]


def test_what_is_a_configuration() -> None:
    assert is_hf(DENSE)
    assert is_hf({"text_config": {}})
    assert not is_hf({"hidden_size": 1, "num_layers": 2, "attention": {}})


@pytest.mark.parametrize("key", ["intermediate_size", "moe_intermediate_size", "num_experts_per_tok"])
def test_a_width_or_number_of_zero_is_a_fault(key: str) -> None:
    assert f"{key}: is 0 (legal: 1 to" in faults_of({**EXPERTS, "first_k_dense_replace": 1, key: 0})


def test_an_expert_has_a_width_of_its_own_where_the_architecture_has_such_a_key() -> None:
    config = {**without(EXPERTS, "moe_intermediate_size", "num_experts"), "n_routed_experts": 8}
    assert "moe_intermediate_size: is required and missing" in faults_of(config)


def test_a_switch_turns_experts_off() -> None:
    assert read({**EXPERTS, "use_moe": False}).moe_layers == ()
