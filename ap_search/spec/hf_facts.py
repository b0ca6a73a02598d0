"""Facts of Hugging Face architectures that no key of their files states.

A fact is keyed by the family of `model_type` (an architecture, shared by many models), because it is written in that
architecture's code and not in its files; never by a model's name. Source, unless a line says otherwise:
`configuration_*.py` and `modeling_*.py` of huggingface/transformers (4.57 and earlier), per family; for families
outside it, the `modeling_*.py` that their authors publish beside the weights. A family is spelled without underscores,
dashes, dots and a trailing `text`.
"""

from ap_search.spec.hf_keys import words

FACTS: dict[str, frozenset[str]] = {
    # tie_word_embeddings is not written to a file where it equals the class's default: tied there when absent
    "tied": words(
        "gemma gemma2 gemma3 gemma3n gemma4 gpt2 gptbigcode gptneo bloom falcon opt cohere cohere2 starcoder2 mpt "
        "ernie45 ernie45moe smollm3 phi3small minicpm minicpm3 lfm2 lfm2moe grok1 cohere2moe"
    ),
    "untied": words(
        "llama llama4 mistral mistral3 ministral mixtral qwen qwen2 qwen2moe qwen2vl qwen25vl qwen3 qwen3moe "
        "qwen3next qwen35 qwen35moe qwen3vl qwen3vlmoe deepseek deepseekv2 deepseekv3 deepseekv32 kimik2 glm glm4 "
        "glm4moe glmmoedsa chatglm gptneox gptj codegen phi phi3 phi3v phimoe olmo olmo2 olmo3 olmoe flexolmo "
        "dbrx jamba granite granitemoe granitemoehybrid bamba stablelm baichuan internlm internlm2 internlm3 "
        "xverse exaone exaone4 seedoss gptoss minimax minimaxm1 minimaxm2 minimaxm3 mimo mimov2flash nemotron "
        "nemotronh nemotronnas arctic dots1 hunyuanv1dense hunyuanv1moe hunyuan bailingmoe bailingmoev2 "
        "kimilinear kimivl afmoe step3 step3p5 step3p7 multimodality deepseekvlv2 llava helium granitemoeshared "
        "exaonemoe arcee"
    ),
    # LayerNorm with weight and bias; everything else is RMSNorm
    "layer_norm": words(
        "gpt2 gptbigcode gptneo gptj gptneox codegen bloom falcon opt phi phi3small phimoe starcoder2 stablelm "
        "nemotron mpt persimmon"
    ),
    "norm_without_weight": words("olmo"),
    "two_matrices": words(
        "gpt2 gptbigcode gptneo gptj gptneox codegen bloom falcon opt phi starcoder2 nemotron mpt persimmon "
        "nemotronh apertus"
    ),
    # gated although the activation is a plain GELU
    "three_matrices": words("gemma gemma2 gemma3 gemma4 grok1 phi3small"),
    "bias_on_all": words("gpt2 gptbigcode bloom phi phi3small"),
    "bias_by_default": words("opt starcoder2"),
    "ffn_bias": words("gptj codegen gptneox gptneo"),
    "ffn_without_bias": words("internlm internlm2 ernie45 ernie45moe"),
    "qkv_bias": words("qwen qwen2 qwen2moe qwen2vl qwen25vl"),
    "attention_bias": words("gptneox gptoss"),
    # `attention_bias` means q, k and v alone
    "out_without_bias": words("glm glm4 glm4moe mimo qwen2 qwen2moe qwen3next chatglm"),
    "qk_norm": words(
        "qwen3 qwen3moe qwen3next qwen35 qwen35moe qwen3vl qwen3vlmoe gemma3 gemma4 dots1 exaone4 olmoe olmo2 "
        "olmo3 flexolmo afmoe apertus exaonemoe"
    ),
    "qk_norm_of_width": words("olmoe olmo2 olmo3 flexolmo cohere stablelm minimaxm2"),
    # the switch turns on a norm that has no weight
    "qk_norm_without_weight": words("llama4"),
    "output_gate": words("qwen3next qwen35 qwen35moe afmoe"),
    "attention_sink": words("gptoss"),
    "expert_bias": words("gptoss"),
    "router_bias": words("gptoss"),
    "score_bias": words("dots1 glm4moe glmmoedsa afmoe"),
    # the width of an expert is a key of its own, never the dense feed-forward's
    "experts_of_own_width": words("qwen2moe qwen3moe qwen3next qwen35moe deepseek deepseekv2 deepseekv3 glm4moe"),
    # a shared expert as wide as a routed one that no key names
    "shared_expert": words("llama4"),
    # a dense feed-forward of the hidden size beside the experts
    "residual_ffn": words("arctic"),
    # the key holds gate and up together
    "width_of_gate_and_up": words("qwen"),
    "multi_query": words("gptbigcode"),
    "one_norm_if_parallel": words("falcon stablelm"),
    "parallel_by_default": words("falcon"),
    "norms_around_experts": words("gemma4"),
    "two_extra_positions": words("opt"),
    "learned_positions": words("gpt2 gptbigcode gptneo opt"),
    "embedding_norm": words("bloom"),
    "head_bias": words("gptj codegen phi"),
    "window_on_even_layers": words("gemma2 gptoss"),
    "delta_net": words("qwen3next qwen35 qwen35moe"),
    "lightning": words("minimax minimaxm1 minimaxtext01"),
    "hybrid": words("jamba bamba nemotronh granitemoehybrid qwen3next qwen35 qwen35moe minimax minimaxm1 kimilinear"),
    "inner_ssm_norms": words("jamba"),
    "layer_is_mixer_or_ffn": words("nemotronh"),
}
"""Facts by family of `model_type`."""

NUM_NORMS: dict[str, int] = {
    "gemma2": 4,
    "gemma3": 4,
    "gemma4": 4,
    "glm4": 4,
    "grok1": 4,
    "afmoe": 4,
    "arctic": 3,
    "cohere": 1,
    "cohere2": 1,
    "cohere2moe": 1,
    "phi": 1,
    "gptj": 1,
    "codegen": 1,
}
"""Norms of the model's width per layer where they are not two; gemma4 has three more beside its experts."""

DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_pattern": 6},
    "gemma2": {"head_dim": 256},
    "gemma": {"head_dim": 256},
    "cohere2": {"sliding_pattern": 4},
    "cohere2moe": {"sliding_pattern": 4},
    "qwen3next": {"full_interval": 4, "head_dim": 256},
    "qwen35": {"full_interval": 4, "head_dim": 256},
    "qwen35moe": {"full_interval": 4, "head_dim": 256},
    "qwen3": {"head_dim": 128},
    "qwen3moe": {"moe_step": 1},
    "glm4moe": {"head_dim": 128, "first_dense": 1},
    "jamba": {
        "attn_period": 8,
        "attn_offset": 4,
        "moe_period": 2,
        "moe_offset": 1,
        "ssm_state": 16,
        "ssm_kernel": 4,
        "ssm_expand": 2,
    },
    "arctic": {"moe_frequency": 2},
    "llama4": {"nope_interval": 4, "moe_step": 1},
    "dbrx": {"ffn_width": 3584},
    "ernie45moe": {"moe_start": 1, "moe_interval": 1},
}
"""Class defaults that files of a family leave out, by meaning."""

FAMILY_ALIASES: dict[str, str] = {
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "qwen3omnimoe": "qwen3moe",
    "qwen25omni": "qwen25vl",
    "minimaxtext01": "minimaxm1",
    "decilm": "nemotronnas",
    "grok": "grok1",
    "phi3v": "phi3",
    "glm4v": "glm4",
    "glm4vmoe": "glm4moe",
}
"""Families that share another's facts."""
