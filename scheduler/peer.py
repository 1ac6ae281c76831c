"""What the kernel knows about the other end of a Unix socket. Linux and macOS say it in different ways."""

import errno
import fcntl
import select
import socket
import struct
import sys
import termios
from dataclasses import dataclass
from typing import Any, Protocol

# Linux's, on all processors but PA-RISC and SPARC; Python's socket module does not name it.
_SO_PEERGROUPS = 59
# The most that Python's getsockopt takes: 256 groups of four bytes.
_GROUPS_BYTES = 1024


class Socket(Protocol):
    """What a socket of the standard library and one of Trio have in common, as far as it is needed here."""

    def fileno(self) -> int: ...
    def getsockopt(self, level: int, optname: int, buflen: int, /) -> Any: ...


def peer_uid(sock: Socket) -> int:
    """The user who connected, or who listened at the other end. Raises OSError."""
    if sys.platform == "linux":
        # struct ucred: i32 pid, u32 uid, u32 gid.
        return _u32(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12), 4)
    # struct xucred of macOS and the BSDs: u32 version, u32 uid, groups. SOL_LOCAL 0, LOCAL_PEERCRED 1.
    return _u32(sock.getsockopt(0, 1, 76), 4)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end. gids: its group and, as far as the system tells, the others that it is in."""

    uid: int
    gids: frozenset[int] = frozenset()


def peer_of(sock: Socket) -> Peer:
    """The user and the groups of the process at the other end, as of when it connected. Raises OSError."""
    if sys.platform == "linux":
        _, uid, gid = struct.unpack("=iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(uid, frozenset({gid, *_supplementary(sock)}))
    # struct xucred: u32 version, u32 uid, i16 number of groups, padding, 16 u32 groups.
    _, uid, number, *gids = struct.unpack("=IIhxx16I", sock.getsockopt(0, 1, 76))
    return Peer(uid, frozenset(gids[:number]))


def _supplementary(sock: Socket) -> tuple[int, ...]:
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError as error:
        # Linux before 4.13, or somebody in more groups than that: their first group is all that is known.
        if error.errno not in (errno.ENOPROTOOPT, errno.ERANGE):
            raise
        return ()
    return struct.unpack(f"={len(data) // 4}I", data)


def hung_up(sock: Socket) -> bool:
    """Whether the peer has closed, and not only shut down its writing side.

    Both end the stream. But after a close nothing can be written either, and poll() says so: Linux always, macOS to one
    who asks for POLLOUT.
    """
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLOUT)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def unread_bytes(sock: Socket) -> int:
    """What was sent and the peer has not read, in the kernel's own measure; 0 where it does not tell."""
    try:
        return _u32(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), 0)
    except OSError:
        return 0


def _u32(data: bytes, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 4], sys.byteorder)
