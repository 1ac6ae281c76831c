"""From options to a model that runs. The only file that imports concrete lanes.

Everything here is called on the model's thread, and imports MLX only after the BLAS is in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanes.cache_folder import cache_folder
from lanes.lane import Engine, LaneSettings, ModelInfo
from scheduler.options import Options
from scheduler.progress import LoadProgress
from scheduler.storing import store_folder
from scheduler.tokenizer import Tokenizer
from scheduler.usage import UsageError
from store.names import DIGESTS, digests_path

if TYPE_CHECKING:
    from lanes.blas import BlasReport
    from lanes.load import LoadedModel

logger = logging.getLogger(__name__)


def load_model(options: Options, progress: LoadProgress) -> tuple[LoadedModel, str]:
    """The model and what is told of its BLAS. On the model's thread: everything that imports MLX."""
    blas = _preload(options.blas, options.threads)
    from lanes.load import load
    from lanes.sources import LoadError

    try:
        loaded = load(
            options.model,
            trust_remote_code=options.trust_remote_code,
            dtype=options.dtype,
            chat_template=options.chat_template,
            progress=progress,
        )
    except LoadError as error:
        raise UsageError(f"--model {options.model}: {error}") from error
    logger.info("%s: %s", loaded.name, loaded.note)
    return loaded, blas.label


def _preload(choice: str, threads: int | None) -> BlasReport:
    from lanes import cuda_environment
    from lanes.blas import BlasError, preload

    cuda_environment.set_variables()
    try:
        report = preload(choice, threads)
    except BlasError as error:
        raise UsageError(f"--blas {choice}: {error}") from error
    logger.info(report.sentence)
    return report


def build(options: Options, progress: LoadProgress) -> tuple[Engine, Tokenizer, str]:
    """The engine, the tokenizer and, where what is remembered outlives the daemon, the model's fingerprint."""
    loaded, blas = load_model(options, progress)
    from lanes.build import build_engine
    from lanes.solo import CannotQuantize

    try:
        engine = build_engine(loaded, lane_settings(options), blas)
    except CannotQuantize as error:
        raise UsageError(f"--kv-bits {options.kv_bits}: {error}") from error
    if engine.info.backend == "cuda":
        from lanes.warm_up import warm_up

        warm_up(engine, progress, has_grammars=loaded.tokenizer.grammars.is_ready)
    if options.store is None and options.store_socket is None:
        return engine, loaded.tokenizer, ""
    from lanes.fingerprint import fingerprint

    read_only = options.store is not None and options.store_read_only
    return (
        engine,
        loaded.tokenizer,
        fingerprint(loaded, lane_settings(options), digests_file(options), read_only),
    )


def cache_place() -> Path:
    """Where what is made once for this machine lies, and where the README puts a store. May not exist."""
    return cache_folder("")


def digests_file(options: Options) -> Path:
    """Where the digests of the model's weights are noted, so that no start reads them all: in the store's folder or,
    where that is another process's, with what else is made for this machine."""
    if options.store is not None:
        return digests_path(store_folder(options.store))
    file = cache_folder(DIGESTS)
    # What cannot be made is told when something is to be noted there.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    return file


def examine(options: Options, progress: LoadProgress) -> tuple[ModelInfo, Mapping[str, Any]]:
    loaded, blas = load_model(options, progress)
    from lanes.inspect import inspect
    from lanes.solo import CannotQuantize

    try:
        return inspect(loaded, lane_settings(options), blas)
    except CannotQuantize as error:
        raise UsageError(f"--kv-bits {options.kv_bits}: {error}") from error


def look_at_device(blas: str) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
    """What is known of MLX and its BLAS ({"error": a sentence} where it does not work), and what else can be asked of
    lanes.doctor, by name. Raises UsageError where blas is wrong."""
    preloaded = _preload(blas, None)
    try:
        from lanes.doctor import CHECKS, check
        from lanes.doctor.costs import measure_costs
        from lanes.doctor.device import describe

        device = describe()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}, {}
    told = {"blas": preloaded.label, "blas_kind": preloaded.kind, "blas_sentence": preloaded.sentence}
    return {**device, **told}, {**{name: partial(check, name) for name in CHECKS}, "costs": measure_costs}


def lane_settings(options: Options) -> LaneSettings:
    return LaneSettings(
        options.max_rows, options.kv_bits, options.kv_group_size, options.compile, options.num_draft_tokens
    )
