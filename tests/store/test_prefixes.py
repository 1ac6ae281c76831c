import time
from array import array
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from store.prefixes import PrefixIndex
from tests.store.segments import ROOT, Held, segment

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def index(*entries: Held) -> PrefixIndex[Held]:
    found: PrefixIndex[Held] = PrefixIndex()
    for entry in entries:
        found.insert(entry)
        found.check()
    return found


class AgainstModel(RuleBasedStateMachine):
    """The index beside a plain list of (entry, all its tokens), each question answered by looking at every entry."""

    def __init__(self) -> None:
        super().__init__()
        self.index: PrefixIndex[Held] = PrefixIndex()
        self.model: dict[str, tuple[Held, list[int]]] = {}

    @rule(data=st.data(), own=tokens, cut=st.booleans(), namespace=st.sampled_from(["", "other"]))
    def insert(self, data: st.DataObject, own: list[int], cut: bool, namespace: str) -> None:
        before: list[int] = []
        if self.model and data.draw(st.booleans()):
            parent, whole = self.model[data.draw(st.sampled_from(sorted(self.model)))]
            start = data.draw(st.integers(parent.segment.start + 1, parent.segment.stop))
            before = whole[:start]
            namespace = "" if parent.segment.root == ROOT else "other"
            above = parent.segment
        else:
            above, start = None, 0
        bounds = None
        if cut:
            bounds = tuple(sorted(data.draw(st.sets(st.integers(start + 1, start + len(own))))))
        entry = Held(segment(own, above, start, bounds, namespace=namespace))
        if entry.segment.id in self.model:
            with pytest.raises(ValueError, match="already"):
                self.index.insert(entry)
        else:
            self.index.insert(entry)
            self.model[entry.segment.id] = entry, before + own

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if not self.model:
            return
        entry, _ = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        if any(other.segment.parent == entry.segment.id for other, _ in self.model.values()):
            with pytest.raises(ValueError, match="children"):
                self.index.remove(entry)
        else:
            self.index.remove(entry)
            del self.model[entry.segment.id]

    @rule(asked=st.lists(st.integers(0, 1), max_size=14), limit=st.integers(0, 14))
    def match(self, asked: list[int], limit: int) -> None:
        matched = best = 0
        servers: set[str] = set()
        for id_, (entry, whole) in self.model.items():
            if entry.segment.root != ROOT:
                continue
            common = next((i for i, (a, b) in enumerate(zip(asked, whole, strict=False)) if a != b), None)
            common = min(len(asked), len(whole)) if common is None else common
            matched = max(matched, common)
            if common <= entry.segment.start:
                continue
            served = entry.segment.last_boundary(min(common, limit)) or 0
            if served > best:
                best, servers = served, set()
            if served == best > 0:
                servers.add(id_)
        found = self.index.match(ROOT, asked, limit)
        assert (found.matched, found.tokens) == (matched, best)
        assert found.entry is None if best == 0 else found.entry is not None and found.entry.segment.id in servers

    @invariant()
    def holds(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)
        for id_, (entry, whole) in self.model.items():
            assert self.index.get(id_) is entry
            chain = self.index.chain(entry)
            assert chain[0].segment.parent is None
            assert chain[-1] is entry
            covered: list[int] = []
            for link in chain:
                assert 0 <= link.segment.start <= len(covered)
                covered = covered[: link.segment.start] + list(link.segment.tokens)
            assert covered == whole


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60)


def test_a_longer_prompt_is_served_what_is_kept() -> None:
    entry = Held(segment([7]))
    found = index(entry).match(ROOT, [7, 8, 9], 2)
    assert (found.matched, found.tokens, found.entry) == (1, 1, entry)


def test_what_has_boundaries_is_served_at_them_only_and_never_a_shorter_prefix() -> None:
    held = index(Held(segment(range(100), boundaries=(40, 80))))
    for limit, tokens in ((39, 0), (40, 40), (79, 40), (80, 80), (99, 80)):
        assert held.match(ROOT, range(100), limit).tokens == tokens
    diverging = [*range(60), 0]
    assert (held.match(ROOT, diverging, 61).matched, held.match(ROOT, diverging, 61).tokens) == (60, 40)


def test_branches_hang_inside_their_trunk() -> None:
    trunk = Held(segment(range(10)))
    branch = Held(segment([90, 91], trunk.segment, 6))
    held = index(trunk, branch)
    found = held.match(ROOT, [*range(6), 90, 91, 92], 9)
    assert (found.tokens, found.entry) == (8, branch)
    assert held.chain(branch) == (trunk, branch)
    assert held.match(ROOT, range(10), 10).entry is trunk
    assert held.num_children(trunk.segment.id) == 1


def test_what_has_no_place_is_refused_and_changes_nothing() -> None:
    trunk, gone = Held(segment(range(4))), Held(segment(range(5)))
    held = index(trunk)
    for misplaced in (
        segment([1], gone.segment),
        segment([1], trunk.segment, 0),
        segment([1], trunk.segment, 5),
        segment([1], trunk.segment, 4, namespace="other"),
        segment([1], None, 1),
        segment([], None, 0),
        segment([1, 2], None, 0, (3,)),
        segment([1, 2], trunk.segment, 4, (4,)),
    ):
        with pytest.raises(ValueError, match=misplaced.id):
            held.insert(Held(misplaced))
        held.check()
    assert [entry.segment for entry in held] == [trunk.segment]


def test_what_was_inserted_and_removed_leaves_nothing() -> None:
    trunk = Held(segment(range(100)))
    held = index(trunk)
    for start in range(1, 100):
        branch = Held(segment([1000], trunk.segment, start, (start + 1,)))
        held.insert(branch)
        held.remove(branch)
    assert len(list(held._nodes())) == 2
    held.remove(trunk)
    held.check()
    assert list(held._nodes()) == []


def seconds_of_match(num_conversations: int) -> float:
    """Least time of a lookup of 4,000 tokens beside so many conversations with the same beginning."""
    random = Random(1)
    system = array("I", (random.randrange(50_000) for _ in range(2000)))
    held: PrefixIndex[Held] = PrefixIndex()
    for _ in range(num_conversations):
        turn = [random.randrange(50_000) for _ in range(50)]
        first = Held(segment([*system, *turn]))
        held.insert(first)
        held.insert(Held(segment([random.randrange(50_000) for _ in range(50)], first.segment)))
    asked = array("I", [*system, *(random.randrange(50_000) for _ in range(2000))])
    times = []
    for _ in range(50):
        began = time.perf_counter()
        assert held.match(ROOT, asked, 3999).tokens >= 2000
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.slow
def test_a_lookup_does_not_depend_on_how_many_share_the_beginning() -> None:
    assert seconds_of_match(1000) < 3 * seconds_of_match(1) + 1e-4
