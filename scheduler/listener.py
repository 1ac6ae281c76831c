"""The Unix socket: where it is, how it is opened, and who is let in.

Opening, in this order, under a lock of the folder, so that two daemons that start at once do not both win:

1. The folder is created (0700) if there is none. One that somebody else owns, or anybody may write, is refused: who may
   rename the socket may read our clients' prompts.
2. What is at the path is looked at. A socket that nobody answers is left from a crash and may be replaced; a daemon
   that answers, a plain file and anything else stay as they are.
3. The socket is bound in a folder of its own that only we may enter, made 0600, set to listen, and renamed to its
   place. So it is never open to others, and from the moment it is there it answers. (A umask would do for the mode
   alone, but it is the process's, and would fall on the files of other threads.)

On leaving, the file is removed, if it is still the one that was put there.
"""

import fcntl
import os
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio

from scheduler.codec import encode
from scheduler.peer import peer_uid
from scheduler.protocol import Error
from store.framing import encode_frame

# sun_path holds 104 bytes on macOS and 108 on Linux, of which one ends it.
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107

# Clients that connect at the same moment; the kernel may have a smaller limit of its own.
BACKLOG = 1024

# A connection is two tasks, a descriptor and a buffer. Beyond this many somebody has a leak.
MAX_CONNECTIONS = 1024


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
    return (user if user.is_dir() else Path(f"/tmp/laned-{os.getuid()}")) / "laned.sock"


def check_length(path: Path) -> None:
    """Raises SocketUnavailable if no socket can have this path."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise SocketUnavailable(
            f"{path} has {num_bytes} bytes, a socket's path {MAX_PATH_BYTES} at most: use a shorter"
        )


def check_path(path: Path) -> None:
    """Raises SocketUnavailable where listen() would at this moment, so that nobody waits for a model first."""
    check_length(path)
    try:
        if path.parent.exists():
            _check_folder(path.parent)
        _check_free(path)
    except OSError as error:
        raise SocketUnavailable(f"{path} cannot be opened: {error}") from error


@asynccontextmanager
async def listen(path: Path | str) -> AsyncIterator[trio.SocketListener]:
    """The open socket, for as long as the block lasts. Raises SocketUnavailable."""
    path = Path(path)
    try:
        sock, ours = _open(path)
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
    also_uids: Collection[int] = (),
) -> None:
    """Start handler(stream) in the nursery `handlers` for each client that is let in, until cancelled.

    Let in are our own user, root and also_uids. To cancel this closes the listener and leaves the handlers running.
    """
    welcome = {os.geteuid(), 0, *also_uids}
    num_open = 0

    async def admit(stream: trio.SocketStream) -> None:
        nonlocal num_open
        async with stream:
            if peer_uid(stream.socket) not in welcome:
                await _turn_away(stream, Error("forbidden", "this socket is for its owner's user alone"))
            elif num_open >= MAX_CONNECTIONS:
                await _turn_away(stream, Error("overloaded", f"{num_open} connections are open", retry_after_s=1.0))
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


def _open(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(folder)
    check_length(path)
    with _locked(folder):
        _check_free(path)
        private = Path(tempfile.mkdtemp(prefix=".", dir=folder))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            check_length(private / "s")
            sock.bind(os.fspath(private / "s"))
            os.chmod(private / "s", 0o600)
            sock.listen(BACKLOG)
            os.rename(private / "s", path)
            return sock, _identity(path)
        except BaseException:
            sock.close()
            (private / "s").unlink(missing_ok=True)
            raise
        finally:
            private.rmdir()


def _check_folder(folder: Path) -> None:
    info = folder.stat()
    if os.geteuid() != 0 and info.st_uid not in (0, os.geteuid()):
        raise SocketUnavailable(f"{folder} belongs to user {info.st_uid}, who could replace the socket: use another")
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise SocketUnavailable(f"{folder} may be written by everyone, who could replace the socket: chmod o-w it")


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
