"""Feed-forwards of a Hugging Face configuration: dense, or experts with their router and shared experts."""

from ap_search.spec.blocks import DenseFfn, MoeFfn
from ap_search.spec.hf_config import HfConfig
from ap_search.spec.hf_layers import DENSE, MOE

_TWO_MATRIX_ACTIVATIONS = ("relu", "relu2", "squared_relu", "gelu", "gelu_new", "gelu_fast", "quick_gelu")


def build_ffn(config: HfConfig, word: str, layer: int) -> DenseFfn | MoeFfn | None:
    """Build the feed-forward that a word names, for one layer."""
    if word == MOE:
        return _moe(config, layer)
    return _dense(config, layer) if word == DENSE else None


def _gated(config: HfConfig) -> bool:
    """Whether a feed-forward has a gate: by the architecture, else by what the activation is called."""
    activation, made = config.text("activation"), config.text("mlp_type")
    if config.fact("two_matrices") or activation == "relu2":
        return made in ("gated", "mptglu")
    if config.fact("three_matrices") or activation not in _TWO_MATRIX_ACTIVATIONS:
        return True
    line = f"{config.key('activation')} = {activation} is taken for a feed-forward of two matrices, without a gate"
    if line not in config.warnings:
        config.warnings.append(line)
    return False


def _width(config: HfConfig, layer: int) -> int:
    """Width of a dense feed-forward: stated, or a multiple of the hidden size where the architecture says so."""
    for meaning in ("dense_width", "ffn_width"):
        if config.has(meaning):
            return max(1, config.count_at(meaning, layer) // (2 if config.fact("width_of_gate_and_up") else 1))
    four_times = 4 * config.count("hidden_size") if config.fact("two_matrices") else None
    if config.has("expansion"):
        return config.count("expansion") * config.count("hidden_size")
    return config.count("ffn_width", four_times)


def _has_bias(config: HfConfig) -> bool:
    """Whether dense feed-forwards have biases."""
    if config.fact("bias_on_all") or config.fact("ffn_bias"):
        return True
    if config.fact("ffn_without_bias"):
        return False
    general = config.flag("any_bias", config.fact("bias_by_default"))
    if config.has("no_bias"):
        general = not config.flag("no_bias", True)
    return config.flag("ffn_bias", general)


def _dense(config: HfConfig, layer: int) -> DenseFfn:
    """Build a dense feed-forward."""
    return DenseFfn(width=_width(config, layer), gated=_gated(config), bias=_has_bias(config))


def _moe(config: HfConfig, layer: int) -> MoeFfn:
    """Build routed experts; keys may hold one value per layer."""
    experts, top_k = config.count_at("num_experts", layer), config.count_at("top_k", layer)
    width = _expert_width(config, layer)
    if top_k > experts:
        config.fail(config.key("top_k"), f"{top_k} of {config.key('num_experts')} = {experts}", f"1 to {experts}")
    groups, shared = config.count("num_groups", 1), _shared_width(config, layer, width)
    if experts % groups:
        config.fail(config.key("num_groups"), f"{groups} groups do not divide {experts} experts")
    gated = _gated(config)
    return MoeFfn(
        num_experts=experts,
        top_k=top_k,
        expert_width=width,
        gated=gated,
        expert_bias=config.fact("expert_bias"),
        expert_clamp=config.has("activation_limit"),
        shared_width=shared,
        shared_gated=gated,
        shared_gate=bool(shared) and config.has("gated_shared_width"),
        latent_width=config.maybe_count("latent_width"),
        num_groups=groups,
        topk_groups=config.count("topk_groups", 1),
        router_bias=config.fact("router_bias"),
        score_bias=_has_score_bias(config),
        score_function=config.text("score_function") or ("sigmoid" if _has_score_bias(config) else "softmax"),
    )


def _expert_width(config: HfConfig, layer: int) -> int:
    """Width of one routed expert: its own key, or the feed-forward's where the architecture has no such key."""
    own = config.has("experts_of_own_width") or config.fact("experts_of_own_width")
    meaning = "expert_width" if own or config.has("expert_width") else "ffn_width"
    for other in ("ffn_width", "dense_width"):
        config.find(other)
    return config.count_at(meaning, layer)


def _shared_width(config: HfConfig, layer: int, width: int) -> int:
    """Width of all shared experts together: stated, or their number times an expert's width."""
    number = config.count_at("num_shared", layer, 0)
    if config.has("shared_width"):
        return config.count_at("shared_width", layer, 0)
    if config.flag("dense_beside_moe", False):
        return _width(config, layer)
    if config.fact("residual_ffn"):
        return config.count("hidden_size")
    return (number or int(config.fact("shared_expert"))) * width


def _has_score_bias(config: HfConfig) -> bool:
    """Whether scores carry a buffer that balances load without a loss."""
    return config.flag("score_bias", config.fact("score_bias") or config.text("topk_method") == "noaux_tc")
