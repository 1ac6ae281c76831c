"""The models that benchmarks run: the real SmolLM2 on the CPU, random weights of a real model's shape on a GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3

from lanes.tuning import backend


def qwen3_8b_shape(num_layers: int = 36, dtype: mx.Dtype = mx.bfloat16, vocabulary: int = 151936) -> Any:
    """Qwen3-8B's shape, weights random: right for timing, and 16.4 GB if nothing is made smaller."""
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=4096,
        num_hidden_layers=num_layers,
        intermediate_size=12288,
        num_attention_heads=32,
        rms_norm_eps=1e-6,
        vocab_size=vocabulary,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        rope_theta=1e6,
        head_dim=128,
        tie_word_embeddings=False,
    )
    model = qwen3.Model(args)
    model.set_dtype(dtype)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def smollm2() -> Any:
    """SmolLM2-135M-Instruct of the demo extra, as the daemon loads it on this machine."""
    from lanes.load import load

    return load("demo").model


def default_model() -> tuple[str, Any]:
    """What suits the device, and what it is called."""
    if backend() == "cpu":
        return "SmolLM2-135M float32", smollm2()
    return "Qwen3-8B's shape bfloat16", qwen3_8b_shape()


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that every step reads: all but the embedding's rows, unless they are the output's too."""
    from mlx.utils import tree_flatten

    tied = getattr(model.args, "tie_word_embeddings", False)
    return sum(array.nbytes for name, array in tree_flatten(model.parameters()) if tied or "embed_tokens" not in name)
