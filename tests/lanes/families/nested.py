"""Models whose language part is another family's, or whose sizes are in a part of the config."""

from typing import Any

from tests.lanes.families.experts import CONFIGS as EXPERT
from tests.lanes.families.facts import EXPERTS, SLIDING_THEN_FULL, VOCABULARY
from tests.lanes.families.plain import CONFIGS as PLAIN
from tests.lanes.families.recurrent import CONFIGS as RECURRENT
from tests.lanes.families.recurrent import QWEN3_5
from tests.lanes.families.windowed import CONFIGS as WINDOWED


def _text(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": {**config, **more}}


# 2-bit weights, some with their inputs rotated in blocks of 512.
_HADAMARD = {
    "schema_version": 2,
    "tensor_namespace": "mlx-vlm-qwen3_5",
    "gdn_activation_layout": "grouped",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [
        {"path": path, "embedding": embedding, "dtype": "float16", "block": block}
        for path, embedding, block in (
            ("model.embed_tokens", True, 0),
            ("model.layers.0.mlp.up_proj", False, 0),
            ("model.layers.0.mlp.down_proj", False, 512),
            ("model.layers.1.self_attn.q_proj", False, 0),
        )
    ],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": _text(WINDOWED["gemma3_text"]),
    "gemma3n": _text(
        {},
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=SLIDING_THEN_FULL * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        activation_sparsity_pattern=[0.95, 0.0, 0.95, 0.0],
        altup_num_inputs=3,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
        rope_local_base_freq=10000.0,
        final_logit_softcapping=30.0,
    ),
    "gemma4": _text(WINDOWED["gemma4_text"]),
    "kimi_k25": _text(EXPERT["deepseek_v3"]),
    "kimi_vl": _text(EXPERT["deepseek_v3"]),
    "lfm2-vl": _text(RECURRENT["lfm2"]),
    "mistral3": _text(PLAIN["llama"]),
    "mistral3 ministral3": _text(WINDOWED["ministral3"], model_type="ministral3"),
    "mistral3 mistral4": _text(EXPERT["mistral4"], model_type="mistral4"),
    "muse_spark": _text(
        EXPERTS,
        num_shared_experts=0,
        post_norm_eps=1e-6,
        rope_parameters={"rope_theta": 10000.0},
        layer_rope_theta=[10000.0, 0],
        layer_types=SLIDING_THEN_FULL,
        final_logit_softcapping=20.0,
        output_multiplier=0.2,
        moe_hidden_size=64,
    ),
    "pixtral": _text(PLAIN["llama"]),
    "prism_hadamard_qwen35": {**_text(QWEN3_5, intermediate_size=512, attention_bias=False), **_HADAMARD},
    "qwen2_vl": _text(PLAIN["qwen2"]),
    "qwen3_5": _text(QWEN3_5),
    "qwen3_5_moe": _text(QWEN3_5, **EXPERTS),
    "qwen3_vl": _text(PLAIN["qwen3"]),
    "qwen3_vl_moe": _text(EXPERT["qwen3_moe"]),
}
