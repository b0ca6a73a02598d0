"""Activation memory by operator: outputs that per-operator selective recomputation keeps, bytes of one layer."""

import numpy as np
from numpy.typing import NDArray

from ap_search.cost.dispatch import DispatchShape
from ap_search.cost.shapes import Shapes
from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, LinearMixer, MoeFfn
from ap_search.units import BF16_BYTES, FP32_BYTES

FloatArray = NDArray[np.float64]
EXCHANGES = 2


def _mixer_widths(kind: LayerKind) -> list[tuple[float, bool]]:
    """Output widths of the mixer's matrix products in order, and whether tp splits them."""
    mixer = kind.mixer
    if isinstance(mixer, LinearMixer):
        return [(mixer.in_width, True), (mixer.out_width, True)]
    if mixer is None:
        return []
    queries = mixer.num_heads * mixer.qk_head_dim
    head: list[tuple[float, bool]] = [(mixer.q_lora_rank, False)] if mixer.q_lora_rank else []
    if mixer.kind is AttentionKind.MLA:
        latent = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        keys = mixer.num_heads * (mixer.qk_head_dim - mixer.qk_rope_head_dim + mixer.v_head_dim)
        return [*head, (queries, True), (latent, False), (keys, True)]
    return [
        *head,
        (queries, True),
        (mixer.num_kv_heads * mixer.qk_head_dim, True),
        (mixer.num_kv_heads * mixer.v_head_dim, True),
    ]


def _ffn_widths(kind: LayerKind, hidden: int) -> list[tuple[float, bool]]:
    """Output widths of the dense or shared feed-forward's matrix products in order, and whether tp splits them."""
    ffn = kind.ffn
    if isinstance(ffn, DenseFfn):
        width, gated = ffn.width, ffn.gated
    elif isinstance(ffn, MoeFfn) and ffn.shared_width:
        width, gated = ffn.shared_width, ffn.shared_gated
    else:
        return []
    return [*[(float(width), True)] * (2 if gated else 1), (float(hidden), False)]


def operator_saved_bytes(kind: LayerKind, hidden: int, shapes: Shapes, *, shape: DispatchShape | None) -> FloatArray:
    """Bytes that per-operator selective recomputation keeps of one layer and micro-batch, on one device.

    Parameters
    ----------
    kind : LayerKind
        Mixer and feed-forward.
    hidden : int
        Hidden size, elements.
    shapes : Shapes
        Tokens and splits.
    shape : DispatchShape or None
        Dispatch of this layer; None where it has no routed experts.

    Returns
    -------
    FloatArray
        The layer's input (2h), attention's output and log-sum-exp, the outputs of the first, third, ... matrix product
        in the order of the forward, and what the two all-to-alls of an expert-parallel layer deliver.

    Notes
    -----
    A1. Products: queries, keys, values (MLA: its down- and up-projections), the output projection, the feed-forward's
    or shared experts' own. Router and grouped products are computed again.

    Source: pytorch/torchtitan b5bcd76c `distributed/activation_checkpoint.py` (SelectiveAC, every second mm).
    """
    products = _mixer_widths(kind)
    if kind.mixer is not None and not isinstance(kind.mixer, LinearMixer):
        products.append((float(hidden), False))
    products += _ffn_widths(kind, hidden)
    kept = products[::2]
    split = sum(width for width, by_tp in kept if by_tp)
    whole = sum(width for width, by_tp in kept if not by_tp)
    saved = BF16_BYTES * (shapes.local_tokens * (hidden + whole) + shapes.tokens * split / shapes.tp)
    if isinstance(kind.mixer, Attention):
        output = BF16_BYTES * kind.mixer.v_head_dim + FP32_BYTES
        saved = saved + shapes.tokens * kind.mixer.num_heads * output / shapes.tp
    if shape is not None:
        saved = saved + np.where(np.greater(shape.group, 1), EXCHANGES * shape.rows * hidden * BF16_BYTES, 0.0)
    return saved
