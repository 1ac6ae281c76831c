"""Who gets through the door: by the mode of the socket's file, and by the kernel's word on the peer."""

import grp
import os
import pwd
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path

import pytest
import trio

from scheduler import listener
from scheduler.access import Access
from scheduler.listener import SocketUnavailable, accept, check_path, listen
from scheduler.peer import Peer, peer_of, peer_uid
from tests.scheduler.raw import connected
from tests.scheduler.trio_test import trio_test


@trio_test
async def test_another_users_process_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "laned.sock"
    stranger = Peer(12345, frozenset({77, 78}))
    monkeypatch.setattr(listener, "peer_of", lambda sock: stranger)

    async def handle(stream: trio.SocketStream) -> None:
        await stream.send_all(b"welcome")

    for access in (Access(), Access(uids=frozenset({54321}), gids=frozenset({7}))):
        async with listen(path, access) as opened, trio.open_nursery() as nursery:
            nursery.start_soon(accept, opened, handle, nursery, access)
            async with connected(path, hello=False) as raw:
                (error,) = await raw.rest()
                assert error["code"] == "forbidden"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("access", [Access(uids=frozenset({12345})), Access(gids=frozenset({5, 78}))])
@trio_test
async def test_whom_the_options_name_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: Access) -> None:
    monkeypatch.setattr(listener, "peer_of", lambda sock: Peer(12345, frozenset({77, 78})))
    path = tmp_path / "laned.sock"

    async def handle(stream: trio.SocketStream) -> None:
        await stream.send_all(b"welcome")

    async with listen(path, access) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(accept, opened, handle, nursery, access)
        async with connected(path, hello=False) as raw:
            assert await raw.stream.receive_some() == b"welcome"
        nursery.cancel_scope.cancel()


@trio_test
async def test_the_file_lets_in_whom_the_daemon_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "here" / "laned.sock"
    ours = os.getegid()
    for access, mode in (
        (Access(gids=frozenset({ours})), "srw-rw----"),
        (Access(uids=frozenset({12345})), "srw-rw-rw-"),
        (Access(gids=frozenset({ours, 5})), "srw-rw-rw-"),
    ):
        async with listen(path, access):
            assert stat.filemode(path.stat().st_mode) == mode
            assert path.stat().st_gid == ours
            assert stat.filemode(path.parent.stat().st_mode) == "drwxr-xr-x"
        path.parent.rmdir()
    assert f"{tmp_path} (mode 700) is closed to others" in caplog.text


@trio_test
async def test_a_group_that_is_not_ours_to_give_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, uid: int, gid: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(SocketUnavailable, match="cannot be given to group 4711"):
        async with listen(tmp_path / "laned.sock", Access(gids=frozenset({4711}))):
            pass
    assert os.listdir(tmp_path) == []


def folder_of_a_group(folder: Path, mode: int) -> int:
    """Make one; returns the group, which is not root's where we can help it."""
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, -1, 4711)
    folder.chmod(mode)
    return folder.stat().st_gid


def call_every_group(monkeypatch: pytest.MonkeyPatch, name: str, *members: str) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, list(members))))


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o2770])
@trio_test
async def test_a_folder_that_a_group_may_write_is_refused_unless_the_group_is_let_in(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "team" / "laned.sock"
    gid = folder_of_a_group(path.parent, mode)
    call_every_group(monkeypatch, "team")
    for access in (Access(), Access(gids=frozenset({gid + 1}))):
        with pytest.raises(SocketUnavailable, match=f"written by group {gid}.*--allow-group"):
            async with listen(path, access):
                pass
        with pytest.raises(SocketUnavailable):
            check_path(path, access)
    check_path(path, Access(gids=frozenset({gid})))
    async with listen(path, Access(gids=frozenset({gid}))):
        assert path.is_socket()


def test_a_sticky_folder_and_one_of_our_own_group_are_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is what a umask of 002 makes, where each user has a group."""
    path, user = tmp_path / "here" / "laned.sock", pwd.getpwuid(os.geteuid()).pw_name
    folder_of_a_group(path.parent, 0o1775)
    call_every_group(monkeypatch, "team")
    check_path(path)
    path.parent.chmod(0o775)
    call_every_group(monkeypatch, user)
    check_path(path)
    call_every_group(monkeypatch, user, user, "eve")
    with pytest.raises(SocketUnavailable):
        check_path(path)


def test_roots_group_is_trusted_as_root_is_and_one_without_a_name_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(gid: int) -> None:
        raise KeyError(gid)

    monkeypatch.setattr(grp, "getgrgid", unknown)
    assert listener._is_ours_alone(0)
    assert not listener._is_ours_alone(4711)


def test_a_peer_has_its_user_and_all_its_groups() -> None:
    ours, other = socket.socketpair(socket.AF_UNIX)
    with ours, other:
        peer = peer_of(ours)
        assert peer.uid == os.geteuid() == peer_uid(other)
    assert peer.gids == {os.getegid(), *os.getgroups()}


class MacSocket:
    """One whose peer is told as macOS does it: struct xucred of sys/ucred.h."""

    def __init__(self, uid: int, *gids: int) -> None:
        version, most = 0, 16
        head = struct.pack("=IIh", version, uid, len(gids)) + bytes(2)
        self.credentials = head + struct.pack(f"={most}I", *gids, *[0] * (most - len(gids)))

    def fileno(self) -> int:
        return -1

    def getsockopt(self, level: int, option: int, length: int, /) -> bytes:
        assert (level, option) == (0, 1), "SOL_LOCAL, LOCAL_PEERCRED"
        assert length == len(self.credentials) == 76
        return self.credentials


@pytest.mark.parametrize("gids", [(20,), (20, 12, 61, 480), tuple(range(100, 116)), ()])
def test_a_peer_on_macos_has_its_user_and_its_groups(gids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    sock = MacSocket(501, *gids)
    assert peer_of(sock) == Peer(501, frozenset(gids)), "what lies behind the last group is none"
    assert peer_uid(sock) == 501
    # A user id above 2**31, as directories give them out, is no negative one.
    assert peer_of(MacSocket(4_000_000_000)).uid == peer_uid(MacSocket(4_000_000_000)) == 4_000_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@trio_test
async def test_the_kernels_word_decides_over_real_strangers() -> None:
    """Processes of another user, without and with the group that is let in."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # tmp_path is within folders of our own
        await serve_strangers(Path(folder) / "laned.sock")


async def serve_strangers(path: Path) -> None:
    access = Access(gids=frozenset({4711}))
    program = (
        "import os, socket, sys\n"
        "os.setgroups([int(group) for group in sys.argv[2:]])\n"
        "os.setgid(12345)\n"
        "os.setuid(12345)\n"
        "with socket.socket(socket.AF_UNIX) as sock:\n"
        "    try:\n"
        "        sock.connect(sys.argv[1])\n"
        "        sys.stdout.buffer.write(sock.recv(1000))\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
    )

    async def handle(stream: trio.SocketStream) -> None:
        await stream.send_all(b"welcome")

    async def told(*groups: str) -> bytes:
        command = [sys.executable, "-c", program, str(path), *groups]
        return (await trio.run_process(command, capture_stdout=True)).stdout

    async with listen(path, access) as opened, trio.open_nursery() as nursery:
        nursery.start_soon(accept, opened, handle, nursery, access)
        assert await told("4711") == b"welcome"
        assert await told("4712") == b"Permission denied\n", "the file's own mode keeps others out"
        await trio.Path(path).chmod(0o666)
        assert b"forbidden" in await told("4712"), "and so does the daemon, where the mode does not"
        assert await told("5", "4711") == b"welcome"
        nursery.cancel_scope.cancel()
