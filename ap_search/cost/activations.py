"""Activation memory of one block and one micro-batch on one device: what is saved for backward, what lives briefly."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.dispatch_memory import dispatch_state_bytes, dispatch_transient_bytes
from ap_search.cost.keeps import Keeps
from ap_search.cost.operators import operator_saved_bytes
from ap_search.cost.shapes import Shapes
from ap_search.cost.unfused import (
    attention_extra_bytes,
    dense_extra_bytes,
    expert_act_extra_bytes,
    moe_extra_bytes,
    score_bytes,
    score_gradient_bytes,
    shared_extra_bytes,
)
from ap_search.plan.plan import Recompute
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, LinearMixer, MoeFfn, QkNorm
from ap_search.units import BF16_BYTES, FP32_BYTES, Quantity

FloatArray = NDArray[np.float64]
ID_BYTES = 8
FUSED = Keeps()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockMemory:
    """Bytes of one block and one micro-batch on one device, arrays of shape (plans,).

    `saved` and `dispatch_state` are held from forward to backward of each micro-batch in flight; `recomputed` comes
    alive again in backward, for one layer at a time; `transient` and `dispatch_transient` live only while the block
    runs.
    """

    saved: FloatArray
    dispatch_state: FloatArray
    recomputed: FloatArray
    transient: FloatArray
    dispatch_transient: FloatArray


def attention_saved_bytes(attention: Attention, hidden: int, shapes: Shapes) -> FloatArray:
    """Bytes that softmax attention with its norm and residual saves per micro-batch, on one device.

    Parameters
    ----------
    attention : Attention
        Heads, widths, ranks of MLA.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    FloatArray
        Per token: layer input and norm output 4h, norm statistic 4 (split by sequence parallelism); queries, keys,
        values, output and log-sum-exp (split over tp, at least one key head per rank); inputs and statistics of q/k
        norms; latents and their norm outputs of MLA and of low-rank queries.

    Notes
    -----
    A1. bf16, no dropout, fused attention; the output is shared by attention and the output projection.
    A2. Inputs of q/k norms are saved beside their outputs.

    Source: docs/cost-model/memory.md; byte-exact against autograd's saved tensors of the same operator graph.
    """
    queries = attention.num_heads / shapes.tp
    latent = 2 * attention.q_lora_rank
    if attention.kind is AttentionKind.MLA:
        keys = queries
        latent += 2 * attention.kv_lora_rank + attention.qk_rope_head_dim
    else:
        keys = np.maximum(attention.num_kv_heads / shapes.tp, 1.0)
    local = BF16_BYTES * (2 * hidden + latent) + FP32_BYTES
    projected = queries * attention.qk_head_dim + keys * (attention.qk_head_dim + attention.v_head_dim)
    statistics = queries
    if attention.qk_norm is not QkNorm.NONE:
        projected = projected + (queries + keys) * attention.qk_head_dim
        # One per head that is normalised, or one for all queries and one for all keys.
        statistics = statistics + (queries + keys if attention.qk_norm is QkNorm.HEAD else 2.0)
    output = queries * attention.v_head_dim * (2 if attention.output_gate else 1)
    return shapes.local_tokens * local + shapes.tokens * (BF16_BYTES * (projected + output) + FP32_BYTES * statistics)


def mla_up_projected_bytes(attention: Attention, shapes: Shapes) -> FloatArray:
    """Bytes of MLA's queries, keys and values after their up-projection, which `mla_up_proj` recomputes.

    Parameters
    ----------
    attention : Attention
        MLA heads and widths.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    FloatArray
        2 nq (2 dqk + dv) / tp per token.

    Source: Megatron-LM `transformer_config.py` recompute_modules; `multi_latent_attention.py`.
    """
    width = attention.num_heads * (2 * attention.qk_head_dim + attention.v_head_dim)
    return shapes.tokens * BF16_BYTES * width / shapes.tp


def ffn_inner_elements(width: int, *, gated: bool) -> tuple[int, int]:
    """Elements per token that a feed-forward saves inside.

    Parameters
    ----------
    width : int
        Inner width, elements.
    gated : bool
        Whether the first product is twice as wide.

    Returns
    -------
    tuple of int
        Of the first product, and of the activation's output.
    """
    return (2 * width if gated else width), width


def _mixer_memory(
    kind: LayerKind, hidden: int, shapes: Shapes, keeps: Keeps
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Saved, removed by selective recompute, and transient bytes of a layer's mixer."""
    mixer = kind.mixer
    none = np.zeros_like(shapes.tokens)
    if mixer is None:
        return none, none, none
    norm_out = shapes.local_tokens * BF16_BYTES * hidden
    if isinstance(mixer, LinearMixer):
        local = shapes.local_tokens * (BF16_BYTES * 2 * hidden + FP32_BYTES)
        inner = shapes.tokens * BF16_BYTES * (mixer.in_width + mixer.out_width) / shapes.tp
        return local + inner, np.where(shapes.recomputes(Recompute.LAYERNORM), norm_out, 0.0), inner
    saved = attention_saved_bytes(mixer, hidden, shapes) + attention_extra_bytes(mixer, hidden, shapes, keeps=keeps)
    core = shapes.tokens * FP32_BYTES * mixer.num_heads / shapes.tp + score_bytes(mixer, shapes, keeps)
    removed = np.where(shapes.recomputes(Recompute.CORE_ATTN), core, 0.0)
    if mixer.kind is AttentionKind.MLA:
        up = mla_up_projected_bytes(mixer, shapes)
        removed = removed + np.where(shapes.recomputes(Recompute.MLA_UP_PROJ), up, 0.0)
        removed = removed + np.where(shapes.recomputes(Recompute.LAYERNORM), norm_out, 0.0)
    heads = mixer.num_heads / shapes.tp
    keys = np.maximum(mixer.num_kv_heads / shapes.tp, 1.0)
    gradients = (
        heads * (mixer.qk_head_dim + mixer.v_head_dim) + keys * (mixer.qk_head_dim + mixer.v_head_dim) * shapes.cp
    )
    transient = shapes.tokens * BF16_BYTES * gradients + score_gradient_bytes(mixer, shapes, keeps)
    return saved, removed, transient


def _dense_memory(
    ffn: DenseFfn, hidden: int, shapes: Shapes, keeps: Keeps
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Saved, removed and transient bytes of a dense feed-forward with its norm (fused into the first linear layer)."""
    first, second = ffn_inner_elements(ffn.width, gated=ffn.gated)
    inner = shapes.tokens * BF16_BYTES * (first + second) / shapes.tp
    norm_out = shapes.local_tokens * BF16_BYTES * hidden
    extra = dense_extra_bytes(ffn, hidden, shapes, keeps=keeps)
    saved = shapes.local_tokens * (BF16_BYTES * 2 * hidden + FP32_BYTES) + inner + extra
    return saved, np.where(shapes.recomputes(Recompute.MLP), inner + norm_out + extra, 0.0), inner


def router_saved_bytes(moe: MoeFfn, shapes: Shapes) -> FloatArray:
    """Bytes of logits and scores that a router saves per micro-batch, on one device.

    Parameters
    ----------
    moe : MoeFfn
        Experts.
    shapes : Shapes
        Tokens.

    Returns
    -------
    FloatArray
        8 bytes per token and expert: both in fp32.

    Source: Megatron-LM `megatron/core/transformer/moe/router.py`.
    """
    return shapes.local_tokens * moe.num_experts * 2 * FP32_BYTES


def _moe_memory(
    moe: MoeFfn, hidden: int, shapes: Shapes, shape: DispatchShape, keeps: Keeps
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Saved, removed and transient bytes of a MoE feed-forward with its norm, router, experts and shared experts."""
    first, second = ffn_inner_elements(moe.expert_width, gated=moe.gated)
    travelling = moe.latent_width or hidden
    rows = shape.aligned_rows
    act = rows * BF16_BYTES * second / shapes.etp
    copies = rows * (BF16_BYTES * (travelling + first / shapes.etp) + FP32_BYTES) + act
    router = router_saved_bytes(moe, shapes)
    # The first latent projection's output goes to the dispatch, which keeps none of it.
    latent = shapes.local_tokens * BF16_BYTES * moe.latent_width
    shared_first, shared_second = ffn_inner_elements(moe.shared_width, gated=moe.shared_gated)
    shared = shapes.tokens * BF16_BYTES * (shared_first + shared_second) / shapes.tp
    if moe.shared_gate:  # A product of the shared experts' output and a number per token.
        shared = shared + shapes.local_tokens * BF16_BYTES * (hidden + 1)
    norm_out = shapes.local_tokens * BF16_BYTES * hidden
    outer = norm_out * 2 + shapes.local_tokens * FP32_BYTES
    inner = copies + router + latent + shared + moe_extra_bytes(moe, hidden, shapes, shape=shape, keeps=keeps)
    act_kept = act + expert_act_extra_bytes(moe, shape=shape, keeps=keeps)
    shared_kept = shared + shared_extra_bytes(moe, hidden, shapes, keeps=keeps)
    selective = np.where(shapes.recomputes(Recompute.MOE_ACT), act_kept, 0.0)
    selective = selective + np.where(shapes.recomputes(Recompute.SHARED_EXPERTS), shared_kept, 0.0)
    removed = np.where(shapes.recomputes(Recompute.MOE), inner, selective)
    removed = removed + np.where(shapes.recomputes(Recompute.LAYERNORM), norm_out, 0.0)
    return outer + inner, removed, act + rows * BF16_BYTES * first / shapes.etp


def layer_memory(
    kind: LayerKind, hidden: int, shapes: Shapes, *, shape: DispatchShape | None, keeps: Keeps = FUSED
) -> BlockMemory:
    """Activation memory of one layer and one micro-batch on one device, bytes, after recompute.

    Parameters
    ----------
    kind : LayerKind
        Mixer and feed-forward.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens, splits, recompute bits.
    shape : DispatchShape or None
        Dispatch of this layer; None where it has no routed experts.
    keeps : Keeps
        What the trainer's kernels keep; fused bf16 kernels by default.

    Returns
    -------
    BlockMemory
        Saved bytes less what recompute removes; `recomputed` is what comes back in backward.

    Notes
    -----
    A1. Full recompute keeps the layer's input (2h per local token) and brings one layer's activations back; the live
        layer's input counts once.
    A2. Recomputed modules are alive for one layer at a time.
    A3. Transient gradients of the widest inner tensors are alive together with the saved ones, for one layer.

    Source: Megatron-LM `megatron/core/recompute.py`, `transformer_layer.py`; docs/cost-model/memory.md.
    """
    mixer_saved, mixer_removed, mixer_transient = _mixer_memory(kind, hidden, shapes, keeps)
    ffn_saved, ffn_removed, ffn_transient = _ffn_memory(kind, hidden, shapes, shape, keeps)
    post_norms = max(kind.num_norms - 2, 0) * shapes.local_tokens * (BF16_BYTES * hidden + FP32_BYTES)
    saved, removed = mixer_saved + ffn_saved + post_norms, mixer_removed + ffn_removed
    if keeps.per_operator:
        kept = operator_saved_bytes(kind, hidden, shapes, shape=shape)
        removed = np.where(shapes.recompute > 0, np.maximum(saved - kept, 0.0), 0.0)
    full = shapes.recomputes(Recompute.FULL)
    layer_input = shapes.local_tokens * BF16_BYTES * hidden
    state = np.zeros_like(saved) if shape is None else dispatch_state_bytes(shape)
    transient = np.zeros_like(saved) if shape is None else np.asarray(dispatch_transient_bytes(shape))
    dropped = full | shapes.recomputes(Recompute.MOE)
    return BlockMemory(
        saved=np.where(full, layer_input, saved - removed),
        dispatch_state=np.where(dropped, 0.0, state),
        recomputed=np.where(full, saved - layer_input, removed) + np.where(dropped, state, 0.0),
        transient=np.maximum(mixer_transient, ffn_transient) + layer_input,
        dispatch_transient=transient,
    )


def _ffn_memory(
    kind: LayerKind, hidden: int, shapes: Shapes, shape: DispatchShape | None, keeps: Keeps
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Saved, removed and transient bytes of a layer's feed-forward, whichever kind it is."""
    if isinstance(kind.ffn, MoeFfn) and shape is not None:
        return _moe_memory(kind.ffn, hidden, shapes, shape, keeps)
    if isinstance(kind.ffn, DenseFfn):
        return _dense_memory(kind.ffn, hidden, shapes, keeps)
    none = np.zeros_like(shapes.tokens)
    return none, none, none


def embedding_memory(shapes: Shapes) -> BlockMemory:
    """Activation memory of the embedding on one device, bytes: token and position ids of one micro-batch.

    Parameters
    ----------
    shapes : Shapes
        Tokens.

    Returns
    -------
    BlockMemory
        8 bytes per token; its output is the first layer's input and counted there.

    Source: Megatron-LM `theoretical_memory_usage.py` (8 s b per micro-batch in flight).
    """
    none = np.zeros_like(shapes.tokens)
    ids = shapes.tokens * ID_BYTES
    return BlockMemory(saved=ids, dispatch_state=none, recomputed=none, transient=none, dispatch_transient=none)


def head_memory(hidden: int, shapes: Shapes) -> BlockMemory:
    """Activation memory of final norm and head on one device, bytes, logits left out.

    Parameters
    ----------
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.

    Returns
    -------
    BlockMemory
        The final norm's input and output, its statistic, and the labels.

    Source: docs/cost-model/memory.md.
    """
    none = np.zeros_like(shapes.tokens)
    saved = shapes.local_tokens * (2 * BF16_BYTES * hidden + FP32_BYTES) + shapes.tokens * ID_BYTES
    return BlockMemory(saved=saved, dispatch_state=none, recomputed=none, transient=none, dispatch_transient=none)


def mtp_memory(hidden: int, shapes: Shapes, layer: BlockMemory) -> BlockMemory:
    """Activation memory of one MTP module on one device, bytes: a layer, a projection, three norms, logits left out.

    Parameters
    ----------
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    layer : BlockMemory
        The layer kind that it repeats.

    Returns
    -------
    BlockMemory
        The layer's, plus both norm inputs, the concatenated projection input, and the final norm's input and output.

    Source: Megatron-LM `multi_token_prediction.py`.
    """
    extra = shapes.local_tokens * (BF16_BYTES * (2 + 2 + 2) * hidden + 3 * FP32_BYTES) + shapes.tokens * ID_BYTES
    return BlockMemory(
        saved=layer.saved + extra,
        dispatch_state=layer.dispatch_state,
        recomputed=layer.recomputed,
        transient=layer.transient,
        dispatch_transient=layer.dispatch_transient,
    )


def softmax_bytes(*, tokens: Quantity, vocab: Quantity, tp: Quantity, depths: int) -> Quantity:
    """Bytes of fp32 softmax that each micro-batch keeps from its loss to its backward, on the stage of the head.

    Parameters
    ----------
    tokens, vocab, tp, depths
        As for `logits_bytes`.

    Returns
    -------
    Quantity
        4 bytes per logit and rank.

    Source: Megatron-LM `tensor_parallel/cross_entropy.py`.
    """
    return FP32_BYTES * tokens * vocab / tp * depths


def logits_bytes(*, tokens: Quantity, vocab: Quantity, tp: Quantity, depths: int, per_logit_bytes: int) -> Quantity:
    """Bytes of logits and loss at their peak on the stage that holds the head, one micro-batch.

    Parameters
    ----------
    tokens, vocab, tp : Quantity
        Tokens on one context-parallel rank; padded vocabulary; tensor-parallel degree.
    depths : int
        Times that logits are alive: 1, plus one per MTP module.
    per_logit_bytes : int
        Bytes alive per logit: bf16 logits and fp32 softmax make 6; each copy in fp32 that a loss makes 4 more.

    Returns
    -------
    Quantity
        `per_logit_bytes` per logit and rank.

    Notes
    -----
    A1. MTP losses are taken together, so logits are alive once per depth.

    Source: Megatron-LM `tensor_parallel/cross_entropy.py`, `fusions/fused_cross_entropy.py`.
    """
    return per_logit_bytes * tokens * vocab / tp * depths
