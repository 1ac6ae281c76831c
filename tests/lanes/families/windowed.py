"""Attention that sees a window in some layers: a ring there, every token elsewhere."""

from typing import Any

from tests.lanes.families.facts import EXPERTS, HEAD_DIM, HEADS, INNER, KV_HEADS, ROPE, SLIDING_THEN_FULL, WINDOW, YARN

_MIXED = {"layer_types": SLIDING_THEN_FULL}
_EVERY_SECOND = {"sliding_window_pattern": 2}
_ROPE_BY_TYPE = {
    "sliding_attention": {**ROPE, "partial_rotary_factor": 0.5},
    "full_attention": YARN,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 128,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
    },
    "afmoe": {**EXPERTS, **_MIXED, "num_dense_layers": 1},
    "cohere2": _EVERY_SECOND,
    "deepseek_v41": {
        **EXPERTS,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": (0, 4, 4),
        "kv_source_layer_ids": (1,),
        "index_source_layer_ids": (1,),
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "scoring_func": "sqrtsoftplus",
        "rms_norm_eps": 1e-6,
    },
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {**EXPERTS, **_MIXED, "is_moe_layer": [False, True]},
    "gear": {
        "num_hidden_layers": 3,
        "layer_types": ["conv_mixer", *SLIDING_THEN_FULL],
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3_text": _EVERY_SECOND,
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 97,
        "sliding_window_pattern": 2,
    },
    "gemma4_text experts": {
        "num_kv_shared_layers": 0,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "sliding_window_pattern": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {"layer_types": SLIDING_THEN_FULL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "laguna": {**EXPERTS, **_MIXED, "rope_parameters": _ROPE_BY_TYPE, "num_attention_heads_per_layer": [HEADS, 2]},
    "llama window": _MIXED,
    "llama4": {
        "text_config": {
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": INNER,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "mellum": {**EXPERTS, **_MIXED, "rope_parameters": _ROPE_BY_TYPE},
    "mimo_v2_flash": {
        **EXPERTS,
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": 1,
        "v_head_dim": HEAD_DIM,
        "swa_head_dim": 2 * HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
    },
    "ministral3": {
        **_MIXED,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
    },
    "muse_glimmer": _MIXED,
    "olmo3": _MIXED,
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "spark2_5": {**_MIXED, "rope_parameters": _ROPE_BY_TYPE},
    "step3p5": {
        **_MIXED,
        "num_attention_groups": KV_HEADS,
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "partial_rotary_factors": [0.5, 1.0],
        "rope_scaling": YARN,
        "yarn_only_types": ["full_attention"],
    },
}
