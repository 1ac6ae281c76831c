"""Cut anywhere, a store serves what was whole, all that it had promised, and leaves no stray."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import trio

from store.format import CorruptSegment
from store.names import segment_path
from store.segment import Segment
from store.segment_file import verify_file
from tests.store.crashing import FOLDER, Done, Name, Recorder, Said, State, Write, killed, stopped
from tests.store.keeping import files_in, keep, opened
from tests.store.segments import bytes_for, with_tensors

Kept = dict[str, Segment]


def chained(segments: Kept) -> set[str]:
    """Those whose parents are there, too."""
    whole: set[str] = set()
    for id_, each in sorted(segments.items(), key=lambda item: item[1].start):
        if each.parent is None or each.parent in whole:
            whole.add(id_)
    return whole


async def work(folder: Path, files: Recorder, random: Random) -> Kept:
    """Conversations written, dropped and evicted, with a restart between. Returns all there ever was, by id."""
    every: Kept = {}
    for _ in range(2):
        async with opened(folder, files, max_bytes=8 * 36_000) as keeper:
            for _ in range(8):
                parent = random.choice([None, *every.values()])
                start = None if parent is None else random.randint(parent.start + 1, parent.stop)
                new = with_tensors([random.randrange(100) for _ in range(9)], parent, start, dim=random.choice((1, 64)))
                every[new.id] = new
                if await keep(keeper, new, files) == "kept":
                    files.say(new.id)
            temporary = await keeper.reserve(10)
            if temporary is not None and random.random() < 0.5:
                await keeper.abandon(temporary)
            await keeper.condemn(random.choice(list(every)))
    return every


def promised(done: list[Done]) -> set[str]:
    """Ids of what was said to be kept, and was not deleted afterwards."""
    kept: set[str] = set()
    for each in done:
        match each:
            case Said(id_):
                kept.add(id_)
            case Name(name=name, inode=None):
                kept.discard(name.removesuffix(".segment"))
    return kept


def there(state: State, folder: Path, every: Kept) -> set[str]:
    """Ids of what is whole in a state, with all it hangs on."""
    found = {}
    for fan, inode in state.names.get(folder, {}).items():
        if inode == FOLDER:
            for name in state.names.get(folder / fan, {}):
                found[name.removesuffix(".segment")] = every[name.removesuffix(".segment")]
    return chained(found)


def served(folder: Path) -> set[str]:
    """Ids of what a start serves, all of it checked in full. No other file is left."""

    async def start() -> set[str]:
        async with opened(folder) as keeper:
            return {entry.segment.id for entry in keeper._shelf.entries()}

    ids = trio.run(start)
    for id_ in ids:
        path = segment_path(folder, id_)
        try:
            stored = verify_file(path)
        except CorruptSegment as corrupt:
            raise AssertionError(f"served and damaged: {corrupt}") from corrupt
        data = path.read_bytes()
        for place, buffer in zip(stored.places, bytes_for(stored.segment), strict=True):
            assert data[place : place + len(buffer)] == buffer
    assert files_in(folder) == {f"{id_}.segment" for id_ in ids}
    return ids


def crash(tmp_path: Path, seed: int, num_stops: int, ignores: tuple[str, ...] = ()) -> None:
    """Work once, and crash after every call."""
    random = Random(seed)
    recorder = Recorder(ignores)
    folder = tmp_path / f"store-{seed}"
    every = trio.run(work, folder, recorder, random)
    assert len(promised(recorder.done)) > 3
    for cut in range(len(recorder.done) + 1):
        done = recorder.done[:cut]
        num_kills = 2 if done and isinstance(done[-1], Write) else 1
        for number in range(num_kills + num_stops):
            state = (killed if number < num_kills else stopped)(done, random)
            place = tmp_path / f"crash-{seed}-{cut}-{number}"
            state.put(folder, place)
            found = served(place)
            assert promised(done) <= found, f"promised and lost after {cut} calls"
            if number < num_kills:
                assert found == there(state, folder, every), f"after {cut} calls"


def test_a_crash_at_any_call_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    crash(tmp_path, 1, num_stops=1)


@pytest.mark.slow
def test_many_crashes_lose_nothing_that_was_promised(tmp_path: Path) -> None:
    for seed in range(2, 12):
        crash(tmp_path, seed, num_stops=5)


@pytest.mark.parametrize("missing", ["sync", "sync_folder"])
def test_without_a_sync_the_crashes_would_tell(tmp_path: Path, missing: str) -> None:
    with pytest.raises(AssertionError, match=r"served and damaged|promised and lost"):
        crash(tmp_path, 1, 3, (missing,))
