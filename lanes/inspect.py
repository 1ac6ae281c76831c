"""What is known of a model before it serves anything: its caches one by one, its lane, its forms on this device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlx_lm.models.cache import CacheList

from lanes.build import model_info, prepare
from lanes.geometry import RowGeometry
from lanes.lane import LaneSettings, ModelInfo
from lanes.load import LoadedModel
from lanes.rows import kind_of
from lanes.sizes import cache_geometries

# A cache as it is told of, and its geometry if that is known.
Described = tuple[str, RowGeometry | None]


def inspect(loaded: LoadedModel, settings: LaneSettings, blas: str) -> tuple[ModelInfo, dict[str, Any]]:
    """Prepare the model as for serving, and tell what came of it. The report is plain data, sizes in bytes:

        model   name, model_type, dtype, vocab_size, context_tokens (None: no limit), weight_bytes, weights: a sentence
        device  backend, blas
        lane    name, reason, max_rows: the rows that are decoded together at most
        forms   attention (None: as the model has it), joined: groups of projections, compiled, shared_prompt_tokens
        caches  runs of caches alike: first, last (counted from 0), kind; state_bytes, column_bytes, rings of each
        row     bytes_per_token of a long row, fixed_bytes: state_bytes and full rings; None if a kind is not known

    Raises CannotQuantize where settings.kv_bits asks for what the model's attention cannot do.
    """
    prepared = prepare(loaded, settings)
    info = model_info(loaded, settings, blas, prepared)
    geometries = cache_geometries(prepared.make_row)
    described = list(zip(map(describe, prepared.make_row()), geometries, strict=True))
    tuning = prepared.tuning
    return info, {
        "model": {
            "name": info.name,
            "model_type": info.model_type,
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "context_tokens": info.context_tokens,
            "weight_bytes": info.weight_bytes,
            "weights": loaded.note,
        },
        "device": {"backend": info.backend, "blas": info.blas},
        "lane": {"name": info.lane, "reason": info.lane_reason, "max_rows": info.max_rows},
        "forms": {
            "attention": tuning.attention,
            "joined": tuning.joined,
            "compiled": tuning.compiled,
            "shared_prompt_tokens": info.shared_prompt_tokens,
        },
        "caches": [_cache(*run) for run in runs(described)],
        "row": _row(geometries),
    }


def describe(cache: Any) -> str:
    """A solo cache in a word, with what sets it apart from others of its kind; its class where that has no kind."""
    if isinstance(cache, CacheList):
        return " + ".join(map(describe, cache.caches))
    kind = kind_of(cache)
    if kind is None:
        return type(cache).__name__
    traits = []
    if (window := getattr(cache, "max_size", None)) is not None:
        traits.append(f"{window}, keeping {cache.keep}" if cache.keep else str(window))
    if (bits := getattr(cache, "bits", None)) is not None:
        traits.append(f"{bits} bits in groups of {cache.group_size}")
    if kind == "ssm":
        traits.append(f"{len(cache.cache)} arrays")
    return f"{kind} ({', '.join(traits)})" if traits else kind


def runs(caches: Iterable[Described]) -> list[tuple[int, int, str, RowGeometry | None]]:
    """Neighbours that are alike, together: first, last, and what they are."""
    found: list[tuple[int, int, str, RowGeometry | None]] = []
    for index, cache in enumerate(caches):
        if found and found[-1][2:] == cache:
            found[-1] = (found[-1][0], index, *cache)
        else:
            found.append((index, index, *cache))
    return found


def _cache(first: int, last: int, kind: str, geometry: RowGeometry | None) -> dict[str, Any]:
    found: dict[str, Any] = {"first": first, "last": last, "kind": kind}
    if geometry is None:
        return {**found, "state_bytes": None, "column_bytes": None, "rings": None}
    rings = [{"columns": columns, "column_bytes": column_bytes} for columns, column_bytes in geometry.rings]
    return {**found, "state_bytes": geometry.state_bytes, "column_bytes": geometry.column_bytes, "rings": rings}


def _row(geometries: list[RowGeometry | None]) -> dict[str, int] | None:
    known = [geometry for geometry in geometries if geometry is not None]
    if len(known) < len(geometries):
        return None
    row = RowGeometry.total(known)
    return {"bytes_per_token": row.column_bytes, "fixed_bytes": row.fixed_bytes, "state_bytes": row.state_bytes}
