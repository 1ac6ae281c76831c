"""From a loaded model to an engine that runs it: its forms on this device, its caches, its lane."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from lanes.batch import SlotCaches
from lanes.choice import choose_lane
from lanes.decoder import Decoder, Forward
from lanes.engine import MlxEngine
from lanes.forward import CompiledForward, eager
from lanes.geometry import RowGeometry
from lanes.lane import LaneSettings, ModelInfo
from lanes.load import LoadedModel
from lanes.machine import memory_bytes
from lanes.rows import rows_like
from lanes.rows.columns import ColumnRows
from lanes.serial import SoloCaches
from lanes.sharing import shared_prompt_tokens
from lanes.solo import RowMaker
from lanes.tuning import backend, tune

logger = logging.getLogger(__name__)


def build_engine(loaded: LoadedModel, settings: LaneSettings, blas: str) -> MlxEngine:
    """Tune a loaded model, choose its lane and make the engine. blas is what status tells of it.

    Raises CannotQuantize where settings.kv_bits asks for what the model's attention cannot do.
    """
    model = loaded.model
    make_row = RowMaker(model, settings.kv_bits, settings.kv_group_size)
    tuning = tune(model, settings.compile)
    choice = choose_lane(make_row)
    logger.info("%s runs in the %s lane: %s; %s", loaded.name, choice.lane, choice.reason, tuning)
    if choice.lane == "batch":
        batch = SlotCaches(make_row(), settings.max_rows, tuning.columns_per_call)
        forward: Forward = CompiledForward(model, batch) if tuning.compiled else partial(eager, model, batch)
        decoder = Decoder(batch, forward)
    else:
        solo = SoloCaches()
        decoder = Decoder(solo, partial(eager, model, solo))
    info = ModelInfo(
        name=loaded.name,
        model_type=str(loaded.config.get("model_type", "unknown")),
        vocab_size=vocabulary(loaded),
        context_tokens=loaded.context_tokens,
        cache_kinds=choice.cache_kinds,
        lane=choice.lane,
        lane_reason=choice.reason,
        max_rows=settings.max_rows if choice.lane == "batch" else 1,
        weight_bytes=loaded.weight_bytes,
        memory_bytes=device_memory_bytes(),
        geometry=geometry_of(make_row) if choice.lane == "batch" else None,
        shared_prompt_tokens=shared_prompt_tokens(make_row) if choice.lane == "batch" else 0,
        dtype=loaded.dtype,
        backend=backend(),
        blas=blas,
    )
    return MlxEngine(make_row, info, decoder)


def vocabulary(loaded: LoadedModel) -> int:
    """Token ids that the model can look up: rows of its embedding, by the config's word for it."""
    config = loaded.config
    size: Any = (
        config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or loaded.tokenizer.vocab_size
    )
    return int(size)


def geometry_of(make_row: RowMaker) -> RowGeometry:
    """Sizes of the caches of a row whose kinds are all known. Nothing is computed: shapes are known before values."""
    row = make_row()
    make_row.model(mx.zeros((1, 2), dtype=mx.int32), cache=row)
    state_bytes = column_bytes = 0
    rings: Counter[int] = Counter()
    for cache in _members(row):
        rows = rows_like(cache)
        if isinstance(rows, ColumnRows):
            bytes_of_column = sum(part[:, :, :1].nbytes for _, parts in rows.solo_parts(cache, 2) for part in parts)
            if (ring := rows.held_columns(1 << 40)) < 1 << 40:
                rings[ring] += bytes_of_column
            else:
                column_bytes += bytes_of_column
        else:
            state_bytes += cache.nbytes
    return RowGeometry(state_bytes, column_bytes, tuple(sorted(rings.items())))


def _members(row: Iterable[Any]) -> Iterator[Any]:
    for cache in row:
        yield from _members(cache.caches) if isinstance(cache, CacheList) else (cache,)


def device_memory_bytes() -> int:
    """What the device has for weights and caches together."""
    info = mx.device_info()
    if backend() == "metal":
        return int(info["max_recommended_working_set_size"])
    if backend() == "cuda":
        return int(info.get("total_memory", mx.get_memory_limit()))
    return memory_bytes()
