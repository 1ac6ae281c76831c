"""The store as the scheduler has it: what rows can begin with, and a place for what they have become.

    find      which beginning of a prompt is known; what it is made of is held until release()
    fill      that beginning, into the memory that the engine made for it
    draft     what of a row is not known yet: what is worth to be frozen
    remember  what was frozen; from then on it is found

Everything is called on Trio's thread, and only find, fill and flush wait. What is remembered is in memory at once and
on disk later (store/writer.py); what is found may come from either. A disk that fails, a keeper that is away, a file
that is damaged: fewer tokens are found, a counter moves, nothing is raised. Only flush tells.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from store.checkpoint import Destination, Part, Recall
from store.fill import Filled, Link
from store.keeping import Chain, Keeper, KeeperAway
from store.memory import Entry, Memory
from store.pieces import recalled_specs, used_bytes
from store.prefixes import Match
from store.presence import Presence
from store.reader import Reader, ReadRate
from store.segment import Segment, root_id, segment_id
from store.settings import StoreSettings
from store.stats import StoreStats
from store.trim import trim
from store.writer import Writer, WriterCounts

logger = logging.getLogger(__name__)

# How often idle entries are looked for, and the keeper is asked for its figures.
TIDY_EVERY_S = 5.0


@dataclass(eq=False, slots=True)
class Found:
    """What is known of the beginning of a prompt.

    tokens: how many it can be taken up at; recall says of what, None where it is nothing. matched: how many of the
    prompt's tokens are known in a row: more than `tokens` where no boundary is, and one there would be worth having.
    memory_tokens and disk_tokens, memory_bytes and disk_bytes: where they are; the bytes of a ring are an upper bound.

    It is held until release(), which may be called again. To be released when the row has left for good, its end frozen
    and remembered: until then draft() knows the row by it.
    """

    tokens: int = 0
    matched: int = 0
    memory_tokens: int = 0
    disk_tokens: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    recall: Recall | None = None
    _store: Store | None = None
    _chain: tuple[Entry, ...] = ()
    _pin: int | None = None

    def unmap(self) -> None:
        """What is mapped will not be used, if it has not been."""
        if self.recall is not None and self.recall.mapped is not None:
            self.recall.mapped.take()
            self.recall = replace(self.recall, mapped=None)

    def release(self) -> None:
        self.unmap()
        store, self._store = self._store, None
        if store is not None:
            store._let_go(self._chain, self._pin)


@dataclass(eq=False, slots=True)
class Draft:
    """Of a row of `stop` tokens, those from `start` on are not known. To be remembered or dropped."""

    start: int
    stop: int
    _tokens: array[int] = field(repr=False)
    _root: str
    _store: Store
    _chain: tuple[Entry, ...] | None

    def drop(self) -> None:
        """It comes to nothing. May be called again, and after it was remembered."""
        chain, self._chain = self._chain, None
        if chain is not None:
            self._store._let_go(chain)


@asynccontextmanager
async def open_store(settings: StoreSettings, keeper: Keeper | None) -> AsyncIterator[Store]:
    """The store, for as long as the block lasts. What waits to be written when it ends is lost: flush first."""
    async with trio.open_nursery() as nursery:
        store = Store(settings, keeper, nursery)
        nursery.start_soon(store._tidy)
        if store._writer is not None:
            nursery.start_soon(store._writer.run)
        try:
            yield store
        finally:
            store._is_open = False
            nursery.cancel_scope.cancel()


class Store:
    """See open_store()."""

    def __init__(self, settings: StoreSettings, keeper: Keeper | None, nursery: trio.Nursery) -> None:
        self._settings = settings
        self._nursery = nursery
        self._memory = Memory(settings.memory_bytes)
        self._reader = Reader(settings.verify)
        self._keeper = None if keeper is None else Presence(keeper)
        self._writer = (
            None
            if self._keeper is None or settings.read_only
            else Writer(self._memory, self._keeper, self._reader.precedence, settings.queue_bytes)
        )
        self._is_open = True
        self._num_held = 0
        self._num_mapping = 0  # of these, found for somebody who does not have it yet
        self._num_dropped = 0
        self._num_corrupt = 0
        self._restored = Filled()

    @property
    def holds_memory(self) -> bool:
        """Whether what is remembered can be found at once, in memory."""
        return self._settings.memory_bytes > 0

    @property
    def is_kept(self) -> bool:
        """Whether what is remembered goes to disk, too."""
        return self._writer is not None

    async def find(self, tokens: Sequence[int], namespace: str, limit: int) -> Found:
        """The longest usable beginning of a prompt, of at most `limit` tokens; reading it ahead begins."""
        root = root_id(self._settings.fingerprint, namespace)
        asked = array("I", tokens)
        kept = None if self._keeper is None else await self._ask(self._keeper, root, asked, limit)
        found = self._find(root, asked, limit, kept)
        paths = [entry.kept.path for entry in found._chain if entry.buffers is None and entry.kept is not None]
        if paths:
            self._nursery.start_soon(self._reader.read_ahead, paths)
        if paths and self._settings.maps and len(found._chain) == 1:
            # What was found is held: whoever asked has to get it.
            with trio.CancelScope(shield=True):
                self._num_mapping += 1
                await self._map(found, paths[0])
                self._num_mapping -= 1
        return found

    def find_now(self, tokens: Sequence[int], namespace: str, limit: int) -> Found:
        """As find, of what is in memory or in use now: nobody is asked, nothing waits."""
        return self._find(root_id(self._settings.fingerprint, namespace), array("I", tokens), limit, None)

    def _find(self, root: str, tokens: array[int], limit: int, kept: Chain | None) -> Found:
        entered = self._enter(kept) if kept else ()
        self._memory.pin(entered)
        match = self._match(root, tokens, limit, kept)
        chain = () if match.entry is None else self._memory.chain(match.entry)
        on_disk = {entry for entry in chain if entry.buffers is None}
        if kept and kept.tokens == match.tokens and not on_disk.issubset(entered):
            # Of two ways to the same tokens, the one whose files are pinned.
            chain = entered
        self._memory.pin(chain)
        self._memory.unpin(entered)
        pin = kept.pin if kept and kept.tokens else None
        if pin is not None and set(chain).isdisjoint(entered):
            self._release_pin(pin)
            pin = None
        if not chain:
            return Found(matched=match.matched)
        self._memory.touch(chain, trio.current_time())
        self._num_held += 1
        return self._found(chain, match, pin)

    async def fill(self, found: Found, destinations: Sequence[Destination]) -> bool:
        """Read what was found into a row's memory. False: something is missing, damaged or changed, and is forgotten
        with all that hangs on it; what the memory then holds is of no use."""
        chain = found._chain
        links = [Link(entry.segment, entry.buffers, entry.kept) for entry in chain]
        filled = await self._reader.fill(links, found.tokens, destinations)
        self._restored.memory_bytes += filled.memory_bytes
        self._restored.memory_s += filled.memory_s
        self._restored.disk_bytes += filled.disk_bytes
        self._restored.disk_s += filled.disk_s
        if filled.unreached is not None:
            logger.warning("what is known of a row cannot be brought to its memory: %s", filled.unreached)
            return False
        if filled.bad is None:
            return True
        number, why = filled.bad
        bad = chain[number]
        if isinstance(why, FileNotFoundError):
            # Somebody has deleted it; or it was known by another row's pin, and that row has gone.
            logger.info("segment %s is gone: %s", bad.segment.id, why)
        else:
            logger.warning("segment %s cannot be used: %s", bad.segment.id, why)
        self._memory.forget(bad)
        if links[number].buffers is not None:
            self._num_corrupt += 1
        elif self._keeper is not None:
            with suppress(KeeperAway):
                await self._keeper.condemn(bad.segment.id)
        return False

    async def _map(self, found: Found, path: Path) -> None:
        """Have the file that was found as memory, if most of it is wanted: a row would hold all of it. What cannot be
        mapped is read."""
        segment = found._chain[0].segment
        if found.recall is not None and 2 * found.disk_bytes >= segment.nbytes:
            tensors = [segment.tensors.index(spec) for spec in found.recall.specs]
            found.recall = replace(found.recall, mapped=await self._reader.map(path, segment, tensors))

    def draft(self, tokens: Sequence[int], namespace: str, boundaries: Sequence[int] = ()) -> Draft | None:
        """What is not known of a row that has processed these tokens; None where all of it is. What it hangs on stays
        until the draft is remembered or dropped. boundaries: where it can be taken up before its end, ascending."""
        root, known = root_id(self._settings.fingerprint, namespace), array("I", tokens)
        match = self._match_row(root, known, boundaries)
        if match.tokens == len(known):
            return None
        chain = () if match.entry is None else self._memory.chain(match.entry)
        self._memory.pin(chain)
        self._num_held += 1
        return Draft(match.tokens, len(known), known, root, self, chain)

    def remember(self, draft: Draft, part: Part) -> None:
        """Keep what was frozen for a draft. Never waits; where there is no room it is dropped and counted."""
        assert part.start == draft.start, f"[{part.start}, {part.stop}) was frozen for {draft.start}..{draft.stop}"
        assert (part.boundaries is None) == self._settings.cut_anywhere, f"boundaries {part.boundaries}"
        try:
            self._remember(draft, part)
        finally:
            draft.drop()

    def _remember(self, draft: Draft, part: Part) -> None:
        tokens = draft._tokens[: part.stop]
        # Since the draft was made another row may have left the same, or a part of it.
        match = self._match_row(draft._root, tokens, part.boundaries or ())
        if match.tokens == part.stop:
            return
        if match.tokens < part.start:
            self._num_dropped += 1
            return
        if match.tokens > part.start:
            part = trim(part, match.tokens)
        parent = None if match.entry is None else match.entry.segment.id
        own = tokens[part.start :]
        id_ = segment_id(draft._root, parent, part.start, own, part.boundaries)
        fingerprint = self._settings.fingerprint
        segment = Segment(id_, draft._root, fingerprint, parent, part.start, own, part.boundaries, part.tensors)
        chain = () if match.entry is None else self._memory.chain(match.entry)
        self._memory.pin(chain)
        entry = self._memory.put(segment, part.buffers, self._writer is not None, trio.current_time())
        if entry is None:
            # Who only reads has not promised to keep anything.
            self._num_dropped += not self._settings.read_only
        elif self._writer is not None:
            self._writer.put(entry)
        self._memory.unpin(chain)

    @property
    def num_given_up(self) -> int:
        """Segments that are neither in memory nor on disk, as there was no room for them in time."""
        return self._num_dropped + self._memory.num_given_up

    async def flush(self) -> bool:
        """Return when all that was remembered before is on disk, or was dropped; whether all of it is on disk. Raises
        KeeperAway if that has to wait."""
        if self._writer is None or self._keeper is None:
            return False
        is_on_disk = await self._writer.write_all()
        await self._keeper.flush()
        return is_on_disk

    def read_rate(self) -> ReadRate:
        """How fast rows have been filled lately, from memory and from disk; None where that is not known any more."""
        return self._reader.rate

    def stats(self) -> StoreStats:
        counts = WriterCounts() if self._writer is None else self._writer.counts
        return StoreStats(
            memory_bytes=self._memory.num_bytes,
            memory_segments=self._memory.num_resident,
            queue_bytes=0 if self._writer is None else self._writer.num_bytes,
            queue_segments=0 if self._writer is None else len(self._writer),
            evicted=self._memory.num_evicted,
            written_bytes=counts.written_bytes,
            written_segments=counts.written_segments,
            dropped=self._num_dropped + counts.dropped,
            errors=counts.errors,
            corrupt=self._num_corrupt,
            memory_restored_bytes=self._restored.memory_bytes,
            memory_restored_s=self._restored.memory_s,
            disk_restored_bytes=self._restored.disk_bytes,
            disk_restored_s=self._restored.disk_s,
            disk=None if self._keeper is None else self._keeper.last,
        )

    def check(self) -> None:
        """For when no row is left: nothing is held, sums are right. It looks at all that is known."""
        self.check_released()
        self._memory.check()

    def check_released(self) -> None:
        """For when no row is left: nothing is held, but by finds that go on."""
        num_held = self._num_held - self._num_mapping
        assert not num_held, f"{num_held} of what was found or drafted is still held"

    async def _ask(self, keeper: Keeper, root: str, tokens: array[int], limit: int) -> Chain | None:
        try:
            return await keeper.find(root, tokens, limit)
        except KeeperAway:
            return None

    def _enter(self, kept: Chain) -> tuple[Entry, ...]:
        entered = []
        for link in kept.kept:
            entry = self._memory.enter(link)
            assert entry is not None, f"segment {link.segment.id} hangs on nothing in the chain that was found"
            entered.append(entry)
        return tuple(entered)

    def _match(self, root: str, tokens: array[int], limit: int, kept: Chain | None) -> Match[Entry]:
        """Of all that is known, without what the keeper would have found if it were still on disk."""
        while True:
            match = self._memory.match(root, tokens, limit)
            if match.entry is None or kept is None:
                return match
            on_disk = [entry for entry in self._memory.chain(match.entry) if entry.buffers is None]
            gone = [entry for entry in on_disk if kept.matched < min(entry.segment.stop, match.matched)]
            if not gone:
                return match
            self._memory.forget(gone[0])

    def _match_row(self, root: str, tokens: array[int], boundaries: Sequence[int]) -> Match[Entry]:
        """What is known before the first boundary of a row that is not, though others may be known at a later one."""
        for at in boundaries:
            match = self._memory.match(root, tokens, at)
            if match.tokens < at:
                return match
        return self._memory.match(root, tokens, len(tokens))

    def _found(self, chain: tuple[Entry, ...], match: Match[Entry], pin: int | None) -> Found:
        segments = [entry.segment for entry in chain]
        ends = [*(segment.start for segment in segments[1:]), match.tokens]
        found = Found(match.tokens, match.matched, _store=self, _chain=chain, _pin=pin)
        found.recall = Recall(match.tokens, recalled_specs(segments, match.tokens))
        for entry, end, num_bytes in zip(chain, ends, used_bytes(segments, match.tokens), strict=True):
            num_tokens = end - entry.segment.start
            if entry.buffers is None:
                found.disk_tokens += num_tokens
                found.disk_bytes += num_bytes
            else:
                found.memory_tokens += num_tokens
                found.memory_bytes += num_bytes
        return found

    def _let_go(self, chain: tuple[Entry, ...], pin: int | None = None) -> None:
        self._num_held -= 1
        self._memory.unpin(chain)
        if pin is not None:
            self._release_pin(pin)

    def _release_pin(self, pin: int) -> None:
        async def release(keeper: Keeper) -> None:
            with suppress(KeeperAway):
                await keeper.release(pin)

        # The keeper forgets the pins of those who have gone.
        if self._is_open and self._keeper is not None:
            self._nursery.start_soon(release, self._keeper)

    async def _tidy(self) -> None:
        while True:
            if self._settings.demote_idle_s is not None:
                idle_since_s = trio.current_time() - self._settings.demote_idle_s
                self._memory.demote(idle_since_s)
                if self._writer is not None:
                    self._writer.put_again(self._memory.unwritten(idle_since_s))
            if self._keeper is not None:
                with suppress(KeeperAway):
                    await self._keeper.stat()
            await trio.sleep(TIDY_EVERY_S)
