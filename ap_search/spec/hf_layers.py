"""Which layer of a Hugging Face configuration holds which mixer and which feed-forward."""

from dataclasses import dataclass

from ap_search.spec.blocks import MAX_LAYERS
from ap_search.spec.hf_config import HfConfig
from ap_search.spec.hf_keys import KIND_WORDS
from ap_search.spec.reader import short

FULL, SLIDING, CHUNKED, LINEAR, MAMBA, NONE = "full", "sliding", "chunked", "linear", "mamba", "none"
MOE, DENSE = "moe", "dense"
_MOE_RULES = ("moe_freq", "first_dense", "moe_step", "dense_only", "moe_only", "moe_start", "moe_end", "moe_interval")
_PATTERNS = (
    "full_interval",
    "sliding_pattern",
    "window",
    "use_window",
    "max_window_layers",
    "chunk",
    "rope_layers",
    "nope_interval",
    "cla_share",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer: the word for its mixer, the word for its feed-forward, and whether either of them is all it has."""

    mixer: str
    ffn: str
    single: bool = False


def plan_layers(config: HfConfig) -> list[LayerPlan]:
    """Say for each layer, bottom to top, what it holds.

    Parameters
    ----------
    config : HfConfig
        The configuration; faults are kept there.

    Returns
    -------
    list of LayerPlan
        One per layer.

    Notes
    -----
    A1. A list of layers in the file wins over an interval, an interval over a switch.
    A2. A layer that names experts where the model has none is dense.
    """
    for meaning in (*_PATTERNS, *_MOE_RULES):
        config.find(meaning)
    words = _listed_words(config)
    layers = len(words) if words and not config.has("num_layers") else config.count("num_layers")
    if layers > MAX_LAYERS:
        config.fail(config.key("num_layers"), f"is {layers}", f"1 to {MAX_LAYERS}")
    config.raise_faults()
    config.layers = layers
    if words and len(words) != layers:
        words = (
            words[:layers] if len(words) == layers + config.maybe_count("mtp_layers") else _wrong(config, words, layers)
        )
    ffns = _ffns(config, layers)
    if words and (config.fact("layer_is_mixer_or_ffn") or any(word in (MOE, DENSE) for word in words)):
        return [_single(word) for word in words]
    mixers = words or _mixers(config, layers)
    if config.fact("hybrid") and not words and not {LINEAR, MAMBA} & set(mixers):
        config.fail(config.key("layer_types"), "is required and missing: this architecture mixes kinds of layers")
    return [LayerPlan(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]


def _wrong(config: HfConfig, words: list[str], layers: int) -> list[str]:
    """Keep the fault of a list that does not have one entry per layer."""
    key = config.key("hybrid_pattern" if config.has("hybrid_pattern") else "layer_types")
    config.fail(key, f"has {len(words)} entries", f"{layers}, one per layer")
    config.raise_faults()
    return words


def _single(word: str) -> LayerPlan:
    """Make a layer that is either a mixer or a feed-forward."""
    if word in (MOE, DENSE):
        return LayerPlan(mixer=NONE, ffn=word, single=True)
    return LayerPlan(mixer=word, ffn=NONE, single=True)


def _listed_words(config: HfConfig) -> list[str]:
    """Words of the list (or pattern of letters) that names each layer, empty where there is none."""
    meaning = "hybrid_pattern" if config.has("hybrid_pattern") else "layer_types"
    found = config.find(meaning)
    if not found:
        return []
    return kinds_of(config, *found)


def kinds_of(config: HfConfig, key: str, listed: object) -> list[str]:
    """Translate a list of words or a text of letters; what is not known is refused by the key."""
    if not isinstance(listed, list | str):
        config.fail(key, f"is {short(listed)}", "a list with one word per layer")
        return []
    unknown = sorted({str(word) for word in listed if str(word) not in KIND_WORDS})
    if unknown:
        config.fail(key, f"names layers that are not modelled: {', '.join(unknown)}", ", ".join(KIND_WORDS))
    return [KIND_WORDS.get(str(word), FULL) for word in listed]


def _mixers(config: HfConfig, layers: int) -> list[str]:
    """Words for the mixers where no list of words names them."""
    for rule in (
        _by_softmax_list,
        _by_softmax_indices,
        _by_sliding_list,
        _by_kda_list,
        _by_interval,
        _by_period,
        _by_window_pattern,
    ):
        mixers = rule(config, layers)
        if mixers:
            return mixers
    if config.has("chunk"):
        return _by_chunk(config, layers)
    return _by_window(config, layers)


def _by_softmax_list(config: HfConfig, layers: int) -> list[str]:
    """Ones are softmax attention, zeros linear attention."""
    if not config.has("softmax_layers"):
        return []
    return [FULL if one else LINEAR for one in config.counts("softmax_layers", layers)]


def _by_softmax_indices(config: HfConfig, layers: int) -> list[str]:
    """Numbers, counted from 0, of the attention layers among state-space ones."""
    chosen = config.numbers("softmax_indices")
    return [FULL if i in chosen else MAMBA for i in range(layers)] if chosen else []


def _by_sliding_list(config: HfConfig, layers: int) -> list[str]:
    """Ones are sliding layers, zeros full ones."""
    if not config.has("sliding_layers"):
        return []
    return [SLIDING if one else FULL for one in config.counts("sliding_layers", layers)]


def _by_kda_list(config: HfConfig, layers: int) -> list[str]:
    """Numbers, counted from 1, of the layers with linear attention."""
    linear = config.numbers("kda_layers")
    config.find("kda_full_layers")
    return [LINEAR if i + 1 in linear else FULL for i in range(layers)] if linear else []


def _by_interval(config: HfConfig, layers: int) -> list[str]:
    """Every n-th layer is full, the others linear."""
    interval = config.maybe_count("full_interval")
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)] if interval else []


def _by_period(config: HfConfig, layers: int) -> list[str]:
    """One attention layer per period, the others state space."""
    period, offset = config.maybe_count("attn_period"), config.maybe_count("attn_offset")
    return [FULL if i % period == offset else MAMBA for i in range(layers)] if period else []


def _by_window_pattern(config: HfConfig, layers: int) -> list[str]:
    """Every n-th layer full and the others sliding, or letters L (local) and G (global) repeated."""
    if not config.has("window"):
        return []
    letters = config.text("sliding_pattern")
    if letters:
        return [FULL if letters[i % len(letters)] == "G" else SLIDING for i in range(layers)]
    every = config.maybe_count("sliding_pattern") or 2 * config.fact("window_on_even_layers")
    return [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)] if every else []


def _by_chunk(config: HfConfig, layers: int) -> list[str]:
    """Chunked where positions are rotary, full on the layers without positions."""
    listed = config.numbers("rope_layers")
    if listed:
        return [CHUNKED if rope else FULL for rope in config.fit(config.key("rope_layers"), listed, layers)]
    interval = config.maybe_count("nope_interval")
    return [FULL if interval and (i + 1) % interval == 0 else CHUNKED for i in range(layers)]


def _by_window(config: HfConfig, layers: int) -> list[str]:
    """Slide on all layers, or above the first `max_window_layers` where a switch turns it on."""
    if not config.maybe_count("window") or not config.flag("use_window", True):
        config.find("max_window_layers")
        return [FULL] * layers
    below = config.maybe_count("max_window_layers") if config.has("use_window") else 0
    return [FULL if i < below else SLIDING for i in range(layers)]


def _ffns(config: HfConfig, layers: int) -> list[str]:
    """Words for the feed-forwards."""
    experts = config.counts("num_experts", layers)
    if max(experts) <= 1 or not config.flag("moe_on", True):
        return [DENSE] * layers
    chosen = _moe_layers(config, layers)
    if not any(chosen):
        config.warnings.append(f"{config.key('num_experts')} = {max(experts)}, but no layer has experts")
    return [MOE if one and count > 1 else DENSE for one, count in zip(chosen, experts, strict=True)]


def _moe_layers(config: HfConfig, layers: int) -> list[bool]:
    """Whether each layer has experts: by a list of words or numbers, or else by every rule that the file states."""
    words = config.find("ffn_types")
    if words and isinstance(words[1], list):
        bad = sorted({str(word) for word in words[1]} - {"dense", "sparse", "moe"})
        if bad:
            config.fail(words[0], f"names layers that are not modelled: {', '.join(bad)}", "dense, sparse")
        listed = config.fit(words[0], [int(word != "dense") for word in words[1]], layers)
        return [bool(one) for one in listed]
    chosen = config.numbers("moe_only")
    if chosen:
        return [i in chosen for i in range(layers)]
    return _by_rules(config, layers)


def _by_rules(config: HfConfig, layers: int) -> list[bool]:
    """Whether each layer passes all rules: a list of switches, first dense layers, steps, a range, exceptions."""
    found = config.find("moe_freq")
    listed = config.counts("moe_freq", layers) if found and isinstance(found[1], list) else [1] * layers
    first = max(config.maybe_count("first_dense"), config.maybe_count("moe_start"))
    last = config.count("moe_end", layers - 1, -1) % layers
    dense_only = config.numbers("dense_only") or []
    steps = [(config.count(meaning, 1), 1) for meaning in ("moe_step", "moe_frequency", "moe_interval")]
    steps += [(config.count("moe_period", 1), -config.maybe_count("moe_offset"))]
    steps += [] if found and isinstance(found[1], list) else [(config.count("moe_freq", 1), 0)]
    return [
        bool(listed[i])
        and first <= i <= last
        and i not in dense_only
        and all((i + shift) % step == 0 for step, shift in steps)
        for i in range(layers)
    ]
