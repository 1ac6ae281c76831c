"""Which files go: against a list that is sorted anew for each question."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from store.budget import Budget, Entry
from store.keeping import Kept
from store.names import segment_path
from store.scan import File, Scan
from store.segment import Segment
from store.shelf import NUM_RECENT, Shelf
from tests.store.segments import segment

FOLDER = Path("/store")
names = st.sampled_from(["mine", "theirs"])


def shelf(max_bytes: int | None = None, fingerprints: frozenset[str] = frozenset(["mine"])) -> Shelf:
    return Shelf(FOLDER, Budget(max_bytes, 0, fingerprints), count(1))


def insert(into: Shelf, of: Segment, nbytes: int = 1) -> None:
    into.insert(replace(of, tensors=()), Kept(of, segment_path(FOLDER, of.id), ()), nbytes)


class AgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shelf = shelf()
        self.sizes: dict[str, int] = {}
        self.all: dict[str, Segment] = {}
        self.used: dict[str, float] = {}
        self.in_use = {"mine"}
        self.pins: dict[int, list[str]] = {}
        self.uses = count(1)

    def chain(self, id_: str) -> Iterator[str]:
        """From the leaf to the root."""
        at: str | None = id_
        while at is not None:
            yield at
            at = self.all[at].parent

    def use(self, id_: str) -> None:
        for each in self.chain(id_):
            self.used[each] = next(self.uses)

    def is_pinned(self, id_: str) -> bool:
        return any(id_ in pinned for pinned in self.pins.values())

    @rule(data=st.data(), nbytes=st.integers(0, 5), fingerprint=names, tokens=st.lists(st.integers(0, 3), min_size=1))
    def add(self, data: st.DataObject, nbytes: int, fingerprint: str, tokens: list[int]) -> None:
        parent = data.draw(st.sampled_from([None, *self.all.values()]))
        new = segment(tokens, parent, fingerprint=fingerprint if parent is None else parent.fingerprint)
        if new.id in self.all:
            return
        assert self.shelf.accepts(new)
        insert(self.shelf, new, nbytes)
        self.all[new.id], self.sizes[new.id] = new, nbytes
        self.use(new.id)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        of = data.draw(st.sampled_from(list(self.all.values())))
        tokens: list[int] = []
        for each in reversed(list(self.chain(of.id))):
            tokens += self.all[each].tokens
        match, chain = self.shelf.find(of.root, tokens, len(tokens))
        assert match.tokens == match.matched == len(tokens)
        found = [entry.segment.id for entry in chain]
        assert found == list(reversed(list(self.chain(found[-1]))))
        self.use(found[-1])
        if data.draw(st.booleans()):
            self.pins[self.shelf.pin(chain)] = found

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(list(self.pins)))
        self.shelf.unpin(pin)
        del self.pins[pin]

    @rule(fingerprint=names)
    def use_model(self, fingerprint: str) -> None:
        self.shelf.budget.use(fingerprint)
        self.in_use.add(fingerprint)

    @rule(lacking=st.integers(0, 20))
    def make_room(self, lacking: int) -> None:
        order = sorted(self.all.values(), key=lambda of: (of.fingerprint in self.in_use, self.used[of.id]))
        going, num_bytes = [], 0
        for each in order:
            if num_bytes < lacking and not self.is_pinned(each.id):
                going.append(each.id)
                num_bytes += self.sizes[each.id]
        gone = self.shelf.make_room(lacking)
        if num_bytes < lacking:
            assert gone is None
            return
        assert gone == [(segment_path(FOLDER, id_), self.sizes[id_]) for id_ in going]
        for id_ in going:
            assert not any(each.parent == id_ for each in self.all.values())
            del self.all[id_]

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        top = data.draw(st.sampled_from(sorted(self.all)))
        below = {id_ for id_ in self.all if top in self.chain(id_)}
        assert {entry.segment.id for entry in self.shelf.drop_with_all(top)} == below
        self.all = {id_: of for id_, of in self.all.items() if id_ not in below}
        self.pins = {pin: [id_ for id_ in pinned if id_ not in below] for pin, pinned in self.pins.items()}

    @invariant()
    def holds(self) -> None:
        self.shelf.check()
        budget = self.shelf.budget
        assert len(self.shelf) == len(self.all)
        assert budget.our_bytes == sum(self.sizes[id_] for id_ in self.all)
        foreign = [id_ for id_, of in self.all.items() if of.fingerprint not in self.in_use]
        assert budget.foreign_bytes == sum(self.sizes[id_] for id_ in foreign)


TestAgainstList = AgainstList.TestCase
TestAgainstList.settings = settings(max_examples=50)


def scanned(*used: tuple[Segment, int]) -> Scan:
    return Scan([(of, File(segment_path(FOLDER, of.id), 1, used_ns)) for of, used_ns in used])


def test_what_a_crash_left_of_the_order_of_use_is_made_whole() -> None:
    """The leaf was noted and its trunk was not; a name that is used by nobody is older."""
    trunk, other = segment([1]), segment([2])
    leaf = segment([3], trunk)
    loaded = shelf()
    assert loaded.load(scanned((trunk, 10), (leaf, 30), (other, 20))) == []
    loaded.check()
    going, _ = loaded.budget.going(3)
    assert [each.segment for each in going if isinstance(each, Entry)] == [other, leaf, trunk]


def test_what_hangs_on_nothing_is_told() -> None:
    gone = segment([1])
    child, far = segment([2], gone), segment([3], segment([2], gone))
    good = segment([4])
    beyond = replace(segment([5], good), start=2)
    loaded = shelf()
    orphans = loaded.load(scanned((child, 1), (good, 1), (far, 1), (beyond, 1)))
    assert {file.path for file in orphans} == {segment_path(FOLDER, of.id) for of in (child, far, beyond)}
    assert [entry.segment for entry in loaded.entries()] == [good]


def test_headers_are_held_for_the_last_used() -> None:
    held = shelf()
    for num in range(NUM_RECENT + 10):
        insert(held, segment([num]))
    entries = list(held.entries())
    assert [held.recent(entry) is not None for entry in entries] == [False] * 10 + [True] * NUM_RECENT


def test_room_is_lacking_by_the_limit_and_by_the_disk() -> None:
    budget = Budget(100, 1000, frozenset())
    budget.other_bytes, budget.sidecar_bytes = 30, 20
    budget.reserved[FOLDER / "x"] = 10
    assert budget.over_bytes() == 0
    assert budget.over_bytes(50) == 10
    plenty = 1 << 30
    assert budget.lacking_bytes(40, plenty) == 0
    assert budget.lacking_bytes(45, plenty) == 5
    least = budget.lacking_bytes(40, 0)
    assert budget.lacking_bytes(40, least) == 0
    assert budget.lacking_bytes(40, least - 7) == 7
    assert least > 1000 + 10 + 40
    assert Budget(None, 0).over_bytes(1 << 60) == 0
