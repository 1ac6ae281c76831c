"""Where the daemon's clients come in: a socket of our own at a path, or the one that the service manager opened."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import trio

from scheduler.access import Access, UnknownName
from scheduler.activation import BadSocket, inherited_socket
from scheduler.listener import SocketUnavailable, check_path, default_socket_path, inherit, listen
from scheduler.options import Options
from scheduler.usage import UsageError


@dataclass(frozen=True, slots=True)
class Door:
    """inherited: the service manager's socket; None where the one at `path` is ours to open. access: who is let in."""

    inherited: socket.socket | None
    path: Path
    access: Access

    @classmethod
    def for_options(cls, options: Options) -> Door:
        """To be called once, before any other descriptor is opened. Raises UsageError."""
        path = Path(options.socket).expanduser() if options.socket else default_socket_path()
        try:
            inherited = inherited_socket()
            access = Access.named(options.allow_user, options.allow_group)
            if inherited is None:
                # At this moment, so that nobody waits for a model first.
                check_path(path, access)
        except BadSocket as bad:
            raise UsageError(f"{bad}.") from None
        except UnknownName as unknown:
            raise UsageError(f"--allow-user, --allow-group: {unknown}.") from None
        except SocketUnavailable as unavailable:
            raise UsageError(f"--socket: {unavailable}") from None
        return cls(inherited, path, access)

    @property
    def name(self) -> str:
        """What to call the socket in a message."""
        if self.inherited is None:
            return str(self.path)
        address = self.inherited.getsockname()
        return address if isinstance(address, str) else "@" + os.fsdecode(address[1:])

    def open(self) -> AbstractAsyncContextManager[trio.SocketListener]:
        """The socket that listens, for as long as the block lasts. Entering raises SocketUnavailable."""
        return listen(self.path, self.access) if self.inherited is None else inherit(self.inherited)
