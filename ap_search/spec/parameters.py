"""Exact parameter counts of a model, split by how tensor and expert parallelism cut them."""

from dataclasses import dataclass, fields

from ap_search.spec.blocks import Attention, AttentionKind, DenseFfn, LayerKind, LinearMixer, Model, MoeFfn, QkNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """Parameters of one layer, counts, split by what divides them.

    Attributes
    ----------
    mixer_sharded : int
        Attention or mixer matrices that tensor parallelism divides.
    mixer_replicated : int
        Held whole by every tensor rank: MLA down-projections and latent norms, q/k norms, indexer, output bias.
    norms : int
        Norms of the layer, replicated.
    ffn_sharded, ffn_replicated : int
        Dense feed-forward; its output bias is replicated.
    shared_sharded, shared_replicated : int
        Shared experts (tensor parallel like a dense feed-forward) and their gate.
    latent : int
        Projections to and from the routed experts' latent width, replicated.
    router : int
        Router weight and trained bias, replicated.
    expert : int
        All routed experts of the layer; expert and expert-tensor parallelism divide them.
    """

    mixer_sharded: int = 0
    mixer_replicated: int = 0
    norms: int = 0
    ffn_sharded: int = 0
    ffn_replicated: int = 0
    shared_sharded: int = 0
    shared_replicated: int = 0
    latent: int = 0
    router: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(int(getattr(self, field.name)) for field in fields(self))


def layer_params(model: Model, kind: LayerKind) -> LayerParams:
    """Count the parameters of one layer of a kind.

    Parameters
    ----------
    model : Model
        For the hidden size and the norms' parameters per element.
    kind : LayerKind
        The layer's mixer, feed-forward and norms.

    Returns
    -------
    LayerParams
        Integer counts; buffers (the auxiliary-loss-free expert bias) are not parameters and left out.

    Notes
    -----
    A1. Convolutions, decays and inner norms of a linear mixer count as replicated: small, and frameworks differ.
    A2. A bias of a column-parallel matrix is cut with it; a bias of a row-parallel one (attention and feed-forward
        output) is held whole.

    Source: NVIDIA Megatron-LM `megatron/training/theoretical_memory_usage.py`,
    `megatron/core/models/gpt/gpt_layer_specs.py` (duplicated MLA down-projections), `megatron/core/transformer/moe/`.
    """
    h = model.hidden_size
    sharded, replicated = _mixer_params(h, kind.mixer)
    norms = kind.num_norms * h * model.norm_params_per_element
    if isinstance(kind.ffn, MoeFfn):
        return _moe_params(h, kind.ffn, LayerParams(mixer_sharded=sharded, mixer_replicated=replicated, norms=norms))
    ffn_sharded, ffn_replicated = _dense_params(h, kind.ffn)
    return LayerParams(
        mixer_sharded=sharded,
        mixer_replicated=replicated,
        norms=norms,
        ffn_sharded=ffn_sharded,
        ffn_replicated=ffn_replicated,
    )


def _mixer_params(h: int, mixer: Attention | LinearMixer | None) -> tuple[int, int]:
    """Count (sharded, replicated) parameters of a mixer."""
    if mixer is None:
        return 0, 0
    if isinstance(mixer, LinearMixer):
        return h * mixer.in_width + mixer.out_width * h, mixer.small_params
    if mixer.kind is AttentionKind.MLA:
        sharded, replicated = _mla_params(h, mixer)
    else:
        sharded, replicated = _gqa_params(h, mixer)
    sharded += mixer.num_heads * mixer.sink
    sharded += h * mixer.num_heads * (mixer.v_head_dim * mixer.output_gate + mixer.head_gate)
    return sharded, replicated + h * mixer.out_bias + _indexer_params(h, mixer)


def _gqa_params(h: int, mixer: Attention) -> tuple[int, int]:
    """Count (sharded, replicated) parameters of grouped-query attention; a low-rank query has a replicated part."""
    nq, nkv, dqk, dv = mixer.num_heads, mixer.num_kv_heads, mixer.qk_head_dim, mixer.v_head_dim
    key_value_width, low = mixer.key_value_width, mixer.q_lora_rank
    sharded = (low or h) * nq * dqk + h * key_value_width + nq * dv * h
    sharded += (nq * dqk + key_value_width) * mixer.qkv_bias
    norm = {QkNorm.NONE: 0, QkNorm.HEAD: 2 * dqk, QkNorm.WIDTH: (nq + nkv) * dqk}[mixer.qk_norm]
    return sharded, h * low + low + norm


def _mla_params(h: int, mixer: Attention) -> tuple[int, int]:
    """Count (sharded, replicated) parameters of multi-head latent attention."""
    nq, dqk, dv = mixer.num_heads, mixer.qk_head_dim, mixer.v_head_dim
    ql, kl, dr = mixer.q_lora_rank, mixer.kv_lora_rank, mixer.qk_rope_head_dim
    sharded = (ql or h) * nq * dqk + kl * nq * (dqk - dr + dv) + nq * dv * h
    replicated = h * ql + ql + h * (kl + dr) + kl + (ql + kl + dr) * mixer.qkv_bias
    return sharded, replicated


def _indexer_params(h: int, mixer: Attention) -> int:
    """Count parameters of the key-picking indexer: queries (from the latent if there is one), key, norm, head weights.

    Source: DeepSeek-V3.2-Exp `inference/model.py`, class Indexer (wq_b, wk, LayerNorm k_norm, weights_proj).
    """
    heads, dim = mixer.index_heads, mixer.index_head_dim
    return (mixer.q_lora_rank or h) * heads * dim + h * dim + 2 * dim + h * heads if heads else 0


def _matrices(gated: bool) -> int:
    """Count a feed-forward's matrices: gate, up and down, or up and down."""
    return 3 if gated else 2


def _dense_params(h: int, ffn: DenseFfn | None) -> tuple[int, int]:
    """Count (sharded, replicated) parameters of a dense feed-forward."""
    if ffn is None:
        return 0, 0
    matrices = _matrices(ffn.gated)
    return matrices * h * ffn.width + (matrices - 1) * ffn.width * ffn.bias, h * ffn.bias


def _moe_params(h: int, moe: MoeFfn, rest: LayerParams) -> LayerParams:
    """Count a mixture of experts beside a layer's other parts."""
    width = moe.latent_width or h
    matrices = _matrices(moe.gated)
    one_expert = matrices * width * moe.expert_width + ((matrices - 1) * moe.expert_width + width) * moe.expert_bias
    return LayerParams(
        mixer_sharded=rest.mixer_sharded,
        mixer_replicated=rest.mixer_replicated,
        norms=rest.norms,
        shared_sharded=_matrices(moe.shared_gated) * h * moe.shared_width,
        shared_replicated=h * moe.shared_gate,
        latent=2 * h * moe.latent_width,
        router=h * moe.num_experts + moe.num_experts * moe.router_bias,
        expert=moe.num_experts * one_expert,
    )


def active_layer_params(model: Model, kind: LayerKind) -> int:
    """Count the parameters of one layer that one token passes: top-k of the routed experts, all else whole."""
    params = layer_params(model, kind)
    if not isinstance(kind.ffn, MoeFfn):
        return params.total
    return params.total - params.expert + params.expert // kind.ffn.num_experts * kind.ffn.top_k


def embedding_params(model: Model, vocab_size: int | None = None) -> int:
    """Count token embedding, learned positions and embedding norm; `vocab_size` replaces the model's (when padded)."""
    rows = (model.vocab_size if vocab_size is None else vocab_size) + model.learned_positions
    return model.hidden_size * (rows + model.norm_params_per_element * model.embedding_norm)


def head_params(model: Model, vocab_size: int | None = None) -> int:
    """Count the output head without the final norm: no weights where tied to the embedding, plus its bias if any."""
    rows = model.vocab_size if vocab_size is None else vocab_size
    return rows * (model.hidden_size * (not model.tied_embeddings) + model.head_bias)


def final_norm_params(model: Model) -> int:
    """Count the norm before the head."""
    return model.hidden_size * model.norm_params_per_element


def mtp_extra_params(model: Model) -> int:
    """Count what one multi-token-prediction module holds beside its layer: projection 2h to h, and three norms.

    Source: NVIDIA Megatron-LM `megatron/core/transformer/multi_token_prediction.py` (enorm, hnorm, eh_proj,
    final_layernorm); embedding and head are shared with the model.
    """
    h = model.hidden_size
    return 2 * h * h + 3 * h * model.norm_params_per_element


def params_mtp(model: Model) -> int:
    """Count the parameters of all multi-token-prediction modules."""
    if not model.mtp_layers:
        return 0
    return model.mtp_layers * (mtp_extra_params(model) + layer_params(model, model.mtp_kind).total)


def _outer_params(model: Model) -> int:
    """Count what lies outside the layers: embedding, final norm, head."""
    return embedding_params(model) + final_norm_params(model) + head_params(model)


def params_total(model: Model) -> int:
    """Count all parameters, multi-token-prediction modules and buffers left out."""
    per_kind = [layer_params(model, kind).total for kind in model.kinds]
    return _outer_params(model) + sum(per_kind[index] for index in model.layers)


def params_active(model: Model) -> int:
    """Count the parameters that one token passes: top-k of the experts; embedding and head both count."""
    per_kind = [active_layer_params(model, kind) for kind in model.kinds]
    return _outer_params(model) + sum(per_kind[index] for index in model.layers)
