"""The table of slots: every row in one slot, low slots first, none lost."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lanes.rows.slots import Slots

LIMIT = 5


class SlotsMachine(RuleBasedStateMachine):
    """Against a dict of what each row should have; the table alone says which slot."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(LIMIT)
        self.lengths: dict[int, int] = {}
        self.next_row = 0

    def slot_of(self, row: int) -> int:
        return self.slots.rows.index(row)

    def free(self) -> list[int]:
        return [slot for slot in range(LIMIT) if slot >= len(self.slots.rows) or self.slots.rows[slot] is None]

    @precondition(lambda self: len(self.lengths) < LIMIT)
    @rule(length=st.integers(0, 600))
    def claim(self, length: int) -> None:
        lowest = self.free()[0]
        assert self.slots.claim(self.next_row, length) == lowest == self.slot_of(self.next_row)
        self.lengths[self.next_row] = length
        self.next_row += 1

    @precondition(lambda self: len(self.lengths) == LIMIT)
    @rule()
    def claim_when_full(self) -> None:
        with pytest.raises(AssertionError, match="slots taken"):
            self.slots.claim(self.next_row, 1)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def claim_twice(self, data: st.DataObject) -> None:
        with pytest.raises(AssertionError, match="already"):
            self.slots.claim(data.draw(st.sampled_from(sorted(self.lengths))), 1)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lengths)))
        slot = self.slot_of(row)
        assert self.slots.release(row) == slot
        del self.lengths[row]

    @rule(row=st.integers(-2, -1))
    def release_unknown(self, row: int) -> None:
        with pytest.raises(KeyError):
            self.slots.release(row)

    @rule()
    def close_a_hole(self) -> None:
        hole = self.slots.hole()
        assert (hole is None) == (len(self.slots.rows) == len(self.lengths))
        if hole:
            source, target = hole
            assert source == len(self.slots.rows) - 1
            assert target == self.free()[0]
            row = self.slots.rows[source]
            self.slots.move(source, target)
            assert self.slots.rows[target] == row

    @precondition(lambda self: self.slots.hole())
    @rule(data=st.data())
    def move_anywhere(self, data: st.DataObject) -> None:
        source = self.slot_of(data.draw(st.sampled_from(sorted(self.lengths))))
        target = data.draw(st.sampled_from([slot for slot in self.free() if slot < len(self.slots.rows)]))
        row = self.slots.rows[source]
        self.slots.move(source, target)
        assert self.slots.rows[target] == row

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def move_onto_a_row(self, data: st.DataObject) -> None:
        source, target = (
            self.slot_of(data.draw(st.sampled_from(sorted(self.lengths)), label=label)) for label in ("from", "to")
        )
        with pytest.raises(AssertionError, match="holds row"):
            self.slots.move(source, target)

    @rule()
    def advance(self) -> None:
        self.slots.advance()
        self.lengths = {row: length + 1 for row, length in self.lengths.items()}

    @invariant()
    def the_table_holds_the_rows(self) -> None:
        self.slots.check()
        held = {row: self.slots.lengths[slot] for slot, row in enumerate(self.slots.rows) if row is not None}
        assert held == self.lengths
        assert len(self.slots) == len(self.lengths)
        assert all(row in self.slots for row in self.lengths)
        assert self.next_row not in self.slots
        assert len(self.slots.lengths) == len(self.slots.rows)
        free = [slot for slot, row in enumerate(self.slots.rows) if row is None]
        assert all(self.slots.lengths[slot] == 0 for slot in free), "a free slot has a length"


TestSlots = SlotsMachine.TestCase


def test_check_sees_a_table_that_is_wrong() -> None:
    for spoil in (
        lambda slots: slots.rows.append(None),
        lambda slots: slots.rows.__setitem__(0, 99),
        lambda slots: slots.rows.append(1),
        lambda slots: setattr(slots, "limit", 1),
    ):
        slots = Slots(3)
        slots.claim(1, 4)
        slots.claim(2, 4)
        slots.check()
        spoil(slots)
        with pytest.raises(AssertionError):
            slots.check()
