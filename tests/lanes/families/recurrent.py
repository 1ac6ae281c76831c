"""Recurrent state, alone or beside attention."""

from typing import Any

from tests.lanes.families.facts import DELTA, EXPERTS, HEADS, INNER, LATENT, WINDOW
from tests.lanes.families.plain import CONFIGS as PLAIN

_BAILING = {**EXPERTS, **LATENT, "layer_group_size": 2, "group_norm_size": 2}
_CONV = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": True,
    "conv_L_cache": 3,
}
_LFM2 = {
    **_CONV,
    "block_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": INNER,
}
_KDA = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}

# Of qwen3_5 and its kin, which keep it in a part of the config; see nested.py.
QWEN3_5 = {**DELTA, "full_attention_interval": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "baichuan_m1": {"sliding_window_layers": [1], "conv_window": 2},
    "bailing_hybrid": _BAILING,
    "bailing_moe_linear": {**_BAILING, "num_key_value_heads": HEADS, "use_qk_norm": True},
    "bailing_moe_v3": {**_BAILING},
    "falcon_h1": {"mamba_d_head": 32, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_n_heads": 2},
    "granitemoehybrid": {
        **EXPERTS,
        **PLAIN["granite"],
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "jamba": {
        **EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 0,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "text_config": {
            **EXPERTS,
            **LATENT,
            "linear_attn_config": _KDA,
            "attn_res_block_size": 1,
            "mla_use_output_gate": True,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
        }
    },
    "kimi_linear": {**EXPERTS, **LATENT, "linear_attn_config": _KDA, "model_max_length": 512},
    "lfm2": _LFM2,
    "lfm2_moe": {**EXPERTS, **_CONV, "use_expert_bias": True, "num_dense_layers": 1},
    "mamba": {
        "state_size": 16,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_rank": 8,
        "intermediate_size": 128,
    },
    "mamba2": {
        "num_heads": 4,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": 8,
        "intermediate_size": 128,
    },
    "nemotron_h": {
        **EXPERTS,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_conv_bias": True,
    },
    "olmo_hybrid": {**DELTA, "linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"]},
    "plamo2": {
        "hidden_size_per_head": 32,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
    },
    "qwen3_next": {**EXPERTS, **DELTA, "full_attention_interval": 2},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
}
