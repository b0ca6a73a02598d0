"""Activation memory that unfused kernels, dropout and fp8 add to a layer or take from it, bytes on one device."""

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.keeps import Keeps
from ap_search.cost.shapes import Shapes
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, MoeFfn
from ap_search.units import BF16_BYTES, FP32_BYTES

FloatArray = NDArray[np.float64]
MASK_BYTES = 1
FP8_BYTES = 1


def mask_bytes(hidden: int, shapes: Shapes, keeps: Keeps) -> FloatArray:
    """Bytes of the mask that dropout after a block saves per micro-batch, on one device.

    Parameters
    ----------
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    keeps : Keeps
        Whether there is dropout.

    Returns
    -------
    FloatArray
        h per token that the rank holds between blocks, 0 without dropout.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.1.
    """
    masks: FloatArray = shapes.local_tokens * MASK_BYTES * hidden * keeps.dropout
    return masks


def score_bytes(attention: Attention, shapes: Shapes, keeps: Keeps) -> FloatArray:
    """Bytes of attention scores that unfused attention saves per micro-batch, on one device; 0 where it is fused.

    Parameters
    ----------
    attention : Attention
        Heads.
    shapes : Shapes
        Tokens and splits.
    keeps : Keeps
        Whether attention is fused, whether there is dropout.

    Returns
    -------
    FloatArray
        Per token, head and key: 2 bytes of softmax; with dropout its mask and output besides, 5 in all.

    Notes
    -----
    A1. Scores are kept for all keys, masked ones included.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.1 (5 a s^2 b).
    """
    if keeps.fused_attention:
        return np.zeros_like(shapes.tokens)
    per_score = BF16_BYTES + (MASK_BYTES + BF16_BYTES) * keeps.dropout
    heads = attention.num_heads / shapes.tp
    scores: FloatArray = shapes.tokens * heads * (per_score * shapes.seq_len - FP32_BYTES)
    return scores


def score_gradient_bytes(attention: Attention, shapes: Shapes, keeps: Keeps) -> FloatArray:
    """Bytes that the gradients of one layer's scores take in backward, on one device; 0 where attention is fused.

    Parameters
    ----------
    attention : Attention
        Heads.
    shapes : Shapes
        Tokens and splits.
    keeps : Keeps
        Whether attention is fused.

    Returns
    -------
    FloatArray
        4 bytes per token, head and key: the gradient that enters softmax's backward and the one that leaves it.

    Source: Megatron-LM v2 `model/fused_softmax.py`.
    """
    if keeps.fused_attention:
        return np.zeros_like(shapes.tokens)
    gradients: FloatArray = 2 * BF16_BYTES * shapes.tokens * shapes.seq_len * attention.num_heads / shapes.tp
    return gradients


def attention_extra_bytes(attention: Attention, hidden: int, shapes: Shapes, *, keeps: Keeps) -> FloatArray:
    """Bytes that attention saves beyond `attention_saved_bytes`, per micro-batch on one device; may be negative.

    Parameters
    ----------
    attention : Attention
        Heads and widths.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    keeps : Keeps
        Kernels and dropout of the trainer.

    Returns
    -------
    FloatArray
        Scores and mask; in fp8 the norm's output shrinks to one byte where the norm is fused into the
        first linear layer, and the output projection keeps a copy of its input in fp8 beside attention's own.

    Source: Korthikanti et al. 2022, section 4; TransformerEngine `pytorch/module/layernorm_linear.py`, `linear.py`.
    """
    extra = score_bytes(attention, shapes, keeps) + mask_bytes(hidden, shapes, keeps)
    if keeps.fp8_inputs:
        fused_norm = attention.kind is not AttentionKind.MLA
        extra = extra - shapes.local_tokens * (BF16_BYTES - FP8_BYTES) * hidden * fused_norm
        extra = extra + shapes.tokens * FP8_BYTES * attention.num_heads * attention.v_head_dim / shapes.tp
    return extra


def dense_extra_bytes(ffn: DenseFfn, hidden: int, shapes: Shapes, *, keeps: Keeps) -> FloatArray:
    """Bytes that a dense feed-forward saves beyond its fused bf16 form, per micro-batch; may be negative.

    Parameters
    ----------
    ffn : DenseFfn
        Width, gate.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    keeps : Keeps
        Kernels and dropout of the trainer.

    Returns
    -------
    FloatArray
        Mask; the gate's activation where a gated activation is not one kernel (2f / tp per token); in
        fp8 one byte less per element of the norm's output and of the second product's input.

    Source: huggingface/nanotron e24d2483 `models/llama.py` (GLUActivation); TransformerEngine `layernorm_linear.py`.
    """
    extra = mask_bytes(hidden, shapes, keeps)
    if ffn.gated and not keeps.fused_activation:
        extra = extra + shapes.tokens * BF16_BYTES * ffn.width / shapes.tp
    if keeps.fp8_inputs:
        saving = BF16_BYTES - FP8_BYTES
        extra = extra - saving * (shapes.local_tokens * hidden + shapes.tokens * ffn.width / shapes.tp)
    return extra


def expert_act_extra_bytes(moe: MoeFfn, *, shape: DispatchShape, keeps: Keeps) -> FloatArray:
    """Bytes that the activation of routed experts saves beyond its fused bf16 output; `moe_act` recomputes them too.

    Parameters
    ----------
    moe : MoeFfn
        Width of an expert, gate.
    shape : DispatchShape
        Copies that the rank's experts process.
    keeps : Keeps
        Kernels of the trainer.

    Returns
    -------
    FloatArray
        The gate's activation where it is not fused (2 fe per copy); in fp8 one byte less per element of the output,
        which only the second product reads. May be negative.

    Source: as `dense_extra_bytes`; TransformerEngine `pytorch/module/grouped_linear.py`.
    """
    gate = BF16_BYTES * (moe.gated and not keeps.fused_activation)
    narrow = (BF16_BYTES - FP8_BYTES) * keeps.fp8_inputs
    extra: FloatArray = np.asarray((gate * shape.rows - narrow * shape.aligned_rows) * moe.expert_width / shape.etp)
    return extra


def shared_extra_bytes(moe: MoeFfn, hidden: int, shapes: Shapes, *, keeps: Keeps) -> FloatArray:
    """Bytes that shared experts save beyond their fused bf16 form; `shared_experts` recomputes them too.

    Parameters
    ----------
    moe : MoeFfn
        Width of all shared experts, gate.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    keeps : Keeps
        Kernels of the trainer.

    Returns
    -------
    FloatArray
        The gate's activation where it is not fused; in fp8 a copy of the input (h per token: the router keeps it in
        bf16) and one byte less per element of the second product's input. May be negative.

    Source: as `dense_extra_bytes`.
    """
    gate = BF16_BYTES * (moe.shared_gated and not keeps.fused_activation)
    narrow = (BF16_BYTES - FP8_BYTES) * keeps.fp8_inputs
    copied = shapes.local_tokens * FP8_BYTES * hidden * (keeps.fp8_inputs and moe.shared_width > 0)
    extra: FloatArray = copied + (gate - narrow) * shapes.tokens * moe.shared_width / shapes.tp
    return extra


def moe_extra_bytes(moe: MoeFfn, hidden: int, shapes: Shapes, *, shape: DispatchShape, keeps: Keeps) -> FloatArray:
    """Bytes that a MoE feed-forward saves beyond its fused bf16 form, per micro-batch; may be negative.

    Parameters
    ----------
    moe : MoeFfn
        Widths, gate.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    shape : DispatchShape
        Copies that the rank's experts process.
    keeps : Keeps
        Kernels and dropout of the trainer.

    Returns
    -------
    FloatArray
        What the activation and shared experts add; dropout's mask; 2h per copy where scores are applied outside the
        experts; in fp8 one byte less per element of the first product's input.

    Source: `expert_act_extra_bytes`, `shared_extra_bytes`; pytorch/torchtitan b5bcd76c `models/common/moe.py`,
    `distributed/deepep/deepep.py` (scores outside the experts).
    """
    travelling = moe.latent_width or hidden
    inputs = BF16_BYTES * (not keeps.scores_in_experts) * shape.rows
    inputs = inputs - (BF16_BYTES - FP8_BYTES) * keeps.fp8_inputs * shape.aligned_rows
    parts = expert_act_extra_bytes(moe, shape=shape, keeps=keeps) + shared_extra_bytes(moe, hidden, shapes, keeps=keeps)
    extra: FloatArray = mask_bytes(hidden, shapes, keeps) + inputs * travelling + parts
    return extra
