"""From a model's name to an engine that runs it: the BLAS, the model, its lane. Called once, on the model's thread."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lanes.attention import hand_written_is_faster, install
from lanes.batch import SlotCaches
from lanes.choice import choose_lane
from lanes.decoder import Decoder
from lanes.engine import MlxEngine
from lanes.forward import eager
from lanes.lane import ModelInfo
from lanes.load import LoadedModel
from lanes.serial import SoloCaches
from lanes.solo import RowMaker

logger = logging.getLogger(__name__)

LONGER_THAN_WINDOWS = 1 << 17


def build_engine(loaded: LoadedModel, max_rows: int, blas: str) -> MlxEngine:
    """Choose the lane for a loaded model and make the engine. max_rows counts for the batch lane; blas is for the log
    and for status."""
    make_row = RowMaker(loaded.model)
    use_faster_attention(loaded.model)
    choice = choose_lane(make_row)
    logger.info("%s runs in the %s lane: %s", loaded.name, choice.lane, choice.reason)
    caches: SlotCaches | SoloCaches
    if choice.lane == "batch":
        caches = SlotCaches(make_row(), max_rows)
    else:
        caches, max_rows = SoloCaches(), 1
    info = ModelInfo(
        name=loaded.name,
        model_type=str(loaded.config.get("model_type", "unknown")),
        vocab_size=vocabulary(loaded),
        context_tokens=loaded.context_tokens,
        cache_kinds=choice.cache_kinds,
        lane=choice.lane,
        lane_reason=choice.reason,
        max_rows=max_rows,
        weight_bytes=loaded.weight_bytes,
        bytes_per_token=bytes_per_token(make_row),
        dtype=loaded.dtype,
        backend=backend(),
        blas=blas,
    )
    return MlxEngine(make_row, info, Decoder(caches, partial(eager, loaded.model, caches)))


def use_faster_attention(model: Any) -> None:
    """Have decode steps take the form of attention that this device runs faster, where the model's shape is known."""
    if (shape := head_shape(model)) is None:
        return
    faster = hand_written_is_faster(*shape)
    logger.info("attention of decode steps: %s", "by hand" if faster else "MLX's fused kernel")
    if faster:
        install(model)


def head_shape(model: Any) -> tuple[int, int, int, mx.Dtype] | None:
    """Query heads, key heads, their dim and the type of the keys, of the first cache that has keys."""
    row = make_prompt_cache(model)
    model(mx.zeros((1, 2), dtype=mx.int32), cache=row)
    for cache in row:
        keys = getattr(cache, "keys", None)
        if isinstance(keys, mx.array):
            heads = getattr(model.args, "num_attention_heads", None)
            return (int(heads), keys.shape[1], keys.shape[3], keys.dtype) if heads else None
    return None


def vocabulary(loaded: LoadedModel) -> int:
    """Token ids that the model can look up: rows of its embedding, by the config's word for it."""
    config = loaded.config
    size: Any = (
        config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or loaded.tokenizer.vocab_size
    )
    return int(size)


def bytes_per_token(make_row: RowMaker) -> int:
    """What a long row's caches grow by with each token. Rings that are full and recurrent state do not grow.

    Nothing is computed: the arrays' sizes are known before their values are.
    """
    caches = make_row()
    sizes = []
    for _ in range(2):
        make_row.model(mx.zeros((1, LONGER_THAN_WINDOWS), dtype=mx.int32), cache=caches)
        sizes.append(sum(cache.nbytes for cache in caches))
    return int(sizes[1] - sizes[0]) // LONGER_THAN_WINDOWS


def backend() -> str:
    """metal, cuda or cpu: what MLX computes on."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
