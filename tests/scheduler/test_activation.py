"""Sockets from systemd by their descriptors, and from launchd through its C interface."""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler import activation
from scheduler.activation import LAUNCHD_NAME, BadSocket, inherited_socket

# Puts descriptors where systemd would and tells what is made of them.
PROGRAM = """
import json, os, socket, sys
kinds, pid = sys.argv[2:], sys.argv[1]
made = []
for kind in kinds:
    family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
    sock = socket.socket(family, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0) if kind == "tcp" else "\\0laned-test-%d-%d" % (os.getpid(), len(made)))
    if kind in ("unix", "tcp"):
        sock.listen()
    made.append(os.dup(sock.fileno()) if kind != "file" else os.open("/dev/null", os.O_RDONLY))
moved = [os.dup2(number, 100 + place) for place, number in enumerate(made)]
for place, number in enumerate(moved):
    os.dup2(number, 3 + place, inheritable=True)
from scheduler.activation import BadSocket, inherited_socket
environment = {
    "LISTEN_PID": str(os.getpid()) if pid == "ours" else pid, "LISTEN_FDS": str(len(kinds)), "LISTEN_FDNAMES": "x"
}
try:
    found = inherited_socket(environment)
    said = None if found is None else [found.fileno(), found.get_inheritable(), found.gettimeout()]
except BadSocket as bad:
    said = str(bad)
print(json.dumps([said, environment]))
"""


def passed(*kinds: str, pid: str = "ours") -> object:
    """What a process makes of descriptors of these kinds."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, pid, *kinds], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, environment = json.loads(done.stdout)
    assert environment == {}, "no child of ours is to take the socket for its own"
    return said


def test_one_that_listens_is_taken() -> None:
    assert passed("unix") == [3, False, 0.0]


def test_none_is_none_and_another_processs_is_none() -> None:
    assert passed() is None
    assert passed("unix", pid="1") is None
    assert inherited_socket({}) is None


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (["unix", "unix"], "2 sockets were passed, laned takes one"),
        (["tcp"], "is no Unix stream socket"),
        (["datagram"], "is no Unix stream socket"),
        (["silent"], "does not listen"),
        (["file"], "descriptor 3, which was passed as a socket, is none"),
    ],
)
def test_what_clients_cannot_be_served_on_is_told(kinds: list[str], why: str) -> None:
    assert why in str(passed(*kinds))


LAUNCHD = r"""
#include <errno.h>
#include <stdlib.h>
#include <string.h>
int answer, descriptor;
int launch_activate_socket(const char *name, int **fds, size_t *count) {
    if (answer) return answer;
    if (strcmp(name, "Listener")) return ENOENT;
    *fds = malloc(sizeof **fds);
    (*fds)[0] = descriptor;
    *count = 1;
    return 0;
}
"""


@pytest.fixture
def launchd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A library with launchd's function, called by the same ctypes; `answer` and `descriptor` are its variables."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "launchd.c").write_text(LAUNCHD)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "launchd.so", "launchd.c"], cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "launchd.so"))
    monkeypatch.setattr(activation.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(activation.sys, "platform", "darwin")
    return library


def test_launchds_socket_is_taken(launchd: ctypes.CDLL) -> None:
    assert LAUNCHD_NAME == "Listener"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0laned-test-{os.getpid()}-launchd")
        sock.listen()
        ctypes.c_int.in_dll(launchd, "descriptor").value = os.dup(sock.fileno())
        with inherited_socket({}) or pytest.fail("no socket") as found:
            assert found.getsockname() == sock.getsockname()


@pytest.mark.parametrize("number", [3, 2])  # ESRCH: not started by launchd; ENOENT: no such socket in the job
def test_without_launchd_there_is_none(launchd: ctypes.CDLL, number: int) -> None:
    ctypes.c_int.in_dll(launchd, "answer").value = number
    assert inherited_socket({}) is None


def test_launchds_refusal_is_told(launchd: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(launchd, "answer").value = 114  # EALREADY: it was asked before
    with pytest.raises(BadSocket, match="launchd does not hand over the socket Listener"):
        inherited_socket({})
