"""From a loaded model to an engine that runs it: its forms on this device, its caches, its lane."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from lanes.adapters import Adapters
from lanes.batch import SlotCaches
from lanes.boundary import remembers
from lanes.choice import Choice, choose_lane
from lanes.cuda_fetch import device_fetch
from lanes.decoder import Decoder, Forward
from lanes.engine import MlxEngine
from lanes.forward import CompiledForward, eager, eager_drafts
from lanes.grammar import Grammars
from lanes.lane import LaneSettings, ModelInfo
from lanes.load import LoadedModel
from lanes.machine import memory_bytes
from lanes.rounding import round_rows
from lanes.serial import SoloCaches
from lanes.sharing import shared_prompt_tokens
from lanes.sizes import device_memory_bytes, row_geometry
from lanes.solo import RowMaker
from lanes.speculation import Speculation, why_none
from lanes.tuning import Tuning, backend, tune

logger = logging.getLogger(__name__)

# Tokens drafted for a row at most where nothing is said: measured with tests/bench/speculation.py.
CPU_DRAFT_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a model will run: what makes its rows' caches, its forms on this device, its lane."""

    make_row: RowMaker
    tuning: Tuning
    choice: Choice


def prepare(loaded: LoadedModel, settings: LaneSettings) -> Prepared:
    """Tune a loaded model and choose its lane.

    Raises CannotQuantize where settings.kv_bits asks for what the model's attention cannot do.
    """
    make_row = RowMaker(loaded.model, settings.kv_bits, settings.kv_group_size)
    tuning = tune(loaded.model, settings.compile)
    choice = choose_lane(make_row)
    logger.info("%s runs in the %s lane: %s; %s", loaded.name, choice.lane, choice.reason, tuning)
    return Prepared(make_row, tuning, choice)


def build_engine(loaded: LoadedModel, settings: LaneSettings, blas: str) -> MlxEngine:
    """Prepare a loaded model and make its engine. blas is what status tells of it. Raises as prepare() does."""
    model, prepared = loaded.model, prepare(loaded, settings)
    make_row, tuning, adapters = prepared.make_row, prepared.tuning, Adapters(model)
    if prepared.choice.lane == "batch":
        step_rows = round_rows if tuning.compiled else int
        batch = SlotCaches(make_row(), settings.max_rows, tuning.columns_per_call, step_rows)
        forward: Forward = (
            CompiledForward(model, batch, tuning.read_width, adapters)
            if tuning.compiled
            else partial(eager, model, batch, adapters=adapters)
        )
        decoder = Decoder(batch, forward, partial(eager_drafts, model, batch, adapters=adapters))
    else:
        solo = SoloCaches()
        decoder = Decoder(solo, partial(eager, model, solo, adapters=adapters))
    info = model_info(loaded, settings, blas, prepared)
    loaded.tokenizer.grammars.prepare()
    grammars = Grammars(loaded.tokenizer.grammars, loaded.tokenizer.eos_token_ids)
    return MlxEngine(
        make_row,
        info,
        decoder,
        early_reads=tuning.early_reads,
        grammars=grammars,
        adapters=adapters,
        speculation=_speculation(settings, info, prepared),
    )


def _speculation(settings: LaneSettings, info: ModelInfo, prepared: Prepared) -> Speculation | None:
    """None where no row has drafts; the log tells why, unless there were to be none."""
    most_tokens = settings.num_draft_tokens
    if most_tokens is None:
        most_tokens = CPU_DRAFT_TOKENS if info.backend == "cpu" else 0
    if most_tokens == 0:
        return None
    weights_tokens = info.shared_prompt_tokens
    if info.lane != "batch":
        reason: str | None = "requests are served one after another"
    else:
        compiled = prepared.tuning.compiled
        reason = why_none(prepared.make_row, info.cache_kinds, weights_tokens, compiled=compiled)
    if reason is not None:
        logger.info("answers are not drafted from their prompts: %s", reason)
        return None
    return Speculation(most_tokens, weights_tokens, info.context_tokens)


def model_info(loaded: LoadedModel, settings: LaneSettings, blas: str, prepared: Prepared) -> ModelInfo:
    make_row, choice = prepared.make_row, prepared.choice
    shared_tokens = shared_prompt_tokens(make_row) if choice.lane == "batch" else 0
    # Padding is exact where sharing a pass is.
    may_be_padded = shared_tokens > 0 and set(choice.cache_kinds) <= {"kv", "qkv"}
    return ModelInfo(
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
        geometry=row_geometry(make_row) if choice.lane == "batch" else None,
        shared_prompt_tokens=shared_tokens,
        chunk_multiple=prepared.tuning.chunk_multiple if may_be_padded else 1,
        remembers=remembers(choice.cache_kinds),
        dtype=loaded.dtype,
        backend=backend(),
        blas=blas,
        host_memory_bytes=memory_bytes() if device_fetch() else None,
    )


def vocabulary(loaded: LoadedModel) -> int:
    """Token ids that the model can look up: rows of its embedding, by the config's word for it."""
    config = loaded.config
    size: Any = (
        config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or loaded.tokenizer.vocab_size
    )
    return int(size)
