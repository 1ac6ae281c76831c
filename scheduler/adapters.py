"""The adapters that clients can name: loaded at the start or by a message, and forgotten when nobody needs them.

A name stands for what its folder held when it was loaded. Requests keep to that: one that is under way when its name
gets other weights, or goes, ends with those that it began with. They leave memory with the last that needs them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from lanes.lane import AdapterError, LoadedAdapter
from scheduler.adapter_files import read_adapter
from scheduler.errors import Refused
from scheduler.loop import Loop

logger = logging.getLogger(__name__)

# The adapter of requests that name none, where one is called so, and the word for none at all.
DEFAULT, NONE = "default", "none"
# Each makes a step's reads of its layers' stacks dearer for all; one who needs so many has mistaken a folder.
MOST_ADAPTERS = 256
NAMES_SHOWN = 20


def namespace_of(salt: str | None, digest: str | None) -> str:
    """Whose remembered prompts a request shares: those with the same salt and the same adapter, by its content. No two
    pairs give the same text, whatever a salt may be."""
    salted = "" if salt is None else f"salt {salt}"
    return salted if digest is None else f"adapter {digest} {salted}"


@dataclass(frozen=True, slots=True)
class Named:
    """What a name stands for."""

    folder: str
    loaded: LoadedAdapter


class AdapterNames:
    """The names and, by digest, how many requests need each adapter."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._named: dict[str, Named] = {}
        self._needed: Counter[str] = Counter()
        self._loading: Counter[str] = Counter()

    async def load_all(self, folders: Mapping[str, str]) -> None:
        """Raises Refused at the first that cannot be loaded."""
        for name, folder in folders.items():
            await self.load(name, folder)

    async def load(self, name: str, folder: str) -> None:
        """Have the name stand for what is in the folder. Raises Refused, and then it stands for what it did before."""
        if name == NONE:
            raise Refused("bad_adapter", f'"{NONE}" is what requests say that want no adapter: choose another name')
        if name not in self._named and len(self._named) >= MOST_ADAPTERS:
            raise Refused("bad_adapter", f"{MOST_ADAPTERS} adapters are loaded, which is the limit: unload one")
        try:
            adapter = await trio.to_thread.run_sync(read_adapter, Path(folder))
            self._loading[adapter.digest] += 1
            try:
                loaded = await self._loop.thread.run(self._loop.engine.load_adapter, adapter)
                before, self._named[name] = self._named.get(name), Named(folder, loaded)
            finally:
                self._loading -= Counter([adapter.digest])
                self._forget_if_unneeded(adapter.digest)
        except AdapterError as error:
            raise Refused("bad_adapter", f"the adapter in {folder} cannot be used: {error}") from error
        if before is not None:
            self._forget_if_unneeded(before.loaded.digest)
        logger.info("adapter %s is %s: rank %d, %d layers", name, folder, loaded.rank, loaded.num_layers)

    def unload(self, name: str) -> None:
        """Have the name stand for nothing. Raises Refused."""
        digest = self._of(name).loaded.digest
        del self._named[name]
        self._forget_if_unneeded(digest)
        logger.info("adapter %s is unloaded", name)

    def digest_of(self, name: str | None) -> str | None:
        """What a request with this name is answered with; None: the model as it is. Raises Refused."""
        if name == NONE or (name is None and DEFAULT not in self._named):
            return None
        return self._of(name or DEFAULT).loaded.digest

    def require(self, digest: str | None) -> None:
        """Raises Refused where the adapter has gone while its request was looked at."""
        if digest is not None and not self._is_needed(digest):
            raise Refused("unknown_adapter", "the adapter has been unloaded meanwhile")

    def hold(self, digest: str | None, number: int = 1) -> None:
        """So many requests more need it."""
        if digest is not None:
            self._needed[digest] += number

    def release(self, digest: str | None) -> None:
        """One request less needs it."""
        if digest is not None:
            self._needed[digest] -= 1
            self._forget_if_unneeded(digest)

    def report(self) -> dict[str, Any]:
        """For status: by name."""
        return {
            name: {
                "folder": named.folder,
                "digest": named.loaded.digest,
                "rank": named.loaded.rank,
                "layers": named.loaded.num_layers,
                "bytes": named.loaded.num_bytes,
                "requests": self._needed[named.loaded.digest],
            }
            for name, named in sorted(self._named.items())
        }

    def _of(self, name: str) -> Named:
        if name not in self._named:
            known = f"there are {', '.join(sorted(self._named)[:NAMES_SHOWN])}" if self._named else "none is loaded"
            raise Refused("unknown_adapter", f"there is no adapter {name}: {known}")
        return self._named[name]

    def check(self) -> None:
        """For when no request is left."""
        needed = {digest: number for digest, number in self._needed.items() if number}
        assert not needed, f"no request is left, but adapters are needed: {needed}"

    def _is_needed(self, digest: str) -> bool:
        if self._needed[digest] > 0 or self._loading[digest] > 0:
            return True
        return any(named.loaded.digest == digest for named in self._named.values())

    def _forget_if_unneeded(self, digest: str) -> None:
        """Between two turns, if it is so then still."""

        async def forget() -> None:
            if not self._is_needed(digest):
                del self._needed[digest]
                await self._loop.thread.run(self._loop.engine.unload_adapter, digest)

        if not self._is_needed(digest):
            self._loop.soon(forget)
