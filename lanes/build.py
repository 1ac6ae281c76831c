"""From a loaded model to an engine that runs it: its forms on this device, its caches, its lane."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import mlx.core as mx

from lanes.batch import SlotCaches
from lanes.choice import choose_lane
from lanes.decoder import Decoder, Forward
from lanes.engine import MlxEngine
from lanes.forward import CompiledForward, eager
from lanes.lane import LaneSettings, ModelInfo
from lanes.load import LoadedModel
from lanes.serial import SoloCaches
from lanes.solo import RowMaker, check_quantized
from lanes.tuning import backend, tune

logger = logging.getLogger(__name__)

LONGER_THAN_WINDOWS = 1 << 17


def build_engine(loaded: LoadedModel, settings: LaneSettings, blas: str) -> MlxEngine:
    """Tune a loaded model, choose its lane and make the engine. blas is what status tells of it.

    Raises CannotQuantize where settings.kv_bits asks for what the model's attention cannot do.
    """
    model = loaded.model
    make_row = RowMaker(model, settings.kv_bits, settings.kv_group_size)
    if settings.kv_bits is not None:
        check_quantized(make_row)
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
        bytes_per_token=bytes_per_token(make_row),
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
