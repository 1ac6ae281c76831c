"""Tiny models with random weights, of mlx-lm's own classes: for each kind of cache, and each kernel that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import falcon_h1, gemma3_text, gpt_oss, lfm2, llama, qwen3_next

VOCABULARY = 97
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_CONV: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"],
    "conv_bias": True,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 64,
}
_MAMBA: dict[str, Any] = {"mamba_d_head": 32, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_n_heads": 2}


@dataclass(frozen=True, slots=True)
class Tiny:
    """kinds: the caches it has, in words. quantizable: whether its attention takes quantized keys and values."""

    family: str
    kinds: str
    make: Callable[[], Any]
    quantizable: bool = False


def _maker(module: Any, **config: Any) -> Callable[[], Any]:
    def make() -> Any:
        name = module.__name__.rpartition(".")[2]
        model = module.Model(module.ModelArgs.from_dict({"model_type": name, **_COMMON, **config}))
        model.eval()
        randomize(model)
        return model

    return make


TINY = (
    Tiny("llama", "kv", _maker(llama), quantizable=True),
    Tiny("gemma3_text", "rotating and kv", _maker(gemma3_text, sliding_window_pattern=2), quantizable=True),
    Tiny(
        "gpt_oss",
        "rotating and kv, attention sinks",
        _maker(gpt_oss, **_EXPERTS, layer_types=["sliding_attention", "full_attention"]),
    ),
    Tiny("lfm2", "convolution and kv", _maker(lfm2, **_CONV)),
    Tiny("qwen3_next", "gated delta and kv, experts", _maker(qwen3_next, **_EXPERTS, **_DELTA)),
    Tiny("falcon_h1", "mamba2 beside kv", _maker(falcon_h1, **_MAMBA)),
)


def randomize(model: Any) -> None:
    """Give every parameter a random part, seeded, the same in every process.

    Matrices get outputs about as large as their inputs: with smaller ones attention looks at all tokens alike, and a
    wrong position is not seen in the logits.
    """
    parameters = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(7), len(parameters))
    model.update(tree_unflatten([(name, _random(p, key)) for (name, p), key in zip(parameters, keys, strict=True)]))
    mx.eval(model.parameters())


def _random(parameter: mx.array, key: mx.array) -> mx.array:
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return mx.random.randint(0, 1 << 31, parameter.shape, parameter.dtype, key=key)
    noise = mx.random.normal(parameter.shape, key=key)
    if parameter.ndim < 2:
        new = parameter + 0.1 * noise
    else:
        inputs = parameter.shape[-1] if parameter.shape[-1] > 1 else parameter.shape[-2]
        new = noise / math.sqrt(inputs)
    return new.astype(parameter.dtype)
