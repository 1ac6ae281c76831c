"""Mixtures of experts behind attention over every token, plain or latent."""

from typing import Any

from tests.lanes.families.facts import EXPERTS, HEADS, HIDDEN, INNER, KV_HEADS, LATENT, YARN
from tests.lanes.families.plain import CONFIGS as PLAIN

_DEEPSEEK = {**EXPERTS, **LATENT}
_DEEPSEEK_YARN = {**_DEEPSEEK, "rope_scaling": {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5}}
# Fewer tokens than the rows get: so some are left out.
_INDEX = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
_LONGCAT = {
    **LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": INNER,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": EXPERTS,
    "bailing_moe": {**EXPERTS, "use_qk_norm": True, "use_qkv_bias": True},
    "dbrx": {
        "d_model": HIDDEN,
        "n_layers": 2,
        "n_heads": HEADS,
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": EXPERTS,
    "deepseek_v2": _DEEPSEEK_YARN,
    "deepseek_v3": _DEEPSEEK_YARN,
    "deepseek_v32": {**_DEEPSEEK, **_INDEX},
    "dots1": EXPERTS,
    "ernie4_5_moe": {
        **EXPERTS,
        "moe_num_experts": 4,
        "moe_layer_start_index": 1,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "glm4_moe": {**EXPERTS, "rope_scaling": None, "use_qk_norm": True},
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": {**_DEEPSEEK, **_INDEX, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "granitemoe": {**EXPERTS, **PLAIN["granite"]},
    "hunyuan": {
        **EXPERTS,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 4, "emb_split_num": 2},
    "minimax": {**EXPERTS, "rotary_dim": 16},
    "minimax_m3_vl": {
        "text_config": {
            **EXPERTS,
            "dense_intermediate_size": INNER,
            "moe_layer_freq": [0, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": KV_HEADS,
                "sparse_index_dim": 32,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1],
            },
        }
    },
    "mistral4": {**_DEEPSEEK, "rope_parameters": {**YARN, "type": "yarn", "llama_4_scaling_beta": 0.1}},
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
    "phimoe": {
        **EXPERTS,
        "rope_scaling": {
            "long_factor": [1.0 + i for i in range(16)],
            "short_factor": [1.0] * 16,
            "long_mscale": 1.2,
            "short_mscale": 1.1,
        },
        "original_max_position_embeddings": 16,
    },
    "phixtral": {**EXPERTS, "num_vocab": 97, "model_dim": HIDDEN, "num_heads": HEADS, "rotary_dim": 16},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "solar_open": EXPERTS,
}
