"""The model of a published run: its sizes, and what is assumed where a source does not print them."""

import re
from functools import lru_cache
from typing import Any

from ap_search.errors import SpecError
from ap_search.spec.blocks import Model
from ap_search.spec.model import read_model_file
from ap_search.spec.parameters import params_total
from ap_search.spec.published_file import ModelRow
from ap_search.spec.run import Unusable, UnusableError
from ap_search.spec.same_sizes import preset_of_same_sizes
from ap_search.spec.stated import parse_figure

GPT2_VOCAB = 50_257
USUAL_HEAD_DIM = 128
USUAL_TOP_K = 2
_HEADS_DIVISOR = 8
_MODELLED = ("", "dense", "moe")
_SLIDING = re.compile(r"sliding[- ]window (\d+) on every other layer", re.IGNORECASE)
_SINK = re.compile(r"attention sinks?", re.IGNORECASE)


@lru_cache(maxsize=1024)
def published_model(row: ModelRow) -> tuple[Model, tuple[str, ...]]:
    """Make a model of the sizes that a source prints.

    Parameters
    ----------
    row : ModelRow
        Its words for the sizes.

    Returns
    -------
    tuple of Model and tuple of str
        The model, and one line per size that was assumed.

    Raises
    ------
    UnusableError
        When a size is missing that nothing stands in for, or the sizes contradict each other.

    Notes
    -----
    A1. A vocabulary that nobody prints is GPT-2's; heads are about 128 wide, a multiple of eight of them; experts of
    an unknown top-k are two per token; an unknown number of layers follows from the parameters.
    A2. Where a preset has every stated size, what is not printed (biases, routing groups) is that preset's.
    A3. Otherwise norms are RMSNorm and projections without biases where the source does not say: below 0.1 % of
    the weights.
    """
    if row.kind not in _MODELLED:
        raise UnusableError(Unusable.REFUSED, f"model: {row.kind} layers are not described by these fields")
    if row.hidden is None:
        raise UnusableError(Unusable.SKIPPED, "model.hidden is missing")
    assumed: list[str] = []
    content = _content(row, row.hidden, assumed)
    if row.layers is None:
        content["num_layers"] = _layers(row, content, assumed)
    try:
        model = read_model_file(content, name=row.name or "model", where="model")
    except SpecError as error:
        raise UnusableError(Unusable.REFUSED, str(error.faults[0])) from None
    return preset_of_same_sizes(model) or model, tuple(assumed)


def _content(row: ModelRow, hidden: int, assumed: list[str]) -> dict[str, Any]:
    """Sizes as a model file has them."""
    gated = row.gated_mlp is not False
    content: dict[str, Any] = {
        "name": row.name or None,
        "hidden_size": hidden,
        "vocab_size": row.vocab or GPT2_VOCAB,
        "num_layers": row.layers or 1,
        "tied_embeddings": bool(row.tied_embeddings),
        "norm": "rmsnorm" if gated else "layernorm",
        "attention": _attention(row, hidden, assumed),
        "mtp_layers": row.mtp_layers or 0,
        "learned_positions": row.max_seq_embeddings or 0,
    }
    if row.vocab is None:
        assumed.append(f"vocab: not stated, GPT-2's {GPT2_VOCAB:,}")
    sliding = _SLIDING.search(row.notes)
    if sliding:
        content["sliding"] = {"window": int(sliding[1]), "pattern": [1, 0]}
    if row.num_experts:
        content["moe"] = _moe(row, gated, assumed)
    if not row.num_experts or row.first_dense_layers:
        content["ffn"] = {"width": row.ffn or 4 * hidden, "gated": gated}
        if row.ffn is None:
            assumed.append("ffn: not stated, four times the hidden size")
    return content


def _attention(row: ModelRow, hidden: int, assumed: list[str]) -> dict[str, Any]:
    """Attention as a model file has it."""
    sink = _SINK.search(row.notes) is not None
    heads = row.heads or _usual_heads(hidden)
    if row.heads is None:
        assumed.append(f"heads: not stated, {heads} of {hidden // heads}")
    if row.mla is not None:
        sizes = row.mla.model_dump()
        return {"kind": "mla", "num_heads": heads, **sizes, "q_lora_rank": row.mla.q_lora_rank or 0, "sink": sink}
    return {
        "num_heads": heads,
        "num_kv_heads": row.kv_heads or heads,
        "head_dim": row.head_dim or hidden // heads,
        "sink": sink,
    }


def _usual_heads(hidden: int) -> int:
    """Heads of about the usual width that a tensor-parallel group of eight can share."""
    widths = [width for width in range(1, 2 * USUAL_HEAD_DIM) if hidden % (width * _HEADS_DIVISOR) == 0]
    return hidden // min(widths, key=lambda width: abs(width - USUAL_HEAD_DIM), default=hidden)


def _moe(row: ModelRow, gated: bool, assumed: list[str]) -> dict[str, Any]:
    """Experts as a model file has them."""
    if row.moe_ffn is None:
        raise UnusableError(Unusable.SKIPPED, "model.moe_ffn is missing")
    if row.top_k is None:
        assumed.append(f"top_k: not stated, {USUAL_TOP_K}")
    shared = row.shared_ffn
    if shared is None and row.shared_experts:
        shared = row.shared_experts * row.moe_ffn
        assumed.append(f"shared_ffn: not stated, {row.shared_experts} as wide as a routed expert")
    return {
        "num_experts": row.num_experts,
        "top_k": row.top_k or USUAL_TOP_K,
        "expert_width": row.moe_ffn,
        "gated": gated,
        "shared_width": shared or 0,
        "first_dense_layers": row.first_dense_layers or 0,
    }


def _layers(row: ModelRow, content: dict[str, Any], assumed: list[str]) -> int:
    """Layers that come nearest to the parameters that a source states."""
    figure = parse_figure(row.params or row.params_label, "B")
    if figure is None:
        raise UnusableError(Unusable.SKIPPED, "model.layers is missing")
    first = content["moe"]["first_dense_layers"] if "moe" in content else 0
    one, two = (
        params_total(read_model_file(content | {"num_layers": first + more}, name="model", where="model"))
        for more in (1, 2)
    )
    layers = max(1, round(first + 1 + (figure.count - one) / (two - one)))
    assumed.append(f"layers: not stated, {layers} have {figure.text} parameters")
    return layers
