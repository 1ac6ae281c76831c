"""Where a step writes and looks: a column for each token, in a line or in a ring."""

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.rounding import BUCKET_TOKENS, READ_TOKENS, capacity_for
from lanes.rows.positions import Positions

LENGTHS = st.lists(st.one_of(st.integers(0, 1000), st.sampled_from([255, 256, 257, 511, 512])), min_size=1, max_size=6)


@given(tokens=st.integers(0, 2**40))
def test_capacity_holds_the_tokens_and_grows_by_steps_that_grow(tokens: int) -> None:
    capacity = capacity_for(tokens)
    assert capacity >= max(tokens, BUCKET_TOKENS)
    assert capacity_for(capacity) == capacity
    assert capacity == BUCKET_TOKENS or capacity // 2 < tokens
    if tokens <= 4096:
        assert capacity & (capacity - 1) == 0
    else:
        assert capacity < tokens * 1.25
        # Each step copies all tokens held, so steps of an eighth or more bound the copies of a token.
        assert capacity_for(capacity + 1) >= capacity * 1.125


@settings(deadline=None)
@given(lengths=LENGTHS, window=st.one_of(st.none(), st.integers(1, 300)))
def test_in_a_line_a_row_looks_at_its_own_tokens(lengths: list[int], window: int | None) -> None:
    positions = Positions.of(lengths)
    assert positions.rows == len(lengths)
    assert positions.array.tolist() == lengths
    columns = positions.linear(window)
    assert columns is positions.linear(window), "all layers share it"
    assert columns.rows == len(lengths)
    assert columns.width % READ_TOKENS == 0
    assert max(lengths) < columns.width <= max(lengths) + READ_TOKENS
    assert columns.array.tolist() == columns.write_index.flatten().tolist() == lengths
    assert columns.write_index.shape == (len(lengths), 1, 1, 1)
    assert columns.row_index.tolist() == list(range(len(lengths)))
    assert columns.mask.shape == (len(lengths), 1, 1, columns.width)
    assert columns.mask.dtype == mx.bool_
    for row, now in enumerate(lengths):
        first = 0 if window is None else max(0, now - window + 1)
        assert columns.mask[row, 0, 0].tolist() == [first <= column <= now for column in range(columns.width)]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    size=st.integers(2, 40),
    data=st.data(),
    window=st.one_of(st.none(), st.integers(1, 60)),
)
def test_a_ring_holds_the_first_tokens_and_the_last(
    lengths: list[int], size: int, data: st.DataObject, window: int | None
) -> None:
    """Against a ring that is written token by token: what lies in which column, and who may see it."""
    keep = data.draw(st.integers(0, size - 1))
    columns = Positions.of(lengths).ring(size, keep, window)
    assert columns.width <= size
    for row, now in enumerate(lengths):
        held: dict[int, int] = {}
        for token in range(now + 1):
            own = Positions.of([token]).ring(size, keep).array.item()
            assert isinstance(own, int)
            assert 0 <= own < size
            held[own] = token
        assert columns.array[row].item() == next(column for column, token in held.items() if token == now)
        assert max(held) < columns.width
        last = now + 1 - (size - keep)
        assert set(held.values()) == {token for token in range(now + 1) if token < keep or token >= last}
        seen = {held.get(column) for column in range(columns.width) if columns.mask[row, 0, 0, column].item()}
        looks = window if window is not None and window < size else None
        assert seen == {token for token in held.values() if looks is None or now - token < looks}


def test_positions_are_never_changed() -> None:
    """Models keep what they read of them: a list that grows afterwards must not move an offset."""
    lengths = [3, 300]
    positions = Positions.of(lengths)
    columns = positions.linear()
    lengths[0] += 1
    assert positions.array.tolist() == columns.array.tolist() == [3, 300]
    assert positions.linear().mask[0].sum().item() == 4
