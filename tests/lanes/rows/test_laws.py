"""The laws of rows, for every kind of cache: whatever is done to a lane, each row goes on as it would have alone."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from lanes.rows import kind_of, rows_like
from lanes.rows.columns import ColumnRows
from lanes.rows.group import GroupRows
from lanes.rows.positions import Positions
from lanes.rows.rotating_qkv import RotatingQuantizedCache

WINDOW = 8
HEADS, DIM = 2, 32
FEATURES = 2 * HEADS * DIM
SLOTS, CAPACITY = 4, 64
STEPS = 2
LONGEST = 3 * WINDOW + 5
EDGES = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, LONGEST)
lengths = st.one_of(st.sampled_from(EDGES), st.integers(0, LONGEST))
chunks = st.integers(1, 2 * WINDOW)
rows_of = st.lists(lengths, min_size=2, max_size=SLOTS - 1)

KINDS: dict[str, Callable[[], Any]] = {
    "kv": KVCache,
    "rotating": lambda: RotatingKVCache(WINDOW),
    "rotating, kept": lambda: RotatingKVCache(WINDOW, keep=4),
    "qkv 8": lambda: QuantizedKVCache(32, 8),
    "qkv 4": lambda: QuantizedKVCache(32, 4),
    "rotating-qkv": lambda: RotatingQuantizedCache(WINDOW, 0, 32, 8),
    "rotating-qkv, kept": lambda: RotatingQuantizedCache(WINDOW, 4, 32, 4),
    "ssm": lambda: ArraysCache(2),
    "ssm+rotating": lambda: CacheList(ArraysCache(2), RotatingKVCache(WINDOW)),
    "qkv+qkv": lambda: CacheList(QuantizedKVCache(32, 8), QuantizedKVCache(32, 4)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
law = settings(deadline=None, max_examples=10)


def tokens_of(row: int, start: int, stop: int) -> mx.array:
    """What a row puts into its caches at [start, stop): [1, tokens, features], the same however it is cut."""
    stream = mx.random.normal((LONGEST + 2 * STEPS, FEATURES), key=mx.random.key(row))
    return stream[None, start:stop]


# What rows have before them, for each cache of a layer: arrays [rows, columns, numbers], and which columns a row sees,
# bool [rows, columns].
Looks = list[tuple[mx.array, mx.array]]


def feed(cache: Any, tokens: mx.array) -> Looks:
    """Put tokens [rows, tokens, features] into caches, as a model does; what each row's last token looks at."""
    if isinstance(cache, CacheList | GroupRows):
        return [*feed(cache[0], tokens), *feed(cache[1], tokens)]
    rows, num_tokens, _ = tokens.shape
    if isinstance(cache, ArraysCache):
        # The last two tokens, and a sum in which old ones fade. Of no state it makes what it makes of zeros.
        last = mx.zeros((rows, 2, FEATURES)) if cache[0] is None else cache[0]
        total = mx.zeros((rows, FEATURES)) if cache[1] is None else cache[1]
        for position in range(num_tokens):
            total = total * 0.5 + tokens[:, position]
        cache[0], cache[1] = mx.concatenate([last, tokens], axis=1)[:, -2:], total
        state = mx.concatenate([cache[0].flatten(1), total], axis=1)[:, None]
        return [(state, mx.ones(state.shape[:2], mx.bool_))]
    mask = cache.make_mask(1) if isinstance(cache, ColumnRows) else None
    halves = tokens.reshape(rows, num_tokens, HEADS, 2, DIM).transpose(3, 0, 2, 1, 4)
    fetched = cache.update_and_fetch(halves[0], halves[1])
    if hasattr(cache, "bits"):
        fetched = [mx.dequantize(*parts, group_size=32, bits=cache.bits) for parts in fetched]
    columns = mx.concatenate(list(fetched), axis=-1).swapaxes(1, 2).flatten(2)
    return [(columns, mx.ones(columns.shape[:2], mx.bool_) if mask is None else mask[:, 0, 0])]


def seen(looks: Looks) -> list[list[list[bytes]]]:
    """For each row and cache the columns that the row sees, in no order: a ring may turn anywhere."""
    caches = []
    for columns, mask in looks:
        raw, size = bytes(memoryview(mx.contiguous(columns))), columns.itemsize * columns.shape[2]
        rows = [[column for column, sees in enumerate(row) if sees] for row in mask.tolist()]
        starts = range(0, mask.size, mask.shape[1])
        caches.append(
            [
                sorted(raw[(start + column) * size : (start + column + 1) * size] for column in row)
                for start, row in zip(starts, rows, strict=True)
            ]
        )
    return [list(row) for row in zip(*caches, strict=True)]


def solo(kind: str, row: int, length: int, chunk: int) -> Any:
    """A row that was processed alone, in chunks."""
    cache = KINDS[kind]()
    for start in range(0, length, chunk):
        feed(cache, tokens_of(row, start, min(start + chunk, length)))
    return cache


def lane_of(kind: str, row_lengths: list[int], chunk: int) -> Any:
    """A lane with row i in slot i."""
    rows = rows_like(KINDS[kind]())
    rows.resize(SLOTS, CAPACITY)
    for slot, length in enumerate(row_lengths):
        rows.merge(slot, solo(kind, slot, length, chunk), length)
    return rows


def steps(cache: Any, row: int, length: int) -> list[Any]:
    """What the row sees in the next steps."""
    return [seen(feed(cache, tokens_of(row, at, at + 1)))[0] for at in range(length, length + STEPS)]


def assert_goes_on(taken: Any, kind: str, row: int, length: int) -> None:
    """A row that came out of a lane sees, step by step, what it would have seen had it been alone throughout."""
    assert kind_of(taken) == kind_of(KINDS[kind]())
    assert steps(taken, row, length) == steps(solo(kind, row, length, LONGEST), row, length)


@every_kind
@law
@given(row_lengths=rows_of, chunk=chunks)
def test_merge_then_take_is_identity(kind: str, row_lengths: list[int], chunk: int) -> None:
    rows = lane_of(kind, row_lengths, chunk)
    for row, length in enumerate(row_lengths):
        assert_goes_on(rows.take(row, length), kind, row, length)


@every_kind
@law
@given(row_lengths=rows_of, chunk=chunks, more=st.integers(1, WINDOW))
def test_a_taken_row_can_get_a_whole_chunk(kind: str, row_lengths: list[int], chunk: int, more: int) -> None:
    """As when a prompt goes on where a kept row ended."""
    rows = lane_of(kind, row_lengths, chunk)
    for row, length in enumerate(row_lengths):
        more = min(more, LONGEST - length)
        taken = rows.take(row, length)
        if more:
            feed(taken, tokens_of(row, length, length + more))
        assert_goes_on(taken, kind, row, length + more)


@every_kind
@law
@given(row_lengths=rows_of, chunk=chunks, resized=st.sampled_from([None, (SLOTS, CAPACITY), (2 * SLOTS, 4 * CAPACITY)]))
def test_steps_see_what_each_row_sees_alone(
    kind: str, row_lengths: list[int], chunk: int, resized: tuple[int, int] | None
) -> None:
    """With slots free behind the last row, and with all in use."""
    rows = lane_of(kind, row_lengths, chunk)
    if resized:
        rows.resize(*resized)
    else:
        rows.resize(len(row_lengths), CAPACITY)
    stepped = []
    for step in range(STEPS):
        rows.positions = Positions.of([length + step for length in row_lengths])
        new = [tokens_of(row, length + step, length + step + 1) for row, length in enumerate(row_lengths)]
        stepped.append(seen(feed(rows, mx.concatenate(new))))
    for row, length in enumerate(row_lengths):
        assert [looks[row] for looks in stepped] == steps(solo(kind, row, length, LONGEST), row, length)
        taken = rows.take(row, length + STEPS)
        assert_goes_on(taken, kind, row, length + STEPS)


@every_kind
@law
@given(row_lengths=rows_of, chunk=chunks, left=st.integers(0, 1), newcomer=lengths)
def test_filter_then_take_is_identity(kind: str, row_lengths: list[int], chunk: int, left: int, newcomer: int) -> None:
    """A row leaves, another comes to its slot, and finds nothing of what was there."""
    rows = lane_of(kind, row_lengths, chunk)
    rows.filter(left)
    others = [(row, length) for row, length in enumerate(row_lengths) if row != left]
    for row, length in others:
        assert_goes_on(rows.take(row, length), kind, row, length)
    rows.merge(left, solo(kind, 9, newcomer, chunk), newcomer)
    for row, length in others:
        assert_goes_on(rows.take(row, length), kind, row, length)
    assert_goes_on(rows.take(left, newcomer), kind, 9, newcomer)


@every_kind
@law
@given(row_lengths=rows_of, chunk=chunks)
def test_move_then_take_is_identity(kind: str, row_lengths: list[int], chunk: int) -> None:
    rows = lane_of(kind, row_lengths, chunk)
    last = len(row_lengths) - 1
    rows.filter(0)
    rows.put(0, rows.lift(last, row_lengths[last]))
    assert_goes_on(rows.take(0, row_lengths[last]), kind, last, row_lengths[last])
    for row in range(1, last):
        assert_goes_on(rows.take(row, row_lengths[row]), kind, row, row_lengths[row])


@every_kind
@law
@given(row_lengths=rows_of, chunk=chunks, slots=st.integers(SLOTS - 1, 9), capacity=st.integers(LONGEST + 1, 300))
def test_resize_then_take_is_identity(kind: str, row_lengths: list[int], chunk: int, slots: int, capacity: int) -> None:
    rows = lane_of(kind, row_lengths, chunk)
    rows.resize(slots, capacity)
    for row, length in enumerate(row_lengths):
        assert_goes_on(rows.take(row, length), kind, row, length)


@every_kind
def test_a_row_of_no_tokens_merges_as_nothing(kind: str) -> None:
    rows = rows_like(KINDS[kind]())
    rows.resize(SLOTS, CAPACITY)
    rows.merge(0, KINDS[kind](), 0)
    assert rows.nbytes == 0
    assert rows.take(0, 0).empty()
    rows.merge(1, solo(kind, 1, WINDOW, WINDOW), WINDOW)
    before = mx.array(0) if kind == "ssm" else mx.array(rows.state[-1])
    rows.merge(0, KINDS[kind](), 0)
    if kind != "ssm":
        assert mx.array_equal(rows.state[-1], before)
    assert rows.take(0, 0).empty()


def test_a_freed_slot_is_wiped_before_an_empty_row_gets_it() -> None:
    rows = lane_of("ssm", [5, 6, 7], chunk=3)
    rows.filter(1)
    rows.merge(1, ArraysCache(2), 0)
    assert all(not mx.any(array[1]).item() for array in rows.state)
    assert all(mx.any(array[slot]).item() for array in rows.state for slot in (0, 2))


@every_kind
def test_taken_rows_are_their_own(kind: str) -> None:
    """What is done to the lane afterwards does not show in them, and they hold none of its memory."""
    tokens_of(0, 0, 1)
    mx.synchronize()
    before = mx.get_active_memory()
    rows = rows_like(KINDS[kind]())
    rows.resize(512, CAPACITY)
    for slot in (0, 1, 511):
        rows.merge(slot, solo(kind, slot, WINDOW + 1, WINDOW), WINDOW + 1)
    mx.eval(rows.state)
    held = rows.nbytes
    taken = rows.take(1, WINDOW + 1)
    rows.merge(1, solo(kind, 7, WINDOW + 1, WINDOW), WINDOW + 1)
    rows.clear()
    assert rows.nbytes == 0
    del rows
    mx.synchronize()
    assert mx.get_active_memory() - before < held // 16
    assert_goes_on(taken, kind, 1, WINDOW + 1)


@pytest.mark.parametrize("kind", ["rotating", "rotating-qkv", "kv", "qkv 8"])
@law
@given(length=st.integers(0, LONGEST), window=st.integers(1, 2 * WINDOW), chunk=chunks)
def test_a_window_is_looked_through(kind: str, length: int, window: int, chunk: int) -> None:
    """Some models look at less than their cache holds."""

    def put(cache: Any, start: int, stop: int) -> Any:
        position = mx.broadcast_to(
            mx.arange(start, stop, dtype=mx.float32)[None, None, :, None], (1, 1, stop - start, DIM)
        )
        keys, _ = cache.update_and_fetch(position, position)
        return mx.dequantize(*keys, group_size=32, bits=8) if hasattr(cache, "bits") else keys

    def looks(cache: Any) -> list[int]:
        mask = cache.make_mask(1, window_size=window, return_array=False)
        positions = put(cache, length, length + 1)[0, 0, :, 0].tolist()
        seen = [True] * len(positions) if mask is None else mask.flatten().tolist()
        return sorted(round(position) for position, sees in zip(positions, seen, strict=True) if sees)

    def filled() -> Any:
        cache = KINDS[kind]()
        for start in range(0, length, chunk):
            put(cache, start, min(start + chunk, length))
        return cache

    rows = rows_like(KINDS[kind]())
    rows.resize(1, CAPACITY)
    rows.merge(0, filled(), length)
    rows.positions = Positions.of([length])
    furthest = min(window, WINDOW) if "rotating" in kind else window
    assert looks(filled()) == looks(rows) == list(range(max(0, length + 1 - furthest), length + 1))
