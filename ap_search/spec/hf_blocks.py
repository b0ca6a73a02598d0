"""Layers given one by one (`block_configs`), as a neural architecture search leaves them."""

from ap_search.spec.blocks import Attention, DenseFfn, LayerKind
from ap_search.spec.hf_config import HfConfig
from ap_search.spec.reader import describe

_WIDTH_MULTIPLE = 256


def read_block_configs(config: HfConfig) -> list[LayerKind]:
    """Read one layer kind per entry; empty where the file has no such list.

    Source: nvidia DeciLM `modeling_decilm.py` and `block_config.py`: `n_heads_in_group` query heads share a key head,
    the feed-forward is `ffn_mult` times two thirds of the hidden size, rounded up to a multiple of 256; a part that is
    `no_op` is absent with its norm.
    """
    found = config.find("block_configs")
    if not found:
        return []
    key, listed = found
    layers = config.layers = config.count("num_layers")
    if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(entry, dict) for entry in listed):
        config.fail(key, f"is {describe(listed)}", f"a list of {layers} mappings, one per layer")
        return []
    return [_layer(config, f"{key}[{i}]", entry) for i, entry in enumerate(listed)]


def _layer(config: HfConfig, path: str, entry: dict[str, object]) -> LayerKind:
    """Read one layer."""
    mixer = _attention(config, f"{path}.attention", entry.get("attention"))
    ffn = _ffn(config, f"{path}.ffn", entry.get("ffn"))
    return LayerKind(mixer=mixer, ffn=ffn, num_norms=(mixer is not None) + (ffn is not None))


def _part(config: HfConfig, path: str, part: object) -> dict[str, object]:
    """Check one part of a layer; empty where it is absent."""
    if not isinstance(part, dict):
        config.fail(path, f"is {describe(part)}", "a mapping")
        return {}
    if part.get("replace_with_linear"):
        config.fail(f"{path}.replace_with_linear", "a linear layer in place of this part is not modelled")
    return {} if part.get("no_op") else part


def _attention(config: HfConfig, path: str, part: object) -> Attention | None:
    """Read the attention of one layer."""
    stated = _part(config, path, part)
    if not stated:
        return None
    heads, group = config.count("num_heads"), stated.get("n_heads_in_group")
    if not isinstance(group, int) or group < 1 or heads % group:
        config.fail(f"{path}.n_heads_in_group", f"is {describe(group)}", f"a divisor of {heads}")
        return None
    head_dim = config.count("head_dim", config.count("hidden_size") // heads)
    window = stated.get("window_length")
    bias = config.flag("attention_bias", False)
    return Attention(
        num_heads=heads,
        num_kv_heads=heads // group,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        window=window if isinstance(window, int) else 0,
        qkv_bias=bias,
        out_bias=bias,
    )


def _ffn(config: HfConfig, path: str, part: object) -> DenseFfn | None:
    """Read the feed-forward of one layer."""
    stated = _part(config, path, part)
    if not stated:
        return None
    width, ratio = stated.get("intermediate_size"), stated.get("ffn_mult")
    if not isinstance(width, int):
        if not isinstance(ratio, int | float) or not 0 < ratio < 1000:
            config.fail(f"{path}.ffn_mult", f"is {describe(ratio)}", "a positive number")
            return None
        exact = int(2 * ratio * config.count("hidden_size") / 3)
        width = -(-exact // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    return DenseFfn(width=width, bias=config.flag("ffn_bias", False))
