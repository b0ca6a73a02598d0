"""Mixers of a Hugging Face configuration: attention of each make, linear attention, state space."""

from math import ceil

from ap_search.spec.blocks import Attention, AttentionKind, LinearMixer, QkNorm
from ap_search.spec.hf_config import HfConfig
from ap_search.spec.hf_layers import CHUNKED, FULL, LINEAR, MAMBA, NONE, SLIDING


def build_mixer(config: HfConfig, word: str, layer: int) -> Attention | LinearMixer | None:
    """Build the mixer that a word names, for one layer."""
    if word == NONE:
        return None
    if word == MAMBA:
        return _state_space(config)
    if word == LINEAR:
        return _linear(config)
    if config.maybe_count("kv_lora_rank") and config.flag("use_mla", True):
        return _mla(config, layer)
    return _gqa(config, word, layer)


def _gqa(config: HfConfig, word: str, layer: int) -> Attention:
    """Build grouped-query (or multi-head, or multi-query) attention."""
    local = "sliding" if word == SLIDING else "full"
    heads = config.maybe_count(f"{local}_heads") or config.count("num_heads")
    head_dim = _head_dim(config, local, heads)
    kv_heads = config.maybe_count(f"{local}_kv_heads") or _kv_heads(config, heads)
    if heads % kv_heads:
        config.fail(config.key("num_kv_heads"), f"{kv_heads} key heads do not divide {heads} query heads")
    qkv_bias, out_bias = _biases(config)
    index_heads = _index_heads(config, layer)
    return Attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        qk_head_dim=head_dim,
        v_head_dim=config.maybe_count(f"{local}_v_head_dim") or config.maybe_count("v_head_dim") or head_dim,
        q_lora_rank=config.maybe_count("q_lora_rank"),
        window=_window(config, word),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=_qk_norm(config),
        output_gate=config.flag("output_gate", config.fact("output_gate")),
        head_gate=config.flag("head_gate", False),
        key_is_value=word == FULL and config.flag("full_key_is_value", False),
        kv_from_below=_kv_from_below(config, layer),
        sink=_sink(config, local),
        index_heads=index_heads,
        index_head_dim=config.count("index_head_dim") if index_heads else 0,
        index_topk=_index_topk(config) if index_heads else 0,
    )


def _mla(config: HfConfig, layer: int) -> Attention:
    """Build multi-head latent attention."""
    heads = config.count("num_heads")
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    qkv_bias, out_bias = _biases(config)
    index_heads = _index_heads(config, layer)
    config.find("num_kv_heads")
    config.find("head_dim")
    return Attention(
        kind=AttentionKind.MLA,
        num_heads=heads,
        num_kv_heads=heads,
        qk_head_dim=nope + rope,
        v_head_dim=config.count("v_head_dim", config.count("hidden_size") // heads),
        q_lora_rank=config.maybe_count("q_lora_rank"),
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_rope_head_dim=rope,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        output_gate=config.flag("output_gate", False),
        index_heads=index_heads,
        index_head_dim=config.count("index_head_dim") if index_heads else 0,
        index_topk=config.count("index_topk") if _has_indexer(config) else 0,
    )


def _head_dim(config: HfConfig, local: str, heads: int) -> int:
    """Width of a head: stated, or the hidden size over the heads."""
    own = config.maybe_count(f"{local}_head_dim")
    if own:
        return own
    hidden = config.count("hidden_size")
    if not config.has("head_dim") and hidden % heads:
        config.fail(config.key("num_heads"), f"{heads} heads do not divide {config.key('hidden_size')} = {hidden}")
    return config.count("head_dim", max(1, hidden // heads))


def _kv_heads(config: HfConfig, heads: int) -> int:
    """Key heads: one where queries share all, else as stated, else as many as query heads."""
    shared = config.flag("multi_query", config.fact("multi_query"))
    if shared and not config.flag("new_decoder", False):
        config.find("num_kv_heads")
        return 1
    if config.text("attention_make") == "multiquery_attention":
        return 1
    return config.count("num_kv_heads", heads)


def _biases(config: HfConfig) -> tuple[bool, bool]:
    """Whether (query, key and value, output) projections have a bias."""
    general = config.flag("any_bias", config.fact("bias_by_default"))
    if config.has("no_bias"):
        general = not config.flag("no_bias", True)
    both = config.flag("attention_bias", general or config.fact("attention_bias"))
    if config.fact("bias_on_all"):
        return True, True
    qkv = config.flag("qkv_bias", both or config.fact("qkv_bias"))
    return qkv, config.flag("out_bias", both and not config.fact("out_without_bias"))


def _qk_norm(config: HfConfig) -> QkNorm:
    """Say what a norm on queries and keys spans, if it has weights."""
    made = config.text("qk_norm_type")
    if config.fact("qk_norm_without_weight") or not config.flag("qk_norm", bool(made) or config.fact("qk_norm")):
        return QkNorm.NONE
    spans = {"per_layer": QkNorm.WIDTH, "per_head": QkNorm.HEAD}
    if made and made not in spans:
        config.fail(config.key("qk_norm_type"), f"is {made!r}", ", ".join(spans))
    return spans.get(made, QkNorm.WIDTH if config.fact("qk_norm_of_width") else QkNorm.HEAD)


def _window(config: HfConfig, word: str) -> int:
    """Keys that a query sees at most; a chunk counts as a window of its length."""
    if word == SLIDING:
        return config.count("window")
    return config.count("chunk") if word == CHUNKED else 0


def _sink(config: HfConfig, local: str) -> bool:
    """Whether heads have a trained sink."""
    everywhere = config.flag("sink", config.fact("attention_sink"))
    return config.flag(f"{local}_sink", everywhere)


def _kv_from_below(config: HfConfig, layer: int) -> bool:
    """Whether a layer takes keys and values of one below: every one but the first of a group, or the last layers."""
    if config.flag("use_cla", False) and layer % config.count("cla_share", 2):
        return True
    return layer >= config.layers - config.maybe_count("kv_shared_layers")


def _has_indexer(config: HfConfig) -> bool:
    """Whether keys are picked by an indexer."""
    return bool(config.maybe_count("index_heads"))


def _index_heads(config: HfConfig, layer: int) -> int:
    """Heads of this layer's indexer, 0 where it has none (or takes the picks of another layer)."""
    heads = config.maybe_count("index_heads")
    made = config.find("index_types")
    if made and isinstance(made[1], list) and layer < len(made[1]) and made[1][layer] != "full":
        return 0
    return heads if config.count_at("index_layers", layer, 1) else 0


def _index_topk(config: HfConfig) -> int:
    """Keys that the indexer picks: a number of keys, or of blocks of keys."""
    blocks = config.maybe_count("index_topk_blocks")
    return blocks * config.count("index_block") if blocks else config.count("index_topk")


def _linear(config: HfConfig) -> LinearMixer | None:
    """Build the linear attention whose keys the file has."""
    if config.has("kda_heads"):
        return _kimi_delta(config)
    if config.has("delta_value_heads") or config.fact("delta_net"):
        return _gated_delta(config)
    if config.fact("lightning"):
        return _lightning(config)
    key = config.key("softmax_layers") if config.has("softmax_layers") else config.key("layer_types")
    config.fail(key, "names linear attention of a make that is not modelled")
    return None


def _gated_delta(config: HfConfig) -> LinearMixer:
    """Build a gated delta net.

    Source: transformers `models/qwen3_next/modeling_qwen3_next.py`, class Qwen3NextGatedDeltaNet: in_proj_qkvz,
    in_proj_ba, conv1d over q, k, v without bias, dt_bias and A_log per value head, norm of one value head, out_proj.
    """
    key_heads, value_heads = config.count("delta_key_heads"), config.count("delta_value_heads")
    key_dim, value_dim = config.count("delta_key_dim"), config.count("delta_value_dim")
    kernel = config.count("delta_kernel")
    keys, values = key_heads * key_dim, value_heads * value_dim
    return LinearMixer(
        name="gated_delta_net",
        in_width=2 * keys + 2 * values + 2 * value_heads,
        out_width=values,
        small_params=(2 * keys + values) * kernel + 2 * value_heads + value_dim,
        scan_flops_per_token=2 * (2 * keys + values) * kernel + 8 * value_heads * key_dim * value_dim,
        heads=key_heads,
    )


def _kimi_delta(config: HfConfig) -> LinearMixer:
    """Build Kimi delta attention.

    Source: moonshotai Kimi-Linear `modeling_kimi.py`, class KimiDeltaAttention: q, k, v with a convolution each; decay
    and output gate through a bottleneck of one head (the gate whole where `use_full_rank_gate`); beta, A_log per head.
    """
    heads, dim, kernel = config.count("kda_heads"), config.count("kda_dim"), config.count("kda_kernel", 4)
    width = heads * dim
    full_gate = config.flag("kda_full_gate", False)
    config.find("kda_full_layers")
    return LinearMixer(
        name="kimi_delta_attention",
        in_width=3 * width + dim + heads + (width if full_gate else dim),
        out_width=width,
        small_params=3 * width * kernel + dim * width * (1 if full_gate else 2) + heads + width + dim,
        scan_flops_per_token=6 * width * kernel + 8 * width * dim,
        heads=heads,
    )


def _lightning(config: HfConfig) -> LinearMixer:
    """Build lightning attention.

    Source: MiniMax-M1 `modeling_minimax_m1.py`, class MiniMaxM1LightningAttention: qkv_proj, output_gate, norm of the
    whole width, out_proj; as many key heads as query heads.
    """
    heads = config.count("num_heads")
    dim = _head_dim(config, "full", heads)
    width = heads * dim
    return LinearMixer(
        name="lightning_attention",
        in_width=4 * width,
        out_width=width,
        small_params=width,
        scan_flops_per_token=6 * width * dim,
        heads=heads,
    )


def _state_space(config: HfConfig) -> LinearMixer:
    """Build Mamba-2 where the file has state-space heads, Mamba-1 otherwise."""
    return _mamba2(config) if config.has("ssm_heads") else _mamba1(config)


def _mamba2(config: HfConfig) -> LinearMixer:
    """Build a Mamba-2 mixer.

    Source: transformers `models/bamba/modeling_bamba.py`, class BambaMixer: in_proj to gate, x, B, C, dt; conv1d over
    x, B, C; A_log, D, dt_bias per head; gated norm of the inner width; out_proj.
    """
    heads, groups, state = config.count("ssm_heads"), config.count("ssm_groups", 1), config.count("ssm_state")
    kernel, hidden = config.count("ssm_kernel", 4), config.count("hidden_size")
    expanded = config.count("ssm_expand", 2) * hidden
    inner = heads * config.count("ssm_head_dim", expanded // heads)
    conv = inner + 2 * groups * state
    in_width = 2 * inner + 2 * groups * state + heads
    biases = conv * config.flag("ssm_conv_bias", True) + (in_width + hidden) * config.flag("ssm_proj_bias", False)
    return LinearMixer(
        name="mamba2",
        in_width=in_width,
        out_width=inner,
        small_params=conv * kernel + 3 * heads + inner + biases,
        scan_flops_per_token=2 * conv * kernel + 6 * inner * state,
        heads=groups if groups > 1 else heads,
    )


def _mamba1(config: HfConfig) -> LinearMixer:
    """Build a Mamba-1 mixer.

    Source: transformers `models/jamba/modeling_jamba.py`, class JambaMambaMixer: in_proj, conv1d, x_proj, dt_proj with
    bias, A_log, D, out_proj; norms of dt, B and C in that architecture.
    """
    hidden = config.count("hidden_size")
    inner, state = config.count("ssm_expand", 2) * hidden, config.count("ssm_state")
    kernel, rank = config.count("ssm_kernel", 4), config.count("ssm_rank", ceil(hidden / 16))
    biases = inner * config.flag("ssm_conv_bias", True) + (2 * inner + hidden) * config.flag("ssm_proj_bias", False)
    norms = (rank + 2 * state) * config.flag("ssm_inner_norms", config.fact("inner_ssm_norms"))
    projections = inner * (rank + 2 * state) + rank * inner + inner
    return LinearMixer(
        name="mamba",
        in_width=2 * inner,
        out_width=inner,
        small_params=inner * kernel + projections + inner * state + inner + biases + norms,
        scan_flops_per_token=2 * inner * kernel + 2 * projections + 6 * inner * state,
        heads=inner,
    )
