from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store.keeping import Kept
from store.memory import Entry, Memory
from store.segment import Segment
from tests.store.rows import Row
from tests.store.segments import segment

ROW = Row()


def of(tokens: list[int], parent: Segment | None = None) -> Segment:
    """A segment with tensors: 16 bytes a token."""
    start = 0 if parent is None else parent.stop
    part = ROW.part([0] * start + tokens, start)
    return segment(tokens, parent, tensors=part.tensors)


def put(memory: Memory, what: Segment, now_s: float = 0.0, queued: bool = False) -> Entry:
    entry = memory.put(what, (memoryview(bytes(what.nbytes)),), queued, now_s)
    memory.check()
    assert entry is not None
    return entry


def kept(what: Segment) -> Kept:
    return Kept(what, Path(f"/nowhere/{what.id}"), (0,))


def test_bytes_stay_while_resident_or_queued_and_no_longer() -> None:
    memory = Memory(1000)
    entry = put(memory, of([1, 2, 3]), queued=True)
    put(memory, of([9] * 60))
    assert entry.buffers is not None
    assert memory.num_resident == 1
    entry.kept = kept(entry.segment)
    memory.unqueue(entry)
    assert entry.buffers is None
    assert entry not in memory
    memory.check()


def test_what_is_on_disk_only_stays_while_it_is_used_or_hung_on() -> None:
    memory = Memory(1000)
    root = memory.enter(kept(of([1, 2])))
    leaf = memory.enter(kept(of([3, 4], of([1, 2]))))
    assert root is not None
    assert leaf is not None
    memory.pin([root, leaf])
    memory.pin([leaf])
    memory.unpin([root, leaf])
    assert root in memory
    memory.unpin([leaf])
    assert len(memory) == 0
    assert memory.enter(kept(of([3, 4], of([1, 2])))) is None
    memory.check()


def test_an_ancestor_on_disk_stays_for_what_is_in_memory() -> None:
    memory = Memory(1000)
    root = memory.enter(kept(of([1, 2])))
    assert root is not None
    memory.pin([root])
    leaf = put(memory, of([3, 4], root.segment))
    memory.unpin([root])
    assert root in memory
    memory.demote(1.0)
    assert leaf in memory
    leaf.kept = kept(leaf.segment)
    memory.demote(1.0)
    assert len(memory) == 0
    memory.check()


def test_a_lost_file_takes_what_hangs_on_it_unless_memory_has_it() -> None:
    memory = Memory(1000)
    root = put(memory, of([1, 2]))
    root.kept = kept(root.segment)
    leaf = put(memory, of([3, 4], root.segment))
    memory.lost(root)
    assert root in memory
    root.kept = kept(root.segment)
    memory.pin([root, leaf])
    memory.forget(root)
    assert len(memory) == 0
    assert memory.num_bytes == 0
    memory.unpin([root, leaf])
    memory.check()


def test_a_chain_of_a_thousand_leaves_at_once() -> None:
    memory = Memory(0)
    chain, above = [], None
    for token in range(1000):
        above = segment([token], above, start=token)
        entry = memory.enter(kept(above))
        assert entry is not None
        memory.pin([entry])
        chain.append(entry)
    memory.unpin(chain)
    assert len(memory) == 0


def test_the_least_recent_goes_first_leaf_before_root() -> None:
    memory = Memory(16 * 6)
    root = put(memory, of([1, 2]), 1.0)
    leaf = put(memory, of([3, 4], root.segment), 2.0)
    other = put(memory, of([5, 6]), 3.0)
    memory.touch(memory.chain(leaf), 4.0)
    put(memory, of([7, 8]), 5.0)
    assert [entry in memory for entry in (root, leaf, other)] == [True, True, False]
    put(memory, of([9, 8]), 6.0)
    assert [entry in memory for entry in (root, leaf)] == [True, False]
    assert memory.num_evicted == 2


def test_nothing_is_evicted_for_what_cannot_fit() -> None:
    memory = Memory(16 * 4)
    pinned = put(memory, of([1, 2]))
    other = put(memory, of([3, 4]))
    memory.pin([pinned])
    assert memory.put(of([5, 6, 7]), (memoryview(bytes(48)),), False, 0.0) is None
    assert other in memory
    memory.unpin([pinned])


def test_an_unpinned_entry_cannot_be_unpinned() -> None:
    memory = Memory(1000)
    entry = put(memory, of([1]))
    with pytest.raises(AssertionError, match="once too often"):
        memory.unpin([entry])


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "enter", "pin", "unpin", "unqueue", "lost", "forget", "demote", "touch"]),
        st.integers(0, 30),
        st.integers(1, 4),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps=steps)
@settings(max_examples=300)
def test_whatever_happens_every_entry_has_its_reason_and_every_byte_is_booked(
    steps: list[tuple[str, int, int, bool]],
) -> None:
    memory = Memory(16 * 20)
    entries: list[Entry] = []
    pinned: list[tuple[Entry, ...]] = []
    for number, (what, which, size, flag) in enumerate(steps):
        here = [entry for entry in entries if entry in memory]
        entry = here[which % len(here)] if here else None
        now_s = float(number)
        if what in ("put", "enter"):
            parent = entry.segment if entry is not None and flag else None
            new = of([1000 + number] * size, parent)
            hold = () if parent is None or entry is None else memory.chain(entry)
            memory.pin(hold)
            if what == "put":
                made = memory.put(new, (memoryview(bytes(new.nbytes)),), which % 2 == 0, now_s)
            else:
                made = memory.enter(kept(new))
                assert made is not None
                memory.pin(memory.chain(made))
                pinned.append(memory.chain(made))
            memory.unpin(hold)
            entries += [made] if made is not None else []
        elif what == "unpin" and pinned:
            memory.unpin(pinned.pop(which % len(pinned)))
        elif entry is None:
            continue
        elif what == "pin":
            memory.pin(memory.chain(entry))
            pinned.append(memory.chain(entry))
        elif what == "unqueue":
            if flag:
                entry.kept = kept(entry.segment)
            memory.unqueue(entry)
        elif what == "lost":
            memory.lost(entry)
        elif what == "forget":
            memory.forget(entry)
        elif what == "demote":
            memory.demote(now_s - which)
        elif what == "touch":
            memory.touch(memory.chain(entry), now_s)
        memory.check()
    for chain in pinned:
        memory.unpin(chain)
    memory.check()
    for entry in entries:
        memory.forget(entry)
    assert (len(memory), memory.num_bytes) == (0, 0)
