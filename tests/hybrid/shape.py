"""The demonstration's hybrid: its configuration, and a model of mlx-lm's class with weights to begin training with."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3_5

# Two delta layers, then one of attention, twice. As in the models of this family each key head serves several value
# heads. 2.9 million parameters with 3,072 tokens.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 3072,
    "hidden_size": 192,
    "intermediate_size": 400,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "eos_token_id": 0,
    "bos_token_id": 0,
}


def new_model(seed: int) -> Any:
    """Projections at half of 1 / sqrt(inputs), those that write to the residual stream smaller by its depth; decays
    that forget over some ten to a thousand tokens, as Mamba 2 begins."""
    mx.random.seed(seed)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(dict(CONFIG)))
    depth = math.sqrt(2 * CONFIG["num_hidden_layers"])

    def begin(path: str, array: mx.array) -> mx.array:
        name = path.split(".")[-2] if path.endswith("weight") else path.split(".")[-1]
        if name in ("o_proj", "out_proj", "down_proj"):
            return mx.random.normal(array.shape) * (0.5 / math.sqrt(array.shape[-1]) / depth)
        if name.endswith("_proj") or name.startswith("in_proj"):
            return mx.random.normal(array.shape) * (0.5 / math.sqrt(array.shape[-1]))
        if name == "embed_tokens":
            return mx.random.normal(array.shape) * 0.05
        if name == "A_log":
            return mx.log(mx.random.uniform(1.0, 16.0, array.shape))
        if name == "dt_bias":
            steps = mx.exp(mx.random.uniform(math.log(1e-3), math.log(1e-1), array.shape))
            return steps + mx.log(-mx.expm1(-steps))
        return array

    model.update(tree_map_with_path(begin, model.parameters()))
    mx.eval(model.parameters())
    return model


def num_parameters(model: Any) -> int:
    return sum(array.size for _, array in tree_flatten(model.parameters()))
