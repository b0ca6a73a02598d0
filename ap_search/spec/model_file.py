"""The schema of our own model files."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ap_search.spec.blocks import MAX_LAYERS

_MAX = 2**31 - 1
Positive = Annotated[int, Field(gt=0, le=_MAX)]
Count = Annotated[int, Field(ge=0, le=_MAX)]
Switch = Annotated[int, Field(ge=0, le=1)]


class _Block(BaseModel):
    """A block of a model file: no unknown keys, no converted types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AttentionFile(_Block):
    """Attention of all layers (of the full ones where `sliding` is given)."""

    kind: Literal["gqa", "mla"] = Field("gqa", description="gqa: grouped-query, multi-head, multi-query; mla: latent.")
    num_heads: Positive = Field(description="Query heads.")
    num_kv_heads: Positive | None = Field(None, description="Key heads; as many as query heads when absent (gqa).")
    head_dim: Positive | None = Field(
        None, description="Width of a query head, elements; hidden size over heads when absent (gqa)."
    )
    v_head_dim: Positive | None = Field(None, description="Width of a value head, elements; head_dim when absent.")
    q_lora_rank: Count = Field(0, description="Width of the query latent (mla), elements; 0: one projection.")
    kv_lora_rank: Count = Field(0, description="Width of the key-value latent (mla), elements.")
    qk_nope_head_dim: Count = Field(0, description="Part of a query head without positions (mla), elements.")
    qk_rope_head_dim: Count = Field(0, description="Part of a query head with rotary positions (mla), elements.")
    window: Count = Field(0, description="Keys a query sees at most, tokens; 0: all earlier ones.")
    qkv_bias: bool = Field(False, description="Biases on the query, key and value projections.")
    out_bias: bool = Field(False, description="Bias on the output projection.")
    qk_norm: Literal["none", "head", "width"] = Field(
        "none", description="Norm on queries and keys: over one head, or over the whole projection."
    )
    output_gate: bool = Field(False, description="A gate as wide as the heads' output multiplies it.")
    sink: bool = Field(False, description="A trained sink logit per head.")
    index_heads: Count = Field(0, description="Heads of the indexer of sparse attention; 0: none.")
    index_head_dim: Count = Field(0, description="Width of an indexer head, elements.")
    index_topk: Count = Field(0, description="Keys the indexer picks for a query, tokens.")


class SlidingFile(_Block):
    """Layers whose attention sees a window; what is absent is as in `attention`."""

    window: Positive = Field(description="Keys a query of these layers sees at most, tokens.")
    pattern: list[Switch] = Field(
        min_length=1, description="1: sliding, 0: full, from the first layer; a shorter list repeats."
    )
    num_heads: Positive | None = Field(None, description="Query heads of sliding layers.")
    num_kv_heads: Positive | None = Field(None, description="Key heads of sliding layers.")
    head_dim: Positive | None = Field(None, description="Width of a query head of sliding layers, elements.")
    v_head_dim: Positive | None = Field(None, description="Width of a value head of sliding layers, elements.")
    sink: bool | None = Field(None, description="A trained sink logit per head of sliding layers.")


class FfnFile(_Block):
    """Feed-forward of the dense layers."""

    width: Positive = Field(description="Inner width, elements.")
    gated: bool = Field(True, description="SwiGLU-like with three matrices; false: two matrices.")
    bias: bool = Field(False, description="Biases on its matrices.")


class MoeFile(_Block):
    """Routed experts, and which layers hold them."""

    num_experts: Positive = Field(description="Routed experts of a layer.")
    top_k: Positive = Field(description="Experts that a token is sent to.")
    expert_width: Positive = Field(description="Inner width of one routed expert, elements.")
    gated: bool = Field(True, description="Experts with three matrices; false: two.")
    expert_bias: bool = Field(False, description="Biases on the experts' matrices.")
    expert_clamp: bool = Field(False, description="What goes into the experts' activation is clamped (GPT-OSS).")
    shared_width: Count = Field(0, description="Inner width of all shared experts together, elements; 0: none.")
    shared_gate: bool = Field(False, description="A sigmoid gate on the shared experts' output (Qwen2-MoE).")
    latent_width: Count = Field(0, description="Width that routed experts work on, elements; 0: the hidden size.")
    num_groups: Positive = Field(1, description="Groups of experts for group-limited routing; 1: none.")
    topk_groups: Positive = Field(1, description="Groups a token may reach.")
    router_bias: bool = Field(False, description="A trained bias on the router's logits.")
    score_bias: bool = Field(False, description="A buffer that balances load without a loss (DeepSeek-V3).")
    score_function: str = Field("softmax", description="How logits become scores: softmax, sigmoid.")
    first_dense_layers: Count = Field(0, description="Layers at the bottom that stay dense.")
    every: Positive = Field(1, description="Experts in every n-th layer (the n-th, 2n-th ...); 1: in each.")
    layer_pattern: list[Switch] | None = Field(
        None, description="1: experts, 0: dense, one entry per layer; in place of first_dense_layers and every."
    )


class PublishedFile(_Block):
    """Size as its authors publish it; a count that contradicts it by over 1 % draws a warning."""

    params_total: str | int | None = Field(None, description="All parameters: `671B`, `1T`, or a whole number.")
    params_active: str | int | None = Field(None, description="Parameters one token passes: `37B`.")
    source: str = Field(description="Where the figures are published.")


class ModelFile(_Block):
    """A decoder-only transformer."""

    name: str | None = Field(None, description="Name in reports; the file's name when absent.")
    hidden_size: Positive = Field(description="Width of the residual stream, elements.")
    vocab_size: Positive = Field(description="Rows of the embedding before padding.")
    num_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)] = Field(description="Decoder layers, MTP modules left out.")
    tied_embeddings: bool = Field(False, description="The head is the embedding's transpose.")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="rmsnorm: weight; layernorm: weight and bias.")
    num_norms: Annotated[int, Field(ge=0, le=16)] = Field(2, description="Norms of the hidden size in each layer.")
    attention: AttentionFile = Field(description="Attention of the layers.")
    sliding: SlidingFile | None = Field(None, description="Layers with a window, where only some have one.")
    ffn: FfnFile | None = Field(None, description="Dense feed-forward; required where any layer is dense.")
    moe: MoeFile | None = Field(None, description="Routed experts; absent for a dense model.")
    mtp_layers: Count = Field(0, description="Multi-token-prediction modules, trained after the last layer.")
    learned_positions: Count = Field(0, description="Rows of a learned position table; 0: rotary positions.")
    max_positions: Count = Field(0, description="Longest sequence, tokens; 0: not stated.")
    head_bias: bool = Field(False, description="A bias on the output head.")
    published: PublishedFile | None = Field(None, description="Published size, checked against the count.")
    sources: list[str] = Field(default_factory=list, description="Where the values come from.")
