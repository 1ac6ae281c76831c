"""Which kept segments a sequence of tokens begins with.

A trie of tokens for each root, with compressed edges. A segment is registered on the edges of its own tokens, from its
start to its stop; the edges before are its ancestors', which stay as long as it does. Edges are cut wherever a segment
starts, stops or has a boundary, so of an edge one asks two things only: who serves every token count on it, and who
serves its end. That makes a lookup one walk down the trie, in the length of the prompt, however many segments share its
beginning.

The design speaks of chained digests on a grid of 256 tokens, with the tokens compared afterwards: here the tokens
decide directly and at every place, and ids only name segments.

Half-open: a node's edge holds the tokens [node.begin, node.depth); the token counts on it are (begin, depth].
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from store.segment import Segment


class HasSegment(Protocol):
    @property
    def segment(self) -> Segment: ...


Entry = TypeVar("Entry", bound=HasSegment)


@dataclass(frozen=True, slots=True)
class Match(Generic[Entry]):
    """matched: how many of the tokens asked for lie on some registered path. tokens: the highest token count within
    the limit that can be served, by `entry` and its ancestors; 0 and None where there is none."""

    matched: int
    tokens: int
    entry: Entry | None


class _Node(Generic[Entry]):
    """An edge and its end. label: its tokens. passing: how many entries lie on it. anywhere: those of them that serve
    any token count on it. at_end: those that have a boundary at its end. marks: how many starts, stops and boundaries
    are at its end: while there are any it is not joined with the edge below."""

    __slots__ = ("anywhere", "at_end", "children", "depth", "label", "marks", "passing", "up")

    def __init__(self, up: _Node[Entry] | None, label: array[int], depth: int) -> None:
        self.up = up
        self.label = label
        self.depth = depth
        self.passing = 0
        self.marks = 0
        self.anywhere: dict[str, Entry] = {}
        self.at_end: dict[str, Entry] = {}
        self.children: dict[int, _Node[Entry]] = {}

    @property
    def begin(self) -> int:
        return self.depth - len(self.label)


class _Record(Generic[Entry]):
    """An entry, the node at its stop, and how many entries name it as their parent."""

    __slots__ = ("end", "entry", "num_children")

    def __init__(self, entry: Entry, end: _Node[Entry]) -> None:
        self.entry = entry
        self.end = end
        self.num_children = 0


class PrefixIndex(Generic[Entry]):
    def __init__(self) -> None:
        self._roots: dict[str, _Node[Entry]] = {}
        self._records: dict[str, _Record[Entry]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Entry]:
        return (record.entry for record in self._records.values())

    def __contains__(self, id_: str) -> bool:
        return id_ in self._records

    def get(self, id_: str) -> Entry | None:
        record = self._records.get(id_)
        return None if record is None else record.entry

    def num_children(self, id_: str) -> int:
        """How many entries hang on this one. KeyError if it is not there."""
        return self._records[id_].num_children

    def accepts(self, segment: Segment) -> bool:
        """Whether what the segment hangs on is there."""
        if segment.parent is None:
            return segment.start == 0
        record = self._records.get(segment.parent)
        if record is None:
            return False
        parent = record.entry.segment
        return parent.root == segment.root and parent.start < segment.start <= parent.stop

    def insert(self, entry: Entry) -> None:
        """ValueError, and nothing changed, if it is there, holds no token, or what it hangs on is not there."""
        segment = entry.segment
        if segment.id in self._records:
            raise ValueError(f"segment {segment.id} is there already")
        bounds = segment.boundaries or ()
        if not segment.tokens or not all(segment.start < at <= segment.stop for at in bounds):
            raise ValueError(f"segment {segment.id} covers {segment.start}..{segment.stop}, with boundaries {bounds}")
        if not self.accepts(segment):
            raise ValueError(f"segment {segment.id} hangs on nothing: {segment.parent} at {segment.start}")
        if segment.parent is None:
            node = self._roots.setdefault(segment.root, _Node(None, array("I"), 0))
        else:
            parent = self._records[segment.parent]
            parent.num_children += 1
            node = _cut(_at(parent.end, segment.start), segment.start)
        node.marks += 1
        for at in sorted({segment.stop, *bounds}):
            for passed in _extend(node, segment.tokens[node.depth - segment.start : at - segment.start]):
                passed.passing += 1
                if segment.boundaries is None:
                    passed.anywhere[segment.id] = entry
                node = passed
            node.marks += 1
        for at in bounds:
            _at(node, at).at_end[segment.id] = entry
        self._records[segment.id] = _Record(entry, node)

    def remove(self, entry: Entry) -> None:
        """ValueError, and nothing changed, if it is not there or has children."""
        segment = entry.segment
        record = self._records.get(segment.id)
        if record is None or record.num_children:
            raise ValueError(f"segment {segment.id} " + ("is not there" if record is None else "has children"))
        del self._records[segment.id]
        if segment.parent is not None:
            self._records[segment.parent].num_children -= 1
        marked = {segment.stop, *(segment.boundaries or ())}
        node = record.end
        while True:
            above = node.up
            node.marks -= node.depth in marked or node.depth == segment.start
            if node.depth == segment.start:
                _tidy(node)
                break
            node.passing -= 1
            node.anywhere.pop(segment.id, None)
            node.at_end.pop(segment.id, None)
            _tidy(node)
            assert above is not None, f"the trie's root is at {node.depth}, past {segment.start}"
            node = above
        if segment.parent is None and not node.children:
            del self._roots[segment.root]

    def match(self, root: str, tokens: Sequence[int], limit: int) -> Match[Entry]:
        """The longest that is kept of the first `limit` tokens, and how many of `tokens` are kept in a row at all."""
        asked = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
        node = self._roots.get(root)
        matched, best, server = 0, 0, None
        while node is not None and matched == node.depth and matched < len(asked):
            node = node.children.get(asked[matched])
            if node is None:
                break
            begin = matched
            matched += _common(node.label, asked, begin)
            usable = min(matched, limit)
            if node.anywhere and usable > begin:
                best, server = usable, next(iter(node.anywhere.values()))
            elif node.at_end and usable == node.depth:
                best, server = usable, next(iter(node.at_end.values()))
        return Match(matched, best, server)

    def chain(self, entry: Entry) -> tuple[Entry, ...]:
        """The entry and all it hangs on, from the one that starts at 0 to itself."""
        found = [entry]
        while (parent := found[-1].segment.parent) is not None:
            found.append(self._records[parent].entry)
        return tuple(reversed(found))

    def check(self) -> None:
        """Everything derived, derived anew from the entries alone."""
        children = dict.fromkeys(self._records, 0)
        passing: dict[int, int] = {}
        marks: dict[int, int] = {}
        for id_, record in self._records.items():
            segment, node = record.entry.segment, record.end
            assert id_ == segment.id, f"{segment.id} is registered as {id_}"
            assert self.accepts(segment), f"{id_} hangs on nothing"
            if segment.parent is not None:
                children[segment.parent] += 1
            assert node.depth == segment.stop, f"{id_} stops at {segment.stop}, its node at {node.depth}"
            tokens, found = self._tokens(record.entry), array("I")
            bounds = set(segment.boundaries or ())
            marked = {segment.stop, *bounds}
            while node.depth > segment.start:
                passing[id(node)] = passing.get(id(node), 0) + 1
                marks[id(node)] = marks.get(id(node), 0) + (node.depth in marked)
                assert (id_ in node.anywhere) == (segment.boundaries is None), f"{id_} at {node.depth}"
                assert (id_ in node.at_end) == (node.depth in bounds), f"{id_} at {node.depth}"
                found = node.label + found
                bounds.discard(node.depth)
                assert node.up is not None, f"{id_} is above the trie's root"
                node = node.up
            assert node.depth == segment.start, f"{id_} starts at {segment.start}, its edges at {node.depth}"
            assert not bounds, f"{id_} has no node for its boundaries {bounds}"
            marks[id(node)] = marks.get(id(node), 0) + 1
            while node.up is not None:
                found = node.label + found
                node = node.up
            assert node is self._roots[segment.root], f"{id_} is in another trie than its root's"
            assert found == tokens, f"{id_} lies on other tokens than its own"
        for id_, record in self._records.items():
            assert record.num_children == children[id_], f"{id_}: {record.num_children} children, not {children[id_]}"
        for node in self._nodes():
            assert node.passing == passing.get(id(node), 0), f"{node.passing} pass {node.depth}"
            assert node.marks == marks.get(id(node), 0), f"{node.marks} marks at {node.depth}"
            assert node.marks or len(node.children) > 1, f"nothing happens at {node.depth}"
            for first, child in node.children.items():
                assert child.up is node, f"the node at {child.depth} has another parent"
                assert child.begin == node.depth, f"the edge to {child.depth} begins at {child.begin}, not {node.depth}"
                assert child.label[0] == first, f"the edge to {child.depth} begins with another token"

    def _tokens(self, entry: Entry) -> array[int]:
        tokens = array("I")
        for link in self.chain(entry):
            tokens = tokens[: link.segment.start] + link.segment.tokens
        return tokens

    def _nodes(self) -> Iterator[_Node[Entry]]:
        left = list(self._roots.values())
        while left:
            node = left.pop()
            yield node
            left.extend(node.children.values())


def _at(node: _Node[Entry], depth: int) -> _Node[Entry]:
    """The node at or above `node` on whose edge the token count `depth` lies."""
    while depth <= node.begin and node.up is not None:
        node = node.up
    return node


def _cut(node: _Node[Entry], depth: int) -> _Node[Entry]:
    """The node that ends at `depth`, on node's edge. Where one has to be made it is the upper one: who holds `node`
    as its end keeps it."""
    if depth == node.depth:
        return node
    assert node.begin < depth < node.depth, f"{depth} is not in {node.begin}..{node.depth}"
    assert node.up is not None, f"the trie's root is at {node.depth}"
    length = depth - node.begin
    upper: _Node[Entry] = _Node(node.up, node.label[:length], depth)
    upper.passing = node.passing
    upper.anywhere = dict(node.anywhere)
    node.up.children[upper.label[0]] = upper
    node.label = node.label[length:]
    node.up = upper
    upper.children[node.label[0]] = node
    return upper


def _extend(node: _Node[Entry], tokens: array[int]) -> Iterator[_Node[Entry]]:
    """The nodes from below `node` to where `tokens` end, made where they are missing."""
    done = 0
    while done < len(tokens):
        child = node.children.get(tokens[done])
        if child is None:
            child = _Node(node, tokens[done:], node.depth + len(tokens) - done)
            node.children[tokens[done]] = child
        else:
            child = _cut(child, child.begin + _common(child.label, tokens, done))
        done += len(child.label)
        node = child
        yield node


def _tidy(node: _Node[Entry]) -> None:
    """Unlink an edge on which nothing lies; join one with the edge below where nothing distinguishes them."""
    above = node.up
    if above is None:
        return
    if not node.passing:
        assert not node.children, f"{len(node.children)} edges hang on the unused one to {node.depth}"
        del above.children[node.label[0]]
    elif not node.marks and len(node.children) == 1:
        (below,) = node.children.values()
        below.label = node.label + below.label
        below.up = above
        above.children[below.label[0]] = below


def _common(label: array[int], tokens: array[int], begin: int) -> int:
    """How many tokens of `label` come at `begin` of `tokens`."""
    most = min(len(label), len(tokens) - begin)
    if label[:most] == tokens[begin : begin + most]:
        return most
    low, high = 0, most
    # The first `low` are equal, the first `high` are not.
    while high - low > 1:
        middle = (low + high) // 2
        if label[low:middle] == tokens[begin + low : begin + middle]:
            low = middle
        else:
            high = middle
    return low
