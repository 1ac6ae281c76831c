"""The Unix socket: where it is, how it is opened, and who is let in.

Opening, in this order, under a lock of the folder, so that two daemons that start at once do not both win:

1. The folder is created (0700) if there is none. One that somebody else owns, or that everyone or a group may write
   that is not let in anyway, is refused: who may rename the socket may read our clients' prompts.
2. What is at the path is looked at. A socket that nobody answers is left from a crash and may be replaced; a daemon
   that answers, a plain file and anything else stay as they are.
3. The socket is bound in a folder of its own that only we may enter, given its final mode (0600, unless others are let
   in: scheduler/access.py) and group, set to listen, and renamed to its place. So it is never open to anybody it is not
   for, and from the moment it is there it answers. (A umask would do for the mode alone, but it is the process's, and
   would fall on the files of other threads.)

On leaving, the file is removed, if it is still the one that was put there. A socket that the service manager opened is
not opened here, nor removed.
"""

import fcntl
import grp
import logging
import os
import pwd
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio

from scheduler.access import Access
from scheduler.codec import encode
from scheduler.peer import peer_of
from scheduler.protocol import Error
from store.framing import encode_frame

logger = logging.getLogger(__name__)

# sun_path holds 104 bytes on macOS and 108 on Linux, of which one ends it.
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107

# Clients that connect at the same moment; the kernel may have a smaller limit of its own.
BACKLOG = 1024

# A connection is two tasks, a descriptor and a buffer. Beyond this many somebody has a leak.
MAX_CONNECTIONS = 1024

OWNER_ALONE = Access()


class SocketUnavailable(Exception):
    """The socket cannot be opened; the message names it, and says why and what to do."""


def default_socket_path() -> Path:
    """Where daemon and clients of one user meet, if nobody says otherwise.

    $XDG_RUNTIME_DIR/laned.sock; without it ~/Library/Caches/laned/laned.sock on macOS, elsewhere
    /run/user/UID/laned.sock, or, if there is no such folder, /tmp/laned-UID/laned.sock. Never by $TMPDIR: it differs
    between a terminal and a service.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        return Path(runtime) / "laned.sock"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "laned" / "laned.sock"
    user = Path(f"/run/user/{os.getuid()}")
    # A hardened service may not even look there, which Path.is_dir() raises for.
    return (user if os.path.isdir(user) else Path(f"/tmp/laned-{os.getuid()}")) / "laned.sock"


def check_length(path: Path) -> None:
    """Raises SocketUnavailable if no socket can have this path."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise SocketUnavailable(
            f"{path} has {num_bytes} bytes, a socket's path {MAX_PATH_BYTES} at most: use a shorter"
        )


def check_path(path: Path, access: Access = OWNER_ALONE) -> None:
    """Raises SocketUnavailable where listen() would at this moment, so that nobody waits for a model first."""
    check_length(path)
    try:
        if path.parent.exists():
            _check_folder(path.parent, access)
        _check_free(path)
    except OSError as error:
        raise SocketUnavailable(f"{path} cannot be opened: {error}") from error


@asynccontextmanager
async def listen(path: Path | str, access: Access = OWNER_ALONE) -> AsyncIterator[trio.SocketListener]:
    """The open socket, for as long as the block lasts. Raises SocketUnavailable."""
    path = Path(path)
    try:
        sock, ours = _open(path, access)
    except OSError as error:
        raise SocketUnavailable(f"{path} cannot be opened: {error}") from error
    try:
        yield trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    finally:
        with suppress(OSError), _locked(path.parent):
            if _identity(path) == ours:
                path.unlink()
        sock.close()


async def accept(
    listener: trio.SocketListener,
    handler: Callable[[trio.SocketStream], Awaitable[object]],
    handlers: trio.Nursery,
    access: Access = OWNER_ALONE,
    retry_after_s: Callable[[], float] = lambda: 1.0,
) -> None:
    """Start handler(stream) in the nursery `handlers` for each client that is let in, until cancelled. retry_after_s:
    when one whom there is no room for had better come again.

    To cancel this closes the listener and leaves the handlers running.
    """
    num_open = 0

    async def admit(stream: trio.SocketStream) -> None:
        nonlocal num_open
        async with stream:
            peer = peer_of(stream.socket)
            if not access.admits(peer):
                logger.warning("user %d may not connect: --allow-user and --allow-group name who may", peer.uid)
                await _turn_away(stream, Error("forbidden", f"user {peer.uid} is not let in here"))
            elif num_open >= MAX_CONNECTIONS:
                full = Error("overloaded", f"{num_open} connections are open", retry_after_s=retry_after_s())
                await _turn_away(stream, full)
            else:
                num_open += 1
                try:
                    await handler(stream)
                finally:
                    num_open -= 1

    await trio.serve_listeners(admit, [listener], handler_nursery=handlers)


async def _turn_away(stream: trio.SocketStream, error: Error) -> None:
    # The first bytes on a new connection fit in the kernel's buffer: this does not wait.
    with suppress(OSError):
        await stream.socket.send(encode_frame(encode(error)))


@asynccontextmanager
async def inherit(sock: socket.socket) -> AsyncIterator[trio.SocketListener]:
    """A socket that the service manager opened: it stays the manager's, and open, when the block is left."""
    with sock:
        yield trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _open(path: Path, access: Access) -> tuple[socket.socket, tuple[int, int]]:
    folder = path.parent
    folder.mkdir(mode=0o700 if access == OWNER_ALONE else 0o755, parents=True, exist_ok=True)
    _check_folder(folder, access)
    if access != OWNER_ALONE:
        _warn_of_closed_folders(folder)
    check_length(path)
    with _locked(folder):
        _check_free(path)
        private = Path(tempfile.mkdtemp(prefix=".", dir=folder))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            check_length(private / "s")
            sock.bind(os.fspath(private / "s"))
            if access.group is not None:
                _give_to(access.group, private / "s")
            os.chmod(private / "s", access.mode)
            sock.listen(BACKLOG)
            os.rename(private / "s", path)
            return sock, _identity(path)
        except BaseException:
            sock.close()
            (private / "s").unlink(missing_ok=True)
            raise
        finally:
            private.rmdir()


def _give_to(gid: int, path: Path) -> None:
    try:
        os.chown(path, -1, gid)
    except PermissionError:
        raise SocketUnavailable(
            f"{path.parent.parent}: the socket cannot be given to group {gid}, which our user is not in: add it there, "
            "or name the users instead (--allow-user)"
        ) from None


def _check_folder(folder: Path, access: Access) -> None:
    info = folder.stat()
    if os.geteuid() != 0 and info.st_uid not in (0, os.geteuid()):
        raise SocketUnavailable(f"{folder} belongs to user {info.st_uid}, who could replace the socket: use another")
    if info.st_mode & stat.S_ISVTX:
        # Only its owner may rename what is in it.
        return
    if info.st_mode & stat.S_IWOTH:
        raise SocketUnavailable(f"{folder} may be written by everyone, who could replace the socket: chmod o-w it")
    if info.st_mode & stat.S_IWGRP and info.st_gid not in access.gids and not _is_ours_alone(info.st_gid):
        raise SocketUnavailable(
            f"{folder} may be written by group {info.st_gid}, whose members could replace the socket: chmod g-w it, or "
            "let the group in (--allow-group)"
        )


def _is_ours_alone(gid: int) -> bool:
    """Whether it is root's group, or the one that many systems make for each user, with the user's name."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _warn_of_closed_folders(folder: Path) -> None:
    """Those who are let in have to get to the socket; whether a folder's group is theirs, nobody here knows."""
    for place in (folder.absolute(), *folder.absolute().parents):
        mode = stat.S_IMODE(place.stat().st_mode)
        if not mode & stat.S_IXOTH:
            logger.warning("%s (mode %03o) is closed to others, so they may not reach the socket in it", place, mode)


def _check_free(path: Path) -> None:
    """Whether a socket may be put at the path. Raises SocketUnavailable."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketUnavailable(f"{path} exists and is no socket: move it away, or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            # Its backlog is full: busy, not gone.
            pass
    raise SocketUnavailable(f"a daemon already answers at {path}: stop it, or choose another path")


def _identity(path: Path) -> tuple[int, int]:
    info = path.lstat()
    return info.st_dev, info.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One daemon at a time. The lock is held for a few system calls, so it is worth no await; a file system without
    locks has to do without."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
