"""Who may talk to the daemon: our own user, root, and those that --allow-user and --allow-group name.

It is the kernel's word on the peer that decides (scheduler/peer.py). The mode of the socket's file has to let the same
people reach it at all, and no more of the others than that takes.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass

from scheduler.peer import Peer


class UnknownName(Exception):
    """There is no such user or group; the message names it."""


@dataclass(frozen=True, slots=True)
class Access:
    """uids: users beside our own and root. gids: groups, as a peer's own or as one of its others."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @classmethod
    def named(cls, users: Collection[str], groups: Collection[str]) -> Access:
        """Names or numbers. Raises UnknownName."""
        return cls(frozenset(map(_uid, users)), frozenset(map(_gid, groups)))

    def admits(self, peer: Peer) -> bool:
        return peer.uid in (os.geteuid(), 0) or peer.uid in self.uids or not self.gids.isdisjoint(peer.gids)

    @property
    def mode(self) -> int:
        """Of the socket's file. One group can be told to the file system; of anything else only we know."""
        if not self.uids and not self.gids:
            return 0o600
        return 0o660 if self.group is not None else 0o666

    @property
    def group(self) -> int | None:
        """The group that the socket's file is given to, if it is one that decides."""
        (gid,) = self.gids if len(self.gids) == 1 and not self.uids else (None,)
        return gid


def _uid(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UnknownName(f"there is no user {name!r} on this machine") from None


def _gid(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise UnknownName(f"there is no group {name!r} on this machine") from None
