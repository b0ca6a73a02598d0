"""Which preset a model of stated sizes is: what records do not print (biases, norms, routing groups) is known of it."""

from dataclasses import replace
from functools import lru_cache

from ap_search.spec.blocks import Attention, LayerKind, Model, MoeFfn
from ap_search.spec.model import load_model
from ap_search.spec.presets import preset_names


def preset_of_same_sizes(model: Model) -> Model | None:
    """Find the preset that has every size of a model, with that model's number of MTP modules.

    Parameters
    ----------
    model : Model
        As a record states it: layers, widths, heads, experts, vocabulary.

    Returns
    -------
    Model or None
        None where no preset is the same in every stated size, layer by layer.

    Notes
    -----
    A1. Two published models that agree in every size are one model.
    """
    known = _presets().get(_sizes(model))
    return None if known is None else replace(known, name=model.name, mtp_layers=model.mtp_layers)


@lru_cache(maxsize=1)
def _presets() -> dict[object, Model]:
    """Presets by their sizes."""
    models = (load_model(name) for name in preset_names("models"))
    return {_sizes(model): model for model in models}


def _sizes(model: Model) -> object:
    """What records print of a model."""
    kinds = tuple(_kind(kind) for kind in model.kinds)
    return model.hidden_size, model.vocab_size, tuple(kinds[index] for index in model.layers)


def _kind(kind: LayerKind) -> object:
    """Sizes of one layer."""
    return _mixer(kind), _ffn(kind)


def _mixer(kind: LayerKind) -> object:
    """Sizes of a layer's attention; another mixer is only the same as itself."""
    mixer = kind.mixer
    if not isinstance(mixer, Attention):
        return mixer
    ranks = (mixer.q_lora_rank, mixer.kv_lora_rank, mixer.qk_rope_head_dim)
    return mixer.kind, mixer.num_heads, mixer.num_kv_heads, mixer.qk_head_dim, mixer.v_head_dim, ranks, mixer.window


def _ffn(kind: LayerKind) -> object:
    """Sizes of a layer's feed-forward."""
    ffn = kind.ffn
    if isinstance(ffn, MoeFfn):
        return ffn.num_experts, ffn.top_k, ffn.expert_width, ffn.gated, ffn.shared_width
    return None if ffn is None else (ffn.width, ffn.gated)
