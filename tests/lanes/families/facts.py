"""Sizes that all tiny models share, under the names that configs use for them.

A head of 32 can be quantized in groups of 32; a window of 8 is filled and turns in every test; two layers have one of
each kind where a model mixes kinds.
"""

from typing import Any

VOCABULARY = 97
WINDOW = 8
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 128, 4, 2, 32, 64

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0}
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "attention_bias": True,
    "mlp_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    # The older names of the same.
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": HEADS,
    "n_ctx": 512,
    "n_positions": 512,
}

# Mixtures of experts: the first layer dense where a model can have both.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}

# Attention over a latent vector (MLA).
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": HEADS,
}

# Gated delta rule.
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
