"""Attention over every token, a dense layer behind it."""

from typing import Any

from tests.lanes.families.facts import DYNAMIC, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LATENT, LLAMA3, YARN

_GRANITE = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
_NAS_ATTENTION = {"n_heads_in_group": 2}
_NAS_FFN = {"ffn_mult": 0.5}

CONFIGS: dict[str, dict[str, Any]] = {
    "apertus": {"post_norm": True, "qk_norm": True},
    "bitnet": {},
    "cohere": {"use_qk_norm": True},
    "ernie4_5": {},
    "exaone": {},
    "gemma": {},
    "gemma2": {},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {"n_inner": INNER},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": {"rotary_dim": 16},
    "granite": _GRANITE,
    "helium": {},
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {},
    "internlm2 dynamic": {"rope_scaling": DYNAMIC, "max_position_embeddings": 16},
    "internlm3": {"max_position_embeddings": 16},
    "lille-130m": {"block_size": 512, "n_kv_heads": KV_HEADS},
    "llama": {},
    "llama dynamic": {"rope_scaling": DYNAMIC, "max_position_embeddings": 16},
    "llama llama3": {"rope_scaling": LLAMA3},
    "llama4_text": {"intermediate_size_mlp": INNER, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "mimo": {"rope_scaling": None},
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 12},
    "minicpm3": {
        **LATENT,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 12,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0 + i for i in range(16)],
            "short_factor": [1.0] * 16,
            "original_max_position_embeddings": 16,
        },
    },
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 4,
        "block_configs": [
            {"attention": _NAS_ATTENTION, "ffn": _NAS_FFN},
            {"attention": {"no_op": True}, "ffn": _NAS_FFN},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": _NAS_ATTENTION, "ffn": {"replace_with_linear": True}},
        ],
    },
    "olmo": {"d_model": HIDDEN, "n_layers": 2, "mlp_hidden_size": INNER, "n_heads": HEADS, "embedding_size": 97},
    "olmo2": {},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": HIDDEN,
        "ffn_dim_divisor": 32,
        "num_query_heads": [HEADS, HEADS],
        "num_kv_heads": [KV_HEADS, 1],
        "ffn_multipliers": [0.5, 1.0],
    },
    "phi": {},
    "phi3": {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0 + i for i in range(8)],
            "short_factor": [1.0] * 8,
        },
        "original_max_position_embeddings": 16,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": INNER,
        "gegelu_limit": 20.0,
        # Its logits of some ids are always switched off, so it has to have them.
        "vocab_size": 100352,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": HEAD_DIM},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {},
    "talkie": {},
    "telechat3": {"rope_scaling": {**YARN, "rope_type": "telechat3-yarn"}},
    "youtu_llm": LATENT,
}
