"""The models that benchmarks run: the real SmolLM2 on the CPU, random weights of a real model's shape on a GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma3_text, llama, qwen3, qwen3_5

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


def model_for_long_prompts() -> tuple[str, Any]:
    """A shape whose prompts of 14,000 tokens are processed within a minute, with random weights. On a CPU it has 4 of
    SmolLM2's 30 layers: what a token costs and what is kept of it shrink alike."""
    if backend() != "cpu":
        return "Qwen3-8B's shape bfloat16", qwen3_8b_shape()
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=576,
        num_hidden_layers=4,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    return f"{args.num_hidden_layers} layers of SmolLM2's shape float32", _random(llama.Model(args))


def smollm2() -> Any:
    """SmolLM2-135M-Instruct of the demo extra, as the daemon loads it on this machine."""
    from lanes.load import load

    return load("demo").model


def gemma3_shape() -> tuple[str, Any]:
    """A model with rings: Gemma 3's pattern of five layers with a window to one without, 4B on a GPU, 270M on a CPU."""
    small = backend() == "cpu"
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=640 if small else 2560,
        num_hidden_layers=18 if small else 34,
        intermediate_size=2048 if small else 10240,
        num_attention_heads=4 if small else 8,
        num_key_value_heads=1 if small else 4,
        head_dim=256,
        vocab_size=32768 if small else 262144,
        sliding_window=512 if small else 1024,
    )
    return f"Gemma 3's shape, {'270M' if small else '4B'}", _random(gemma3_text.Model(args))


def qwen3_5_shape() -> tuple[str, Any]:
    """A hybrid: three layers of gated delta to one of attention, 9B on a GPU, 0.1B on a CPU."""
    small = backend() == "cpu"
    text = {
        "model_type": "qwen3_5",
        "hidden_size": 512 if small else 4096,
        "num_hidden_layers": 12 if small else 32,
        "intermediate_size": 1536 if small else 12288,
        "num_attention_heads": 8 if small else 16,
        "num_key_value_heads": 2 if small else 4,
        "head_dim": 64 if small else 256,
        "vocab_size": 32768 if small else 248320,
        "linear_num_value_heads": 8 if small else 32,
        "linear_num_key_heads": 4 if small else 16,
        "linear_key_head_dim": 64 if small else 128,
        "linear_value_head_dim": 64 if small else 128,
        "tie_word_embeddings": small,
    }
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))
    return f"Qwen3.5's shape, {'0.1B' if small else '9B'}", _random(model)


def _random(model: Any) -> Any:
    model.set_dtype(mx.float32 if backend() == "cpu" else mx.bfloat16)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def default_model() -> tuple[str, Any]:
    """What suits the device, and what it is called."""
    if backend() == "cpu":
        return "SmolLM2-135M float32", smollm2()
    return "Qwen3-8B's shape bfloat16", qwen3_8b_shape()


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that every step reads: all but the embedding's rows, unless they are the output's too."""
    from mlx.utils import tree_flatten

    args = getattr(model.args, "text_config", None) or vars(model.args)
    tied = args.get("tie_word_embeddings", not hasattr(model, "lm_head"))
    return sum(array.nbytes for name, array in tree_flatten(model.parameters()) if tied or "embed_tokens" not in name)
