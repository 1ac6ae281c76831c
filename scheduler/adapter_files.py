"""An adapter's folder, as mlx-lm's tuner writes it:

    adapter_config.json     fine_tune_type: "lora"; lora_parameters: {rank, scale, ...}
    adapters.safetensors    L.lora_a [inputs, rank] and L.lora_b [rank, outputs] of each adapted layer L

Which layers those are, the tensors say; the rest of the config is of interest when one trains.
"""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

from lanes.lane import Adapter, AdapterError

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
# As mlx-lm's type and its switch have them, and what they are.
OTHER_TYPES = {
    "dora": "is a DoRA, which changes the layers' own weights for each row",
    "full": "is a full fine-tune, a model of its own: serve it with --model",
}


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder, its files read whole. Raises AdapterError."""
    config = _config(_read(folder / CONFIG))
    weights = _read(folder / WEIGHTS)
    parameters = config.get("lora_parameters")
    parameters = parameters if type(parameters) is dict else {}
    rank: Any = parameters.get("rank")
    scale: Any = parameters.get("scale")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{CONFIG} has no lora_parameters.rank of 1 or more")
    if type(scale) not in (int, float) or not math.isfinite(scale):
        raise AdapterError(f"{CONFIG} has no lora_parameters.scale, a number")
    digest = sha256(f"{rank} {float(scale)!r} ".encode() + weights).hexdigest()
    return Adapter(digest, rank, float(scale), weights)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror or error}") from error


def _config(content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except ValueError as error:
        raise AdapterError(f"{CONFIG} is no JSON: {error}") from error
    if type(config) is not dict:
        raise AdapterError(f"{CONFIG} is no JSON object")
    if "peft_type" in config:
        raise AdapterError("it is in the format of PEFT, not of mlx-lm")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise AdapterError(f"it {OTHER_TYPES.get(kind, f'has the fine_tune_type {kind!r}')}; lora is served")
    return config
