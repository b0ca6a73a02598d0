"""What keys of Hugging Face configurations mean: families of spellings, words for layers, keys that are refused.

Everything here is data: a new spelling is a word in a line. Source: `configuration_*.py` of huggingface/transformers
(4.57 and earlier) and the `configuration_*.py` that authors publish beside their weights.
"""


def words(text: str) -> frozenset[str]:
    """Split a text into a set of words."""
    return frozenset(text.split())


NESTED_BLOCKS = (
    "attn_config",
    "ffn_config",
    "linear_attn_config",
    "sparse_attention_config",
    "moe",
    "metadata",
    "published",
)
"""Blocks whose keys are read with a dot."""

TEXT_BLOCKS = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config", "language_model")
"""Blocks that hold the language model where a wrapper adds vision or speech."""

TOWERS = "vision|audio|speech|image|video"
"""Keys that match speak of what is not the language model."""

SPELLINGS: dict[str, tuple[str, ...]] = {
    # the whole model
    "hidden_size": ("hidden_size", "d_model", "n_embd", "n_embed", "model_dim", "embed_dim", "dim"),
    "num_layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers", "decoder_layers"),
    "vocab_size": ("padded_vocab_size", "vocab_size", "n_vocab"),
    "tied": ("tie_word_embeddings", "tie_embeddings", "tie_embedding", "tie_weights", "weight_tying"),
    "max_positions": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "max_seq_length",
        "seq_length",
        "model_max_length",
        "n_ctx",
    ),
    "mtp_layers": (
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
        "num_mtp_layers",
        "mtp_num_layers",
        "n_mtp_layers",
    ),
    "mtp_on": ("use_mtp",),
    "mtp_depth": ("mtp_transformer_layers",),
    "mtp_pattern": ("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    "head_bias": ("lm_head_bias",),
    "stated_total": (
        "params_total",
        "total_params",
        "num_params",
        "num_parameters",
        "total_parameters",
        "n_params",
        "n_parameters",
        "parameter_count",
        "param_count",
        "params",
        "parameters",
        "model_size",
        "model_params",
        "params_total_b",
        "total_params_b",
        "num_params_b",
        "params_b",
        "total_b",
        "params_billion",
        "params_billions",
        "num_params_billion",
        "num_params_billions",
        "total_params_billion",
        "metadata.total_parameters",
        "metadata.total_params",
        "published.params_total",
    ),
    # attention
    "num_heads": (
        "num_attention_heads",
        "n_heads",
        "n_head",
        "num_heads",
        "attention_heads",
        "decoder_attention_heads",
    ),
    "num_kv_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_kv_heads",
        "n_head_kv",
        "kv_n_heads",
        "attn_config.kv_n_heads",
        "multi_query_group_num",
        "num_query_groups",
        "num_attention_groups",
    ),
    "multi_query": ("multi_query",),
    "attention_make": ("attn_config.attn_type",),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "head_size", "attn_config.head_dim"),
    "v_head_dim": ("v_head_dim", "value_head_dim"),
    "sliding_heads": ("swa_num_attention_heads",),
    "full_heads": (),
    "full_v_head_dim": (),
    "sliding_kv_heads": ("swa_num_key_value_heads",),
    "sliding_head_dim": ("swa_head_dim",),
    "sliding_v_head_dim": ("swa_v_head_dim",),
    "full_kv_heads": ("num_global_key_value_heads",),
    "full_head_dim": ("global_head_dim",),
    "full_key_is_value": ("attention_k_eq_v",),
    "q_lora_rank": ("q_lora_rank", "share_q_dim"),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "use_mla": ("use_mla",),
    "qkv_bias": ("qkv_bias", "add_qkv_bias", "use_qkv_bias", "attention_qkv_bias"),
    "attention_bias": ("attention_bias", "attn_bias"),
    "out_bias": ("attention_out_bias", "attn_out_bias"),
    "any_bias": ("use_bias", "bias", "add_bias_linear", "enable_bias"),
    "no_bias": ("no_bias",),
    "qk_norm": ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "attn_config.qk_ln"),
    "qk_norm_type": ("qk_norm_type",),
    "output_gate": ("attn_output_gate", "attention_output_gate", "mla_use_output_gate"),
    "head_gate": ("use_head_wise_attn_gate",),
    "activation_limit": ("swiglu_limit",),
    "sink": ("add_attention_sink_bias", "attention_sink_bias"),
    "full_sink": ("add_full_attention_sink_bias",),
    "sliding_sink": ("add_swa_attention_sink_bias",),
    "use_cla": ("use_cla",),
    "cla_share": ("cla_share_factor",),
    "kv_shared_layers": ("num_kv_shared_layers",),
    # sparse attention with an indexer
    "index_heads": ("index_n_heads", "sparse_attention_config.sparse_num_index_heads"),
    "index_head_dim": ("index_head_dim", "sparse_attention_config.sparse_index_dim"),
    "index_topk": ("index_topk",),
    "index_topk_blocks": ("sparse_attention_config.sparse_topk_blocks",),
    "index_block": ("sparse_attention_config.sparse_block_size",),
    "index_types": ("indexer_types",),
    "index_layers": ("sparse_attention_config.sparse_attention_freq",),
    # which layer is what
    "layer_types": ("layer_types", "layers_block_type", "block_types"),
    "hybrid_pattern": ("hybrid_override_pattern",),
    "softmax_layers": ("attn_type_list",),
    "sliding_layers": ("hybrid_layer_pattern",),
    "full_interval": ("full_attention_interval",),
    "sliding_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "window": ("sliding_window", "sliding_window_size", "window_size"),
    "use_window": ("use_sliding_window",),
    "max_window_layers": ("max_window_layers",),
    "chunk": ("attention_chunk_size",),
    "rope_layers": ("no_rope_layers",),
    "nope_interval": ("no_rope_layer_interval", "nope_layer_interval"),
    "attn_period": ("attn_layer_period",),
    "attn_offset": ("attn_layer_offset",),
    "softmax_indices": ("attn_layer_indices",),
    "kda_layers": ("linear_attn_config.kda_layers",),
    "kda_full_layers": ("linear_attn_config.full_attn_layers",),
    "block_configs": ("block_configs",),
    # feed-forward
    "ffn_width": (
        "intermediate_size",
        "ffn_dim",
        "ffn_hidden_size",
        "n_inner",
        "ffn_config.ffn_hidden_size",
        "ff_intermediate_size",
        "inner_hidden_size",
        "d_ff",
        "hidden_dim",
    ),
    "dense_width": ("dense_intermediate_size", "intermediate_size_mlp", "dense_ffn_hidden_size"),
    "expansion": ("expansion_ratio", "ffn_config.expansion_ratio", "mlp_ratio"),
    "activation": (
        "hidden_act",
        "hidden_activation",
        "mlp_hidden_act",
        "activation_function",
        "activation",
        "ffn_act_fn",
        "ffn_config.ffn_act_fn",
    ),
    "mlp_type": ("mlp_type", "ffn_config.ffn_type"),
    "ffn_bias": ("mlp_bias", "ffn_bias", "use_mlp_bias"),
    # mixture of experts
    "num_experts": (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_routed_experts",
        "n_experts",
        "ffn_config.moe_num_experts",
        "moe.num_experts",
    ),
    "experts_of_own_width": ("n_routed_experts",),
    "moe_on": ("use_moe",),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
        "num_selected_experts",
        "ffn_config.moe_top_k",
        "moe.num_experts_per_tok",
    ),
    "expert_width": (
        "moe_intermediate_size",
        "expert_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_ffn_hidden_size",
        "expert_dim",
    ),
    "num_shared": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
        "num_experts_shared",
    ),
    "shared_width": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
    ),
    "gated_shared_width": ("shared_expert_intermediate_size",),
    "dense_beside_moe": ("enable_moe_block",),
    "latent_width": ("moe_latent_size", "routed_expert_hidden_size"),
    "num_groups": ("n_group", "num_expert_group", "moe_n_group"),
    "topk_groups": ("topk_group", "moe_topk_group"),
    "score_function": (
        "scoring_func",
        "score_function",
        "moe_router_activation_func",
        "router_score_function",
        "moe_router_score_function",
    ),
    "topk_method": ("topk_method",),
    "score_bias": (
        "use_routing_bias",
        "moe_router_enable_expert_bias",
        "moe_use_aux_free",
        "use_moe_router_bias",
        "use_expert_bias",
    ),
    # which layer has experts
    "moe_freq": ("moe_layer_freq", "is_moe_layer"),
    "moe_frequency": ("moe_layer_frequency",),
    "first_dense": (
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_layer_num_skipped",
        "n_dense_layers",
    ),
    "moe_step": ("decoder_sparse_step", "interleave_moe_layer_step"),
    "dense_only": ("mlp_only_layers",),
    "moe_only": ("moe_layers", "moe_layers_enum", "moe_layer_indices"),
    "moe_period": ("expert_layer_period",),
    "moe_offset": ("expert_layer_offset",),
    "moe_start": ("moe_layer_start_index",),
    "moe_end": ("moe_layer_end_index",),
    "moe_interval": ("moe_layer_interval",),
    "ffn_types": ("mlp_layer_types", "ffn_layer_types"),
    # norms
    "sandwich": ("sandwich_norm", "use_sandwich_norm"),
    "parallel_block": ("parallel_attn", "use_parallel_residual"),
    "new_decoder": ("new_decoder_architecture",),
    "norms_in_parallel": ("num_ln_in_parallel_attn",),
    # mixers without softmax
    "delta_key_heads": ("linear_num_key_heads",),
    "delta_value_heads": ("linear_num_value_heads",),
    "delta_key_dim": ("linear_key_head_dim",),
    "delta_value_dim": ("linear_value_head_dim",),
    "delta_kernel": ("linear_conv_kernel_dim",),
    "kda_heads": ("linear_attn_config.num_heads",),
    "kda_dim": ("linear_attn_config.head_dim",),
    "kda_kernel": ("linear_attn_config.short_conv_kernel_size",),
    "kda_full_gate": ("linear_attn_config.use_full_rank_gate",),
    "ssm_heads": ("mamba_num_heads", "mamba_n_heads"),
    "ssm_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "ssm_groups": ("n_groups", "mamba_n_groups"),
    "ssm_state": ("ssm_state_size", "mamba_d_state"),
    "ssm_kernel": ("conv_kernel", "mamba_d_conv"),
    "ssm_expand": ("expand", "mamba_expand"),
    "ssm_rank": ("mamba_dt_rank",),
    "ssm_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "ssm_proj_bias": ("mamba_proj_bias",),
    "ssm_inner_norms": ("mamba_inner_layernorms",),
}
"""Meaning of a number or switch: the keys that spell it, the first one present wins; dots reach into nested blocks."""

KIND_WORDS: dict[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "deepseek_sparse_attention": "full",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "moe": "moe",
    "mlp": "dense",
    "*": "full",
    "M": "mamba",
    "E": "moe",
    "-": "dense",
}
"""What the words and letters of a list of layers mean; a word that is not here is refused."""

REFUSED: dict[str, str] = {
    "is_encoder_decoder": "encoder-decoder models are not modelled",
    "add_cross_attention": "cross-attention is not modelled",
    "cross_attention_layers": "cross-attention layers are not modelled",
    "encoder_layers": "encoders are not modelled",
    "num_encoder_layers": "encoders are not modelled",
    "altup_num_inputs": "alternating updates of several streams are not modelled",
    "laurel_rank": "low-rank augmented residuals are not modelled",
    "hidden_size_per_layer_input": "per-layer embeddings are not modelled",
    "hc_mult": "hyper-connections are not modelled",
    "attn_res_block_size": "attention over residual blocks is not modelled",
    "o_lora_rank": "low-rank output projections are not modelled",
    "compress_ratios": "compressed attention is not modelled",
    "zero_expert_num": "zero-computation experts (and the two attentions of such a layer) are not modelled",
    "lru_width": "recurrent blocks are not modelled",
    "conv_L_cache": "short-convolution layers are not modelled",
    "mamba_d_ssm": "attention and state space side by side in one layer are not modelled",
    "num_mem_blocks": "attention blocks shared between layers are not modelled",
    "word_embed_proj_dim": "an embedding of another width than the model is not modelled",
    "use_mem_rope": "attention blocks shared between layers are not modelled",
    "use_double_wide_mlp": "layers of double width are not modelled",
    "layer_group_size": "hybrid linear attention by groups of layers is not modelled",
    "num_loops": "looped layers are not modelled",
}
"""Keys whose true (or positive) value names a structure that cannot be counted right here."""

REFUSED_FAMILIES = words(
    "bert roberta xlmroberta albert distilbert electra deberta debertav2 modernbert clip clipvisionmodel siglip vit "
    "whisper t5 mt5 umt5 bart mbart pegasus wav2vec2 rwkv rwkv5 rwkv6 rwkv7 mamba mamba2 falconmamba zamba zamba2 "
    "recurrentgemma retnet xlstm hyena longcatflash jetmoe"
)
"""Families of `model_type` that are no decoder of attention and feed-forward, or whose layers are of another make."""

SUSPECT = (
    r"(^|_|\.)(ssm|mamba\d?|rwkv|hyena|linear_(attn|attention|num|key|value|conv)|lightning|recurrent|retention|lru"
    r"|[xms]lstm|delta|gla|conv|conv1d|titans?|ttt|kda|wkv|time_mix|cross_attention|cross_attn|encoder|engram"
    r"|state_size|state_dim|mixture_of_depths)(_|$)"
)
"""A key that matches, was not used and is not harmless looks like a mixer that is not modelled: refused by its name."""

EXPERTS = r"(^|_|\.)(moe|experts?)(_|$)"
"""A key that matches and was not used, where no key gives a number of experts: refused by its name."""

SHAPED = r"^(num|n)_|_(size|dim|dims|width|rank|heads|layers|experts|freq|interval|period|pattern|types|enum|factor)$"
"""A key that matches, was not used and is not harmless may shape parameters: the user is told that it was ignored."""

HARMLESS = words(
    """
    mamba_ssm_dtype mamba_ssm_cache_dtype mamba_hidden_act use_mamba_kernels mamba_chunk_size
    encoder_no_repeat_ngram_size tie_encoder_decoder cross_attention_hidden_size type_vocab_size ep_size
    num_return_sequences num_beams num_beam_groups no_repeat_ngram_size num_logits_to_keep time_step_rank
    routed_scaling_factor partial_rotary_factor moe_router_scaling_factor qk_head_dim vocab_size_per_layer_input
    index_topk_freq index_topk_pattern mm_hidden_size chunk_size rotary_dim layernorm_linear_attention_alpha
    layernorm_linear_attention_beta rope_parameters rope_scaling quantization_config compression_config auto_map
    id2label label2id rope_local_base_freq task_specific_params generation_config pruned_heads mup_config
    """
)
"""Keys that change no parameter and no mixer although they look so."""
