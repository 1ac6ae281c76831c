"""The adapters of one model: which are loaded, and which row has which."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from lanes.lane import Adapter, AdapterError, LoadedAdapter
from lanes.low_rank import ADAPTED, Factors, One, Pass, Several, Term, dimensions, plain_class

# MLX's gather_mm for CUDA reads 16 bytes at once, also where a row has fewer.
RANK_MULTIPLE = 8


class Adapters:
    """By their digests. A pass is built inside of of_rows() or at(), so that the layers know whose rows they compute.

    version: another number whenever an adapter comes or goes, as traces keep the stacks that they were made with.
    """

    def __init__(self, model: Any) -> None:
        self.version = 0
        self._model = model
        self._pass = Pass()
        self._loaded: dict[str, Adapter] = {}
        self._terms: dict[str, Term] = {}
        self._rows: dict[int, str] = {}
        self._unwanted: set[str] = set()
        self._scales = mx.zeros(1)
        self._last: tuple[tuple[int, ...], Several] | None = None

    @property
    def rows(self) -> set[int]:
        """Rows that have an adapter."""
        return set(self._rows)

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """Have an adapter ready for rows. Raises AdapterError, and then all is as it was."""
        digest, found = adapter.digest, read_factors(self._model, adapter)
        if digest not in self._loaded:
            layers = dict(self._model.named_modules())
            try:
                for name, factors in found.items():
                    self._terms.setdefault(name, Term(layers[name], self._pass)).factors[digest] = factors
                self._loaded[digest] = replace(adapter, weights=b"")
                self._stack()
                self._try_out(digest)
            except Exception as error:
                self._forget(digest)
                raise AdapterError(f"the model fails with it: {error}") from error
        self._unwanted.discard(digest)
        num_bytes = sum(array.nbytes for factors in found.values() for array in factors)
        return LoadedAdapter(digest, adapter.rank, len(found), num_bytes)

    def unload(self, digest: str) -> None:
        """Forget an adapter as soon as no row has it."""
        self._unwanted.add(digest)
        self._forget_unwanted()

    def admit(self, row_id: int, digest: str) -> None:
        assert digest in self._loaded, f"row {row_id} is to have an adapter that is not loaded"
        self._rows[row_id] = digest

    def leave(self, row_id: int) -> None:
        if self._rows.pop(row_id, None) is not None:
            self._forget_unwanted()

    @contextmanager
    def of_rows(self, row_ids: Sequence[int | None]) -> Iterator[None]:
        """The pass that is built in this block is of these rows, in their order (None: what comes of it is not used),
        or of one row or of rows that all have the same adapter."""
        digests = {self._rows.get(row_id) for row_id in row_ids if row_id is not None} if self._rows else set()
        if len(digests) == 1:
            (digest,) = digests
            self._pass.chosen = None if digest is None else One(digest, self._loaded[digest].scale)
        elif digests:
            self._pass.chosen = self._several(self._places(row_ids))
        try:
            yield
        finally:
            self._pass.chosen = None

    def places(self, row_ids: Sequence[int | None], num_rows: int) -> mx.array | None:
        """What at() takes for these rows and as many more as make num_rows of them; None: none has an adapter."""
        if not any(row_id in self._rows for row_id in row_ids):
            return None
        return self._several((*self._places(row_ids), *[0] * (num_rows - len(row_ids)))).places

    @contextmanager
    def at(self, places: mx.array | None) -> Iterator[None]:
        """The pass that is built or traced in this block is of rows with the adapters in these places, int32 [rows]."""
        self._pass.chosen = None if places is None else Several(places, self._scales[places][:, None, None])
        try:
            yield
        finally:
            self._pass.chosen = None

    def _places(self, row_ids: Sequence[int | None]) -> tuple[int, ...]:
        place = {digest: index for index, digest in enumerate(self._loaded, 1)}
        digests = [None if row_id is None else self._rows.get(row_id) for row_id in row_ids]
        return tuple(0 if digest is None else place[digest] for digest in digests)

    def _several(self, places: tuple[int, ...]) -> Several:
        """Made anew when rows come and go."""
        if self._last is None or self._last[0] != places:
            array = mx.array(places, dtype=mx.int32)
            self._last = places, Several(array, self._scales[array][:, None, None])
        return self._last[1]

    def _stack(self) -> None:
        """Bring all layers to the adapters that are loaded."""
        rank = max((adapter.rank for adapter in self._loaded.values()), default=0)
        rank += -rank % RANK_MULTIPLE
        mx.eval([term.stack(list(self._loaded), rank) for term in self._terms.values()])
        self._terms = {name: term for name, term in self._terms.items() if term.factors}
        self._scales = mx.array([0.0, *(adapter.scale for adapter in self._loaded.values())])
        self._last = None
        self.version += 1

    def _try_out(self, digest: str) -> None:
        """A layer may be called with something in which no rows are to be found: better now than in somebody's step."""
        place = 1 + list(self._loaded).index(digest)
        with self.at(mx.array([0, place], dtype=mx.int32)):
            mx.eval(self._model(mx.zeros((2, 1), dtype=mx.int32), cache=make_prompt_cache(self._model)))

    def _forget_unwanted(self) -> None:
        for digest in self._unwanted - set(self._rows.values()):
            self._unwanted.discard(digest)
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        if self._loaded.pop(digest, None) is not None:
            self._stack()


def read_factors(model: Any, adapter: Adapter) -> dict[str, Factors]:
    """An adapter's A and B by the names of the model's layers, lazy. Raises AdapterError where they are not of this
    model, or of layers that take none."""
    try:
        tensors: Any = mx.load(io.BytesIO(adapter.weights), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise AdapterError(f"its tensors cannot be read: {error}") from error
    layers = dict(model.named_modules())
    found: dict[str, Factors] = {}
    for tensor in sorted(tensors):
        name, _, side = tensor.rpartition(".")
        if side not in ("lora_a", "lora_b"):
            raise AdapterError(f"{tensor} is no part of a low-rank adapter")
        if name not in layers:
            raise AdapterError(f"this model has no layer {name}")
        if name not in found:
            found[name] = _of_layer(layers[name], name, tensors, adapter.rank)
    if not found:
        raise AdapterError("it has no tensors")
    if len({id(layers[name]) for name in found}) < len(found):
        raise AdapterError("it has several terms for one layer that stands in several places of the model")
    return found


def _of_layer(layer: Any, name: str, tensors: Mapping[str, mx.array], rank: int) -> Factors:
    known = plain_class(layer)
    if known not in ADAPTED:
        raise AdapterError(
            f"{name} is a {known.__name__}, and only Linear and QuantizedLinear layers can have adapters"
        )
    inputs, outputs = dimensions(layer)
    sides = []
    for side, shape in (("lora_a", (inputs, rank)), ("lora_b", (rank, outputs))):
        tensor = tensors.get(f"{name}.{side}")
        if tensor is None:
            raise AdapterError(f"{name}.{side} is missing")
        if tensor.shape != shape:
            raise AdapterError(f"{name}.{side} has the shape {tensor.shape}, and should have {shape}")
        sides.append(tensor.astype(mx.float32))
    return sides[0], sides[1]
