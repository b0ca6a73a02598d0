"""Model FLOPs as Megatron-LM reports them: causal attention halved, router left out, no recompute."""

from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, LinearMixer, Model, MoeFfn
from ap_search.spec.run import FlopsRule

PASSES_TIMES_MULTIPLY_ADD = 6
# A forward pass is a third of forward and backward: counted again where it is repeated.
REPEATED_FORWARD = 4 / 3


def _half_square_flops(mixer: Attention, seq_len: int) -> float:
    """Multiply-adds per token of scores and weighted values, forward, half of the attention square."""
    return seq_len * mixer.num_heads * (mixer.qk_head_dim + mixer.v_head_dim) / 2


def _mixer_flops(kind: LayerKind, model: Model, seq_len: int) -> float:
    """Multiply-adds per token of a layer's mixer, forward: projections, and half of the attention square."""
    mixer, hidden = kind.mixer, model.hidden_size
    if isinstance(mixer, LinearMixer):
        return hidden * (mixer.in_width + mixer.out_width) + mixer.scan_flops_per_token / 2
    if not isinstance(mixer, Attention):
        return 0.0
    core = _half_square_flops(mixer, seq_len)
    queries, rank = mixer.num_heads * mixer.qk_head_dim, mixer.q_lora_rank
    linear = rank * (hidden + queries + 1) if rank else hidden * queries
    if mixer.kind is AttentionKind.MLA:
        no_rope = mixer.qk_head_dim - mixer.qk_rope_head_dim
        linear += mixer.kv_lora_rank * (hidden + mixer.num_heads * (no_rope + mixer.v_head_dim) + 1)
        linear += hidden * mixer.qk_rope_head_dim
    else:
        linear += hidden * mixer.key_value_width
    output = hidden * mixer.num_heads * mixer.v_head_dim
    return core + linear + output * (2 if mixer.output_gate else 1)


def _ffn_flops(kind: LayerKind, model: Model) -> float:
    """Multiply-adds per token of a layer's feed-forward, forward, router left out."""
    ffn, hidden = kind.ffn, model.hidden_size
    if isinstance(ffn, DenseFfn):
        return hidden * ffn.width * (3 if ffn.gated else 2)
    if not isinstance(ffn, MoeFfn):
        return 0.0
    width = ffn.latent_width or hidden
    routed = ffn.top_k * width * ffn.expert_width * (3 if ffn.gated else 2)
    shared = hidden * ffn.shared_width * (3 if ffn.shared_gated else 2)
    return routed + shared + 2 * hidden * ffn.latent_width


def layer_flops_per_token(model: Model, kind: LayerKind, seq_len: int) -> float:
    """Floating-point operations of one layer, forward and backward, per token.

    Parameters
    ----------
    model : Model
        Its hidden size is used.
    kind : LayerKind
        Mixer and feed-forward.
    seq_len : int
        Tokens of a sequence.

    Returns
    -------
    float
        Six times the forward multiply-adds.

    Source: Megatron-LM `megatron/training/training.py` num_floating_point_operations.
    """
    return PASSES_TIMES_MULTIPLY_ADD * (_mixer_flops(kind, model, seq_len) + _ffn_flops(kind, model))


def head_flops_per_token(model: Model) -> float:
    """Floating-point operations of the head, forward and backward, per token (vocabulary not padded).

    Parameters
    ----------
    model : Model
        Hidden size and vocabulary.

    Returns
    -------
    float
        6 h V.

    Source: as `layer_flops_per_token`.
    """
    return float(PASSES_TIMES_MULTIPLY_ADD * model.hidden_size * model.vocab_size)


def mtp_flops_per_token(model: Model, seq_len: int) -> float:
    """Floating-point operations of one MTP module with its head, forward and backward, per token.

    Parameters
    ----------
    model : Model
        Its last layer's kind is repeated.
    seq_len : int
        Tokens of a sequence.

    Returns
    -------
    float
        A layer, a head, and 6 (3h + 2h^2) for norms and projection.

    Source: as `layer_flops_per_token`.
    """
    hidden = model.hidden_size
    extra = PASSES_TIMES_MULTIPLY_ADD * (3 * hidden + 2 * hidden * hidden)
    return layer_flops_per_token(model, model.mtp_kind, seq_len) + head_flops_per_token(model) + extra


def model_flops_per_token(model: Model, seq_len: int) -> float:
    """Floating-point operations of the whole model, forward and backward, per token.

    Parameters
    ----------
    model : Model
        Layers, head, MTP modules.
    seq_len : int
        Tokens of a sequence, >= 1.

    Returns
    -------
    float
        Sum over layers, head and MTP modules.

    Notes
    -----
    A1. Causal attention counts half of the square; sliding windows are not discounted, as in the source.
    A2. Router and shared gate are left out; nothing recomputed is counted.

    Source: Megatron-LM `megatron/training/training.py` num_floating_point_operations.
    """
    layers = sum(layer_flops_per_token(model, model.kinds[kind], seq_len) for kind in model.layers)
    return layers + head_flops_per_token(model) + model.mtp_layers * mtp_flops_per_token(model, seq_len)


def reported_flops_per_token(
    model: Model, seq_len: int, *, rule: FlopsRule, mtp: bool = True, full_recompute: bool = False
) -> float:
    """Floating-point operations of the whole model per token, as a printed TFLOP/s or MFU counts them.

    Parameters
    ----------
    model : Model
        Layers, head, MTP modules.
    seq_len : int
        Tokens of a sequence, >= 1.
    rule : FlopsRule
        Causal attention halved; the whole square; or the whole square with what is recomputed.
    mtp : bool
        Whether MTP modules are counted.
    full_recompute : bool
        Whether the run repeats the forward of every layer, which only the hardware rule counts.

    Returns
    -------
    float

    Notes
    -----
    A1. The hardware rule repeats the layers' forward, not the head's; what selective recomputation repeats is not
    counted.

    Source: Megatron-LM `training.py` before and after 6 March 2025; arXiv 2104.04473, equation 2 (hardware).
    """
    count = model_flops_per_token(model, seq_len)
    if not mtp:
        count -= model.mtp_layers * mtp_flops_per_token(model, seq_len)
    if rule is FlopsRule.CAUSAL_HALVED:
        return count
    mixers = [model.kinds[kind].mixer for kind in (*model.layers, *[model.mtp_index] * (model.mtp_layers * mtp))]
    halves = sum(_half_square_flops(mixer, seq_len) for mixer in mixers if isinstance(mixer, Attention))
    count += PASSES_TIMES_MULTIPLY_ADD * halves
    if rule is FlopsRule.FULL_ATTENTION or not full_recompute:
        return count
    head = head_flops_per_token(model) * (1 + model.mtp_layers * mtp)
    return (count - head) * REPEATED_FORWARD + head
