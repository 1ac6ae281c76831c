"""Keys and values in slots: what is merged comes out again, whatever happens to the rows beside it."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from lanes.rows import kind_of, rows_for
from lanes.rows.kv import KVRows
from lanes.rows.positions import Positions

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3
SLOTS, CAPACITY = 4, 512
LENGTHS = st.one_of(st.integers(0, 12), st.sampled_from([255, 256, 257, 511]))


def arrays(seed: int, length: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys and values [1, heads, length, dim] of a row."""
    keys = mx.random.normal((1, HEADS, length, KEY_DIM), dtype=dtype, key=mx.random.key(2 * seed))
    values = mx.random.normal((1, HEADS, length, VALUE_DIM), dtype=dtype, key=mx.random.key(2 * seed + 1))
    return keys, values


def solo(seed: int, length: int, dtype: mx.Dtype = mx.float32) -> KVCache:
    """A row as mlx-lm has it: in steps of 256 columns, so with rubbish behind its end."""
    cache = KVCache()
    if length:
        cache.update_and_fetch(*arrays(seed, length, dtype))
    return cache


def filled(lengths: list[int], dtype: mx.Dtype = mx.float32) -> KVRows:
    """A row of arrays(slot, length) in each slot."""
    rows = KVRows.like(KVCache())
    rows.resize(SLOTS, CAPACITY)
    for slot, length in enumerate(lengths):
        rows.merge(slot, solo(slot, length, dtype), length)
    return rows


def assert_row_is(row: KVCache, seed: int, length: int, dtype: mx.Dtype = mx.float32) -> None:
    assert row.offset == length
    if length:
        keys, values = arrays(seed, length, dtype)
        assert row.keys.dtype == dtype
        assert mx.array_equal(row.keys[..., :length, :], keys)
        assert mx.array_equal(row.values[..., :length, :], values)


@settings(deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=SLOTS),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
)
def test_merge_then_take_is_identity(lengths: list[int], dtype: mx.Dtype) -> None:
    rows = filled(lengths, dtype)
    for slot, length in enumerate(lengths):
        assert_row_is(rows.take(slot, length), slot, length, dtype)


@settings(deadline=None)
@given(lengths=st.lists(LENGTHS, min_size=3, max_size=3), source=st.integers(0, 2))
def test_move_then_take_is_identity(lengths: list[int], source: int) -> None:
    rows = filled(lengths)
    if any(lengths):
        rows.put(3, rows.lift(source, lengths[source]))
        assert_row_is(rows.take(3, lengths[source]), source, lengths[source])
    for slot, length in enumerate(lengths):
        assert_row_is(rows.take(slot, length), slot, length)


@settings(deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=2, max_size=2), slots=st.integers(2, 8), capacity=st.sampled_from([511, 1024])
)
def test_resize_then_take_is_identity(lengths: list[int], slots: int, capacity: int) -> None:
    rows = filled(lengths)
    rows.resize(slots, capacity)
    if any(lengths):
        keys, values = rows.state
        assert keys.shape == (slots, HEADS, capacity, KEY_DIM)
        assert values.shape == (slots, HEADS, capacity, VALUE_DIM)
        assert rows.nbytes == 4 * slots * HEADS * capacity * (KEY_DIM + VALUE_DIM)
    for slot, length in enumerate(lengths):
        assert_row_is(rows.take(slot, length), slot, length)


@settings(deadline=None)
@given(lengths=st.lists(LENGTHS, min_size=3, max_size=3), left=st.integers(0, 2), newcomer=LENGTHS)
def test_a_row_that_leaves_or_comes_does_not_touch_the_others(lengths: list[int], left: int, newcomer: int) -> None:
    rows = filled(lengths)
    others = [slot for slot in range(3) if slot != left]
    rows.filter(left)
    for slot in others:
        assert_row_is(rows.take(slot, lengths[slot]), slot, lengths[slot])
    rows.merge(left, solo(9, newcomer), newcomer)
    for slot in others:
        assert_row_is(rows.take(slot, lengths[slot]), slot, lengths[slot])
    assert_row_is(rows.take(left, newcomer), 9, newcomer)


@settings(deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 7, 254, 255, 256, 300]), min_size=1, max_size=SLOTS))
def test_steps_append_to_each_row_at_its_own_end(lengths: list[int]) -> None:
    """With every slot in use, and with free slots behind: the two forms of the write."""
    rows = filled(lengths)
    written: dict[int, list[tuple[mx.array, mx.array]]] = {slot: [] for slot in range(len(lengths))}
    for step in range(3):
        rows.positions = Positions.of([length + step for length in lengths])
        news = [arrays(100 * step + slot, 1) for slot in range(len(lengths))]
        keys, values = (mx.concatenate([new[part] for new in news]) for part in (0, 1))
        seen = rows.update_and_fetch(keys, values)
        for array, dim in zip(seen, (KEY_DIM, VALUE_DIM), strict=True):
            assert array.shape == (len(lengths), HEADS, rows.positions.linear().width, dim)
        for slot, length in enumerate(lengths):
            written[slot].append(news[slot])
            assert mx.array_equal(seen[0][slot, :, length + step], keys[slot, :, 0])
            assert mx.array_equal(seen[1][slot, :, length + step], values[slot, :, 0])
    for slot, length in enumerate(lengths):
        row = rows.take(slot, length + 3)
        assert row.offset == length + 3
        for taken, part in ((row.keys, 0), (row.values, 1)):
            expected = mx.concatenate([arrays(slot, length)[part], *(new[part] for new in written[slot])], axis=2)
            assert mx.array_equal(taken, expected)


def test_a_taken_row_goes_on_as_mlx_lm_has_it() -> None:
    taken, original = filled([5, 300]).take(1, 300), solo(1, 300)
    for step in range(3):
        new = arrays(50 + step, 1)
        for mine, theirs in zip(taken.update_and_fetch(*new), original.update_and_fetch(*new), strict=True):
            assert mx.array_equal(mine, theirs)


def test_a_taken_row_holds_nothing_of_the_lane() -> None:
    rows = filled([40, 50])
    taken = rows.take(0, 40)
    assert taken.nbytes == 4 * HEADS * 40 * (KEY_DIM + VALUE_DIM)
    rows.merge(0, solo(7, 40), 40)
    assert_row_is(taken, 0, 40)
    rows.clear()
    assert rows.nbytes == 0
    assert_row_is(taken, 0, 40)


def test_what_does_not_fit_is_refused() -> None:
    rows = filled([3])
    with pytest.raises(AssertionError, match="3 tokens, 2 expected"):
        rows.merge(1, solo(1, 3), 2)
    with pytest.raises(AssertionError, match="2 tokens in a step of 1"):
        rows.make_mask(2)


def test_kinds_are_told_by_exact_class() -> None:
    class Derived(KVCache):  # type: ignore[misc]
        pass

    assert kind_of(KVCache()) == "kv"
    assert kind_of(Derived()) is None
    assert kind_of(object()) is None
    made = rows_for([KVCache(), KVCache()])
    assert [type(rows) for rows in made] == [KVRows, KVRows]
    assert made[0] is not made[1]


# Large enough that a copy stands out against whatever else a step allocates.
BIG_SLOTS, BIG_CAPACITY, BIG_DIM = 8, 2048, 64
ARRAY_BYTES = 4 * BIG_SLOTS * HEADS * BIG_CAPACITY * BIG_DIM


def big() -> KVRows:
    rows = KVRows.like(KVCache())
    rows.resize(BIG_SLOTS, BIG_CAPACITY)
    for slot in range(BIG_SLOTS):
        row = KVCache()
        row.update_and_fetch(*(mx.zeros((1, HEADS, 600, BIG_DIM)) for _ in range(2)))
        rows.merge(slot, row, 600)
        mx.eval(rows.state)
    assert rows.nbytes == 2 * ARRAY_BYTES
    return rows


def peak_bytes_of(work: Callable[[], None]) -> int:
    """How far the memory of live arrays rises above what it is now while work() runs."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("num_rows", [BIG_SLOTS, BIG_SLOTS - 3])
def test_steps_write_in_place(num_rows: int) -> None:
    rows = big()

    def steps() -> None:
        for step in range(5):
            rows.positions = Positions.of([600 + step + slot for slot in range(num_rows)])
            rows.update_and_fetch(*(mx.ones((num_rows, HEADS, 1, BIG_DIM)) for _ in range(2)))
            mx.eval(rows.state)

    assert peak_bytes_of(steps) < ARRAY_BYTES // 8


def evaluated(arrays: list[mx.array]) -> list[mx.array]:
    mx.eval(arrays)
    return arrays


def test_rows_come_leave_and_move_in_place() -> None:
    rows = big()
    newcomer = KVCache()
    newcomer.update_and_fetch(*(mx.ones((1, HEADS, 40, BIG_DIM)) for _ in range(2)))
    mx.eval(newcomer.state)

    def turns() -> None:
        for slot in range(3):
            rows.filter(slot)
            rows.merge(slot, newcomer, 40)
            mx.eval(rows.state)
            rows.put(slot + 1, evaluated(rows.lift(slot, 40)))
            mx.eval(rows.state)

    assert peak_bytes_of(turns) < ARRAY_BYTES // 8


def test_a_taken_row_does_not_keep_the_lanes_arrays_alive() -> None:
    before = mx.get_active_memory()
    rows = big()
    taken = rows.take(3, 600)
    rows.clear()
    assert mx.get_active_memory() - before < ARRAY_BYTES
    assert taken.offset == 600


def test_the_measure_sees_a_copy() -> None:
    """Something that still holds the old array turns the write into a copy: the two tests above would notice."""
    rows = big()
    held = list(rows.state)

    def step() -> None:
        rows.positions = Positions.of([600] * BIG_SLOTS)
        rows.update_and_fetch(*(mx.ones((BIG_SLOTS, HEADS, 1, BIG_DIM)) for _ in range(2)))
        mx.eval(rows.state)

    assert peak_bytes_of(step) >= ARRAY_BYTES
    assert held[0].nbytes == ARRAY_BYTES
