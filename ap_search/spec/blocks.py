"""What a model is made of, as plain frozen values: attention kinds, feed-forward kinds, layer kinds, the model."""

from dataclasses import dataclass
from enum import StrEnum

MAX_LAYERS = 10_000
"""More layers than this are a mistake in the file."""


class AttentionKind(StrEnum):
    """How queries, keys and values are made (multi-head attention is GQA with as many key heads as query heads)."""

    GQA = "gqa"
    MLA = "mla"


class QkNorm(StrEnum):
    """What the norm on queries and keys spans: nothing, one head (Qwen3), or the whole projection (OLMoE)."""

    NONE = "none"
    HEAD = "head"
    WIDTH = "width"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention of one layer kind; widths are elements, counts are heads.

    `qk_head_dim` is the width of one query (and key) head, for MLA the sum of its no-rope and rope parts;
    `window` is the number of keys a query sees at most (0: all earlier ones); `index_topk` likewise for sparse
    attention that picks its keys by a small indexer (DeepSeek-V3.2 style; 0: none). `q_lora_rank` with GQA is a
    low-rank query projection. `output_gate` multiplies the heads' output by a gate of the same width, `head_gate` by
    one number per head. `key_is_value` layers have no value projection; `kv_from_below` layers take keys and values
    of the nearest layer below that makes its own.
    """

    kind: AttentionKind = AttentionKind.GQA
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    output_gate: bool = False
    head_gate: bool = False
    key_is_value: bool = False
    kv_from_below: bool = False
    sink: bool = False
    index_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0

    @property
    def key_value_width(self) -> int:
        """Columns of the key and value projections (not MLA), elements: 0 where they come from a layer below."""
        if self.kv_from_below:
            return 0
        return self.num_kv_heads * (self.qk_head_dim + (0 if self.key_is_value else self.v_head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMixer:
    """A token mixer without softmax (state-space or linear attention): projections around a scan.

    Attributes
    ----------
    name : str
        What it is called in the model's own words (`mamba2`, `gated_delta_net`, `lightning_attention`).
    in_width : int
        Columns of all input projections together, elements.
    out_width : int
        Rows of the output projection, elements.
    small_params : int
        Parameters beside the two projections (convolution, decay, norms), count.
    scan_flops_per_token : int
        Forward floating-point operations of convolution and scan, per token.
    heads : int
        Heads that tensor parallelism may split.
    """

    name: str
    in_width: int
    out_width: int
    small_params: int
    scan_flops_per_token: int
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFfn:
    """A dense feed-forward: `width` elements inside; gated (SwiGLU, three matrices) or not (two)."""

    width: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFfn:
    """Routed experts with their router and shared experts.

    `shared_width` is the total width of all shared experts; `latent_width` replaces the hidden size for the routed
    experts where the model projects down first (0: it does not); `num_groups`/`topk_groups` describe group-limited
    routing (1: none); `router_bias` is a trained bias on the logits; `score_bias` the auxiliary-loss-free buffer that
    is not a parameter; `expert_clamp` limits what goes into the experts' activation.
    """

    num_experts: int
    top_k: int
    expert_width: int
    gated: bool = True
    expert_bias: bool = False
    expert_clamp: bool = False
    shared_width: int = 0
    shared_gated: bool = True
    shared_gate: bool = False
    latent_width: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    router_bias: bool = False
    score_bias: bool = False
    score_function: str = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One distinct kind of layer: a mixer, a feed-forward, either of which may be absent, and its norms."""

    mixer: Attention | LinearMixer | None
    ffn: DenseFfn | MoeFfn | None
    num_norms: int = 2

    @property
    def is_moe(self) -> bool:
        """Whether the layer holds routed experts."""
        return isinstance(self.ffn, MoeFfn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer: distinct layer kinds, and for each layer the index of its kind.

    Attributes
    ----------
    kinds : tuple of LayerKind
        Distinct kinds, in order of first appearance.
    layers : tuple of int
        For each decoder layer, bottom to top, its index into `kinds`.
    mtp_layers : int
        Multi-token-prediction modules after the last layer, each one layer plus a projection.
    mtp_kind_index : int or None
        Index into `kinds` of the layer that an MTP module holds, None for the last layer's kind.
    norm_params_per_element : int
        1 for RMSNorm (weight), 2 for LayerNorm (weight and bias).
    learned_positions : int
        Rows of a learned position table, 0 for rotary positions.
    max_positions : int
        Longest sequence the configuration names, 0 when it names none.
    warnings : tuple of str
        What the reader noticed and the user should know, one line each.
    """

    name: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    mtp_layers: int = 0
    mtp_kind_index: int | None = None
    norm_params_per_element: int = 1
    learned_positions: int = 0
    max_positions: int = 0
    head_bias: bool = False
    embedding_norm: bool = False
    sources: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Decoder layers, MTP modules left out."""
        return len(self.layers)

    @property
    def mtp_index(self) -> int:
        """Index into `kinds` of the layer that an MTP module holds: the last layer's unless the model names another."""
        return self.layers[-1] if self.mtp_kind_index is None else self.mtp_kind_index

    @property
    def mtp_kind(self) -> LayerKind:
        """The layer kind that an MTP module holds."""
        return self.kinds[self.mtp_index]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of layers that hold routed experts."""
        return tuple(i for i, kind in enumerate(self.layers) if self.kinds[kind].is_moe)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of layers without routed experts."""
        return tuple(i for i, kind in enumerate(self.layers) if not self.kinds[kind].is_moe)

    @property
    def moe(self) -> MoeFfn | None:
        """The first kind of routed experts, or None for a dense model."""
        return next((kind.ffn for kind in self.kinds if isinstance(kind.ffn, MoeFfn)), None)

    @property
    def attention(self) -> Attention | None:
        """The first kind of softmax attention, or None where no layer has any."""
        return next((kind.mixer for kind in self.kinds if isinstance(kind.mixer, Attention)), None)
