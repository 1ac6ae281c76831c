"""Adapters with random weights in folders, by mlx-lm's own tuner, and the same models with them, by its own loader."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from lanes.lane import Adapter
from scheduler.adapter_files import CONFIG, WEIGHTS, read_adapter

ATTENTION = ["self_attn.q_proj", "self_attn.v_proj"]


def write_adapter(
    folder: Path,
    make_model: Callable[[], Any],
    seed: int,
    *,
    rank: int = 4,
    scale: float = 3.0,
    num_layers: int = 16,
    keys: list[str] | None = None,
    size: float = 0.3,
    use_dora: bool = False,
) -> Path:
    """keys None: all linear layers, as mlx-lm has it. size: the deviation of A's and B's numbers."""
    model = make_model()
    model.freeze()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.1}
    if keys is not None:
        parameters["keys"] = keys
    linear_to_lora_layers(model, num_layers, parameters, use_dora=use_dora)
    trained = dict(tree_flatten(model.trainable_parameters()))
    drawn = {
        name: size * mx.random.normal(array.shape, key=mx.random.key(1000 * seed + number))
        for number, (name, array) in enumerate(sorted(trained.items()))
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / WEIGHTS), drawn)
    config = {
        "fine_tune_type": "dora" if use_dora else "lora",
        "num_layers": num_layers,
        "lora_parameters": parameters,
    }
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def adapter_of(folder: Path) -> Adapter:
    return read_adapter(folder)


def adapted(model: Any, folder: Path | None) -> Any:
    """The model with the adapter of a folder, as mlx-lm has it."""
    model = model if folder is None else load_adapters(model, str(folder))
    model.eval()
    return model
