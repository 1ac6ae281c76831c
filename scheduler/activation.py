"""Sockets that the service manager opened for us: by systemd (sd_listen_fds(3)) or launchd (launch(3)).

Such a socket is there before the daemon is. Who connects meanwhile waits in its backlog, with what it has sent, and is
answered once the model is loaded. Its path, mode and owner are the manager's affair, and so is its removal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import sys
from collections.abc import MutableMapping

# systemd passes descriptors from this number on.
FIRST_DESCRIPTOR = 3
# The key of our socket under Sockets in the job's property list.
LAUNCHD_NAME = "Listener"


class BadSocket(Exception):
    """The manager passed something that clients cannot be served on; the message says what, and what it should be."""


def inherited_socket(environment: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The listening Unix socket that we were started with, None where we were not. Raises BadSocket.

    To be called once and early: descriptors are taken by number, and the variables are removed for our children's sake.
    """
    descriptors = _from_systemd(environment)
    if not descriptors and sys.platform == "darwin":
        descriptors = _from_launchd()
    if not descriptors:
        return None
    if len(descriptors) > 1:
        raise BadSocket(f"{len(descriptors)} sockets were passed, laned takes one: keep one Listen line in the unit")
    return _checked(descriptors[0])


def _from_systemd(environment: MutableMapping[str, str]) -> list[int]:
    pid, number = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not number.isdecimal():
        return []
    return list(range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(number)))


def _from_launchd() -> list[int]:
    library = ctypes.CDLL(None)
    try:
        activate = library.launch_activate_socket
    except AttributeError:  # before macOS 10.10
        return []
    activate.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_int)), ctypes.POINTER(ctypes.c_size_t)]
    activate.restype = ctypes.c_int
    library.free.argtypes = [ctypes.c_void_p]
    found, number = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    failure = activate(LAUNCHD_NAME.encode(), ctypes.byref(found), ctypes.byref(number))
    # ESRCH: launchd did not start us; ENOENT: it did, and the job has no such socket.
    if failure in (errno.ESRCH, errno.ENOENT):
        return []
    if failure:
        raise BadSocket(f"launchd does not hand over the socket {LAUNCHD_NAME}: {os.strerror(failure)}")
    descriptors = list(found[: number.value])
    library.free(found)
    return descriptors


def _checked(descriptor: int) -> socket.socket:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise BadSocket(f"descriptor {descriptor}, which was passed as a socket, is none")
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise BadSocket(f"descriptor {descriptor}, which was passed as a socket: {error.strerror}") from error
    wrong = None
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        wrong = "is no Unix stream socket: ListenStream= takes a path"
    elif not _listens(sock):
        wrong = "does not listen: Accept=no passes the one that does"
    if wrong:
        sock.detach()
        raise BadSocket(f"the socket that was passed {wrong}")
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _listens(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        # macOS does not tell; launchd passes listening ones only.
        return sys.platform == "darwin"
