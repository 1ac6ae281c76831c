"""Small random models of mlx-lm, and the GGUF files that llama.cpp's converter would make of them."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from tests.lanes.gguf import writer

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "head_dim": "rope.dimension_count",
}
RENAMED = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
]
GEMMA = {
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 5,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
}
GEMMA_KEYS = {
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}
GEMMA_RENAMED = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    *RENAMED,
]
# A vocabulary of every byte and some words, enough for a tokenizer.
LETTERS = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
PIECES = [*LETTERS, "he", "ll", "hell", "hello", "<|end|>"]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": [1] * (len(PIECES) - 1) + [3],
    "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
    "tokenizer.ggml.eos_token_id": len(PIECES) - 1,
}

Arrays = dict[str, npt.NDArray[np.float32]]


def random_model(model_type: str, **changed: Any) -> tuple[Any, dict[str, Any]]:
    """A model of this type with random parameters, norms among them, and its configuration."""
    is_gemma = model_type == "gemma3_text"
    config = {"model_type": model_type, **SIZES, **(GEMMA if is_gemma else {}), **changed}
    family = import_module(f"mlx_lm.models.{model_type}")
    model = family.Model(family.ModelArgs.from_dict(config))
    if is_gemma and config["tie_word_embeddings"]:
        model.sanitize({})
    mx.random.seed(len(str(config)))
    parameters = [(name, mx.random.normal(array.shape) * 0.1) for name, array in tree_flatten(model.parameters())]
    # A norm's weight is about 1; Gemma's norms add that themselves.
    model.load_weights([(name, array + ("norm" in name and not is_gemma)) for name, array in parameters])
    mx.eval(model.parameters())
    return model, config


def pairs_side_by_side(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order of the rows of a rotated projection of the Llama family."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(model: Any, config: Mapping[str, Any]) -> Arrays:
    """The model's tensors under llama.cpp's names and in its order."""
    tensors: Arrays = {}
    for name, array in tree_flatten(model.parameters()):
        rows = np.array(array)
        if config["model_type"] == "llama" and ".q_proj." in name:
            rows = pairs_side_by_side(rows, config["num_attention_heads"])
        if config["model_type"] == "llama" and ".k_proj." in name:
            rows = pairs_side_by_side(rows, config["num_key_value_heads"])
        is_gemma = config["model_type"] == "gemma3_text"
        if is_gemma and name.endswith("norm.weight"):
            rows = rows + np.float32(1)
        for ours, theirs in GEMMA_RENAMED if is_gemma else RENAMED:
            name = name.replace(ours, theirs)
        tensors[name] = rows
    return tensors


def metadata_of(config: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """The metadata of a file with this model. changed: keys after the architecture, dots as double underscores; None
    takes a key away."""
    architecture = config["model_type"].removesuffix("_text")
    keys = {**KEYS, **(GEMMA_KEYS if architecture == "gemma3" else {})}
    found = {f"{architecture}.{key}": config[ours] for ours, key in keys.items()}
    found |= {f"{architecture}.attention.{side}_length": config["head_dim"] for side in ("key", "value")}
    found |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in changed.items()}
    whole = {"general.architecture": architecture, "general.name": "Tiny", **VOCABULARY, **found}
    return {key: value for key, value in whole.items() if value is not None}


def write_model(path: Path, model: Any, config: Mapping[str, Any], kind: int = writer.F32, **changed: Any) -> Path:
    return writer.write(path, metadata_of(config, **changed), tensors_of(model, config), kind)


def logits(model: Any) -> npt.NDArray[np.float32]:
    """Of a fixed short text, long enough for a wrong rotation to show."""
    tokens = mx.array([[(7 * at + 3) % SIZES["vocab_size"] for at in range(40)]])
    return np.array(model(tokens).astype(mx.float32))
