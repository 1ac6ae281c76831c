"""The batch lane's caches: a row that comes out is what it would be had it been alone, whatever came and went."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.batch import SlotCaches
from lanes.solo import RowMaker
from tests.lanes.tiny import VOCABULARY, prompt_of, tiny_llama

MODEL = tiny_llama()
MAKE_ROW = RowMaker(MODEL)
LENGTHS = st.one_of(st.integers(0, 20), st.sampled_from([253, 254, 255, 256]))
OPERATIONS = st.one_of(
    st.tuples(st.just("merge"), LENGTHS),
    st.tuples(st.sampled_from(["leave", "take"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["compact", "give back", "step", "step", "step"]), st.just(0)),
)


def solo_of(tokens: tuple[int, ...]) -> list[Any]:
    caches = MAKE_ROW()
    if tokens:
        MODEL(mx.array([tokens]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


@dataclass
class Lane:
    """SlotCaches, and beside it for each row its own caches alone, fed the same tokens one by one."""

    caches: SlotCaches = field(default_factory=lambda: SlotCaches(MAKE_ROW(), 6))
    alone: dict[int, list[Any]] = field(default_factory=dict)
    next_row: int = 0

    def merge(self, length: int) -> int:
        row, self.next_row = self.next_row, self.next_row + 1
        prompt = prompt_of(length, row)
        self.caches.merge(row, solo_of(prompt), length)
        self.alone[row] = solo_of(prompt)
        return row

    def leave(self, row: int) -> None:
        self.caches.leave(row)
        del self.alone[row]

    def step(self) -> None:
        table = self.caches.table
        tokens = [0 if row is None else (31 * row + length) % VOCABULARY for row, length in self.slots()]
        beside = MODEL(mx.array(tokens)[:, None], cache=self.caches.begin_step())
        for slot, row in enumerate(table.rows):
            if row is not None:
                expected = MODEL(mx.array([[tokens[slot]]]), cache=self.alone[row])
                assert mx.array_equal(beside[slot], expected[0]), f"row {row} in slot {slot}"
        self.caches.end_step()

    def give_back(self) -> None:
        """As if all were much."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lanes.batch.WORTH_GIVING_BACK_BYTES", 0)
            self.caches.give_back()

    def slots(self) -> list[tuple[int | None, int]]:
        return list(zip(self.caches.table.rows, self.caches.table.lengths, strict=True))

    def assert_taken_is_alone(self, row: int) -> None:
        for taken, solo in zip(self.caches.take(row), self.alone[row], strict=True):
            assert taken.offset == solo.offset
            if solo.offset:
                for mine, theirs in zip(taken.keys_and_values(), solo.keys_and_values(), strict=True):
                    assert mx.array_equal(mine, theirs)

    def check(self) -> None:
        caches = self.caches
        caches.check()
        assert {row for row in caches.table.rows if row is not None} == set(self.alone)
        if not self.alone:
            assert (caches.slots, caches.capacity_tokens, caches.nbytes) == (0, 0, 0)
            return
        assert caches.slots & (caches.slots - 1) == 0
        assert caches.capacity_tokens & (caches.capacity_tokens - 1) == 0
        assert len(caches.table.rows) <= caches.slots
        assert max(caches.table.lengths) <= caches.capacity_tokens


@settings(max_examples=40, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=14))
def test_a_row_that_is_taken_out_is_the_row_alone(operations: list[tuple[str, int]]) -> None:
    """And so is each of its logits, bit by bit: the reference BLAS computes each row alike."""
    lane = Lane()
    for name, number in operations:
        rows = sorted(lane.alone)
        if name == "merge" and len(rows) < 6:
            lane.merge(number)
        elif rows and name == "leave":
            lane.leave(rows[number % len(rows)])
        elif rows and name == "take":
            lane.assert_taken_is_alone(rows[number % len(rows)])
        elif rows and name == "step":
            lane.step()
        elif rows and name == "give back":
            lane.give_back()
        elif name == "compact":
            num_free = lane.caches.table.rows.count(None)
            assert (lane.caches.compact() is None) == (num_free == 0)
            assert lane.caches.table.rows.count(None) <= max(0, num_free - 1)
        lane.check()
    for row in sorted(lane.alone):
        lane.assert_taken_is_alone(row)


def test_what_a_long_row_leaves_is_given_back() -> None:
    lane = Lane()
    long, short = lane.merge(2000), lane.merge(7)
    lane.merge(9)
    assert (lane.caches.slots, lane.caches.capacity_tokens) == (4, 2048)
    lane.leave(long)
    lane.caches.give_back()
    assert lane.caches.capacity_tokens == 2048, "of a tiny model it is not much"
    lane.give_back()
    assert (lane.caches.slots, lane.caches.capacity_tokens) == (2, 256)
    lane.step()
    lane.assert_taken_is_alone(short)
    before = lane.caches.nbytes
    lane.merge(100)
    lane.give_back()
    assert lane.caches.nbytes == 2 * before, "what is needed stays"
    lane.step()
    lane.check()


def test_a_row_that_was_taken_out_comes_back_as_it_was() -> None:
    lane = Lane()
    row = lane.merge(254)
    lane.merge(7)
    for _ in range(3):
        lane.step()
    taken = lane.caches.take(row)
    length = taken[0].offset
    lane.caches.leave(row)
    alone = lane.alone.pop(row)
    lane.merge(30)
    lane.step()
    lane.caches.merge(row, taken, length)
    lane.alone[row] = alone
    for _ in range(3):
        lane.step()
    lane.assert_taken_is_alone(row)


def test_room_grows_by_doubling_and_is_given_back_with_the_last_row() -> None:
    lane = Lane()
    first = lane.merge(250)
    capacities, slots = [lane.caches.capacity_tokens], [lane.caches.slots]
    for _ in range(10):
        lane.step()
        capacities.append(lane.caches.capacity_tokens)
    for _ in range(4):
        lane.merge(1)
        slots.append(lane.caches.slots)
    assert sorted(set(capacities)) == [256, 512]
    assert slots == [1, 2, 4, 4, 8]
    num_bytes = lane.caches.nbytes
    lane.leave(first)
    assert lane.caches.nbytes == num_bytes, "a row that leaves copies nothing"
    for row in sorted(lane.alone):
        lane.leave(row)
    lane.check()


def test_a_row_too_many_is_refused() -> None:
    lane = Lane()
    for _ in range(6):
        lane.merge(2)
    with pytest.raises(AssertionError, match="all 6 slots"):
        lane.merge(2)
