"""Geometry predicts what real caches take, for every kind: alone, in a lane, at any length."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, RotatingKVCache

from lanes.batch import SlotCaches
from lanes.geometry import RowGeometry
from lanes.rows import kind_of
from lanes.sizes import cache_geometries, row_geometry
from lanes.solo import RowMaker
from tests.lanes.families import FAMILIES, make_model
from tests.lanes.families.expected import SERIAL, UNQUANTIZED
from tests.lanes.families.facts import WINDOW
from tests.lanes.test_families import QUICK
from tests.lanes.tiny import prompt_of

LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)
GROUP_SIZE = 32

sizes = st.integers(0, 1 << 40)
geometries = st.builds(
    RowGeometry,
    sizes,
    sizes,
    st.dictionaries(st.integers(1, 5000), sizes, max_size=3).map(lambda rings: tuple(sorted(rings.items()))),
)


@given(st.lists(geometries, max_size=4), st.integers(0, 10_000))
def test_a_total_is_the_sum_of_its_parts(parts: list[RowGeometry], tokens: int) -> None:
    total = RowGeometry.total(parts)
    assert total.row_bytes(tokens) == sum(part.row_bytes(tokens) for part in parts)
    assert total.fixed_bytes == sum(part.fixed_bytes for part in parts)


@given(geometries, st.integers(5000, 10_000))
def test_a_row_beyond_its_rings_grows_by_its_columns_alone(geometry: RowGeometry, tokens: int) -> None:
    assert geometry.row_bytes(tokens) == geometry.fixed_bytes + tokens * geometry.column_bytes


@given(geometries, st.integers(0, 40), st.integers(0, 5000))
def test_a_lane_is_never_less_than_its_rows(geometry: RowGeometry, rows: int, tokens: int) -> None:
    assert geometry.lane_bytes(rows, tokens) >= rows * geometry.row_bytes(tokens)
    assert geometry.lane_bytes(rows + 1, tokens + 1) >= geometry.lane_bytes(rows, tokens)


def processed(make_row: RowMaker, length: int) -> list[Any]:
    row = make_row()
    make_row.model(mx.array([prompt_of(length)]), cache=row)
    mx.eval([cache.state for cache in row])
    return row


def assert_predicted(make_row: RowMaker) -> None:
    """Rows of unlike lengths in a lane: all together, and each cache of each row that is taken out."""
    each, whole = cache_geometries(make_row), row_geometry(make_row)
    assert whole is not None
    lane = SlotCaches(make_row(), len(LENGTHS))
    for row_id, length in enumerate(LENGTHS[-4:]):
        lane.merge(row_id, processed(make_row, length), length)
    # Four slots, and all in use: no more of them than rows, which matters to state alone.
    assert lane.nbytes == whole.lane_bytes(4, max(LENGTHS) + 1)
    lane.clear()
    for row_id, length in enumerate(LENGTHS):
        lane.merge(row_id, processed(make_row, length), length)
        taken = lane.take(row_id)
        assert [nbytes(cache) for cache in taken] == [geometry.row_bytes(length) for geometry in each if geometry]
        assert sum(nbytes(cache) for cache in taken) == whole.row_bytes(length)


def nbytes(cache: Any) -> int:
    """Of a solo cache; some cannot say it of themselves while they are empty."""
    if isinstance(cache, CacheList):
        return sum(map(nbytes, cache.caches))
    return 0 if cache.empty() else int(cache.nbytes)


def cases() -> Iterator[Any]:
    """(family, bits) of all that can be batched, the quick ones for every run."""
    for name in FAMILIES:
        marks = () if name in QUICK else (pytest.mark.slow,)
        if name not in SERIAL:
            yield pytest.param(name, None, marks=marks)
            if name not in UNQUANTIZED:
                yield pytest.param(name, 8, marks=marks)


@pytest.mark.parametrize(("family", "bits"), list(cases()))
def test_a_familys_caches_take_what_was_predicted(family: str, bits: int | None) -> None:
    assert_predicted(RowMaker(make_model(family), bits, GROUP_SIZE))


@pytest.mark.parametrize(
    ("family", "bits", "kinds"),
    [
        ("llama", None, {"kv"}),
        ("llama", 4, {"qkv"}),
        ("gemma3_text", None, {"kv", "rotating"}),
        ("gemma3_text", 4, {"qkv", "rotating-qkv"}),
        ("mamba2", None, {"ssm"}),
        ("falcon_h1", None, {"ssm+kv"}),
        ("falcon_h1", 4, {"ssm+qkv"}),
    ],
)
def test_every_kind_is_among_them(family: str, bits: int | None, kinds: set[str]) -> None:
    make_row = RowMaker(make_model(family), bits, GROUP_SIZE)
    assert {kind_of(cache) for cache in make_row()} == kinds
    assert_predicted(make_row)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_ring_with_kept_tokens(bits: int | None) -> None:
    model = make_model("llama")
    model.make_cache = lambda: [RotatingKVCache(max_size=WINDOW, keep=2) for _ in model.layers]
    assert_predicted(RowMaker(model, bits, GROUP_SIZE))


def test_a_cache_of_no_known_kind_is_not_guessed_at() -> None:
    make_row = RowMaker(make_model("llama4"))
    assert None in cache_geometries(make_row)
    assert row_geometry(make_row) is None
