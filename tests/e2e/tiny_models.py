"""Models of a second's loading, in folders: random weights, the tokenizer of the hybrid that comes with laned.

`rings` is Gemma 3's pattern of sliding windows, `columns` has keys and values alone. They answer nonsense, each prompt
its own, which is all that a test of what is remembered wants of an answer.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama

from lanes.sources import HYBRID_FOLDER

VOCABULARY = 3072
WINDOW_TOKENS = 32
CONTEXT_TOKENS = 8192

CONFIGS: dict[str, dict[str, Any]] = {
    "columns": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": 0,
    },
    "rings": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "sliding_window": WINDOW_TOKENS,
        "sliding_window_pattern": 3,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": 0,
    },
}
FAMILIES = {"columns": llama, "rings": gemma3_text}


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="laned-tiny-")  # kept by the cache, removed at exit


@cache
def tiny_model(name: str, seed: int = 7) -> str:
    """What --model takes for it. Another seed is the same model with other weights."""
    folder = Path(_folder().name) / f"{name}-{seed}"
    folder.mkdir()
    family: Any = FAMILIES[name]
    model = family.Model(family.ModelArgs.from_dict(CONFIGS[name]))
    # Wide enough that an answer depends on all that it was asked.
    weights = {}
    for number, (key, value) in enumerate(tree_flatten(model.parameters())):
        scale = 0.25 if value.ndim > 1 else 0.1
        own = mx.random.normal(value.shape, key=mx.random.key(seed * 1000 + number))
        weights[key] = own * scale + (value if value.ndim == 1 else 0.0)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HYBRID_FOLDER / file, folder)
    return str(folder)
