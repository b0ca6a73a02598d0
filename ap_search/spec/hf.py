"""Reading a Hugging Face `config.json` by what its keys mean."""

import re
from collections.abc import Mapping
from dataclasses import replace

from ap_search.spec.blocks import LayerKind, Model, MoeFfn
from ap_search.spec.hf_blocks import read_block_configs
from ap_search.spec.hf_config import HfConfig
from ap_search.spec.hf_facts import NUM_NORMS
from ap_search.spec.hf_ffns import build_ffn
from ap_search.spec.hf_keys import SPELLINGS, TEXT_BLOCKS, TOWERS
from ap_search.spec.hf_layers import DENSE, MOE, NONE, LayerPlan, kinds_of, plan_layers
from ap_search.spec.hf_mixers import build_mixer
from ap_search.spec.reader import short
from ap_search.spec.stated import check_stated

_MARKS = ("model_type", "architectures", *SPELLINGS["num_layers"][:3], *SPELLINGS["num_heads"][:3], *TEXT_BLOCKS)


def is_hf(data: Mapping[str, object]) -> bool:
    """Whether a file's keys are those of a Hugging Face configuration."""
    return any(mark in data for mark in _MARKS)


def read_hf(data: Mapping[str, object], *, name: str, where: str) -> Model:
    """Read a model from a Hugging Face configuration.

    Parameters
    ----------
    data : mapping
        The file's content.
    name : str
        What the model is to be called.
    where : str
        The file's name, the head of each fault's path.

    Returns
    -------
    Model
        The model; its warnings name keys that were ignored and a stated total that the count contradicts.

    Raises
    ------
    SpecError
        With every fault: a required key missing (with its family of spellings), a value out of range, a layer, mixer or
        structure that is not modelled (by the name of its key).

    Notes
    -----
    A1. `quantization_config` and `torch_dtype` say how weights are stored, not how they are trained: not read.
    A2. Vision and speech towers are left out: only the language model is read.
    """
    config = HfConfig(data, where)
    config.refuse_unknown()
    config.count("hidden_size")
    config.count("vocab_size")
    config.raise_faults()
    kinds, layers = _kinds(config)
    model = _model(config, kinds=kinds, layers=layers, name=name)
    stated = config.find("stated_total")
    config.refuse_unused()
    config.raise_faults()
    model = replace(model, sources=(where,), warnings=(*_left_out(data), *config.warnings))
    return check_stated(model, *stated) if stated else model


def _model(config: HfConfig, *, kinds: list[LayerKind], layers: list[int], name: str) -> Model:
    """Assemble the model around its layers."""
    mtp_layers, mtp_kind_index = _mtp(config, kinds)
    max_positions = config.maybe_count("max_positions")
    extra = 2 * config.fact("two_extra_positions")
    return Model(
        name=name,
        hidden_size=config.count("hidden_size"),
        vocab_size=config.count("vocab_size"),
        tied_embeddings=_tied(config),
        kinds=tuple(kinds),
        layers=tuple(layers),
        mtp_layers=mtp_layers,
        mtp_kind_index=mtp_kind_index,
        norm_params_per_element=_norm_params(config),
        learned_positions=max_positions + extra if config.fact("learned_positions") else 0,
        max_positions=max_positions,
        head_bias=config.flag("head_bias", config.fact("head_bias")),
        embedding_norm=config.fact("embedding_norm"),
    )


def _kinds(config: HfConfig) -> tuple[list[LayerKind], list[int]]:
    """Build the distinct layer kinds in order of first appearance, and each layer's index into them."""
    built = read_block_configs(config)
    if not built:
        plans = plan_layers(config)
        built = [_layer(config, plan, i) for i, plan in enumerate(plans)]
    config.raise_faults()
    kinds = list(dict.fromkeys(built))
    return kinds, [kinds.index(kind) for kind in built]


def _layer(config: HfConfig, plan: LayerPlan, i: int) -> LayerKind:
    """Build one layer."""
    mixer = build_mixer(config, plan.mixer, i)
    ffn = build_ffn(config, plan.ffn, i)
    return LayerKind(mixer=mixer, ffn=ffn, num_norms=1 if plan.single else _num_norms(config, isinstance(ffn, MoeFfn)))


def _num_norms(config: HfConfig, is_moe: bool) -> int:
    """Norms of the model's width in one layer."""
    if config.flag("sandwich", False):
        return 4
    if config.fact("one_norm_if_parallel") and config.flag("parallel_block", config.fact("parallel_by_default")):
        return config.count("norms_in_parallel", 2 if config.flag("new_decoder", False) else 1)
    return NUM_NORMS.get(config.family, 2) + 3 * (is_moe and config.fact("norms_around_experts"))


def _norm_params(config: HfConfig) -> int:
    """Parameters per element of a norm: none, weight, or weight and bias."""
    if config.fact("norm_without_weight"):
        return 0
    return 2 if config.fact("layer_norm") and not config.flag("no_bias", False) else 1


def _tied(config: HfConfig) -> bool:
    """Whether the head is the embedding's transpose."""
    if not config.has("tied") and not config.fact("tied") and not config.fact("untied"):
        config.warnings.append(f"{config.key('tied')} is not given: taken for false")
    return config.flag("tied", config.fact("tied"))


def _mtp(config: HfConfig, kinds: list[LayerKind]) -> tuple[int, int | None]:
    """Count multi-token-prediction modules and find their layer kind, adding it to `kinds` where no layer is such."""
    modules = config.maybe_count("mtp_layers") if config.flag("mtp_on", True) else 0
    modules *= config.count("mtp_depth", 1)
    pattern = config.find("mtp_pattern")
    if not modules or not pattern:
        return modules, None
    words = kinds_of(config, *pattern)
    mixers = [word for word in words if word not in (MOE, DENSE)]
    ffns = [word for word in words if word in (MOE, DENSE)]
    if len(mixers) > 1 or len(ffns) > 1:
        config.fail(pattern[0], f"is {short(pattern[1])}", "one mixer and one feed-forward")
    kind = LayerKind(
        mixer=build_mixer(config, (mixers or [NONE])[0], config.layers - 1),
        ffn=build_ffn(config, (ffns or [NONE])[0], config.layers - 1),
        num_norms=len(words),
    )
    if kind not in kinds:
        kinds.append(kind)
    return modules, kinds.index(kind)


def _left_out(data: Mapping[str, object]) -> list[str]:
    """Warn of towers that are not read."""
    towers = [key for key, value in data.items() if isinstance(value, dict) and re.search(TOWERS, key)]
    return [f"{', '.join(sorted(towers))} left out: only the language model is read"] if towers else []
