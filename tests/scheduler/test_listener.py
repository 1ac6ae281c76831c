import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import trio

from scheduler import listener
from scheduler.listener import MAX_PATH_BYTES, SocketUnavailable, accept, default_socket_path, inherit, listen
from tests.scheduler.echo import serving
from tests.scheduler.raw import Raw, connected
from tests.scheduler.trio_test import trio_test


async def refused(path: Path) -> str:
    """Why no socket can be opened there."""
    with pytest.raises(SocketUnavailable) as raised:
        async with listen(path):
            pass
    assert str(path.parent) in str(raised.value)
    return str(raised.value)


def leave_stale(path: Path) -> None:
    """What a killed daemon leaves behind."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


@trio_test
async def test_it_makes_its_folder_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "here" / "laned.sock"
    async with serving(path):
        assert stat.filemode(path.stat().st_mode) == "srw-------"
        assert stat.filemode(path.parent.stat().st_mode) == "drwx------"
        async with connected(path):
            pass
    assert os.listdir(path.parent) == []


@trio_test
async def test_no_moment_in_which_others_could_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the socket has the mode that it keeps, it is in a folder that is closed to others."""
    others = []

    def spy(call: str) -> None:
        real = getattr(os, call)

        def spied(source: Path, *args: int | Path) -> None:
            assert source.parent.parent == tmp_path
            others.append((call, *(where.stat().st_mode & 0o77 for where in (source.parent, source))))
            real(source, *args)

        monkeypatch.setattr(os, call, spied)

    spy("chmod")
    spy("rename")
    before = os.umask(0)
    try:
        async with listen(tmp_path / "laned.sock"):
            pass
    finally:
        os.umask(before)
    assert others == [("chmod", 0, 0o77), ("rename", 0, 0)]


@trio_test
async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "laned.sock"
    leave_stale(path)
    with pytest.raises(OSError, match="refused"):
        await trio.open_unix_socket(str(path))
    async with serving(path), connected(path):
        pass
    assert not path.exists()


@trio_test
async def test_a_daemon_that_answers_keeps_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "laned.sock"
    async with serving(path):
        assert "already answers" in await refused(path)
        async with connected(path):
            pass
    assert not path.exists()


@trio_test
async def test_one_whose_backlog_is_full_is_not_stale(tmp_path: Path) -> None:
    path = tmp_path / "laned.sock"
    clients = []
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(2):
            clients.append(socket.socket(socket.AF_UNIX))
            clients[-1].setblocking(False)
            clients[-1].connect_ex(str(path))
        assert "already answers" in await refused(path)
    for client in clients:
        client.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing", "link to a stale socket", "datagram socket"])
@trio_test
async def test_what_is_no_stale_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "laned.sock", tmp_path / "other"
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link to nothing":
            path.symlink_to(other)
        case "link to a stale socket":
            leave_stale(other)
            path.symlink_to(other)
        case "datagram socket":
            datagram.bind(str(path))
    before = path.lstat()
    await refused(path)
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert set(os.listdir(tmp_path)) <= {"laned.sock", "other"}
    datagram.close()


@trio_test
async def test_only_its_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "laned.sock"
    async with listen(path):
        path.unlink()
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"
    path.unlink()
    async with listen(path):
        path.unlink()
    async with listen(tmp_path / "gone" / "laned.sock"):
        (tmp_path / "gone" / "laned.sock").unlink()
        (tmp_path / "gone").rmdir()


@trio_test
async def test_the_folder_is_locked_between_looking_and_taking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, locked = tempfile.mkdtemp, []

    def spied(prefix: str, dir: Path) -> str:
        handle = os.open(dir, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked.append(dir)
        finally:
            os.close(handle)
        return real(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", spied)
    async with listen(tmp_path / "laned.sock"):
        assert locked == [tmp_path]


def test_of_daemons_that_start_at_once_one_gets_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "laned.sock"
    leave_stale(path)
    program = (
        "import sys, trio\n"
        "from scheduler.listener import SocketUnavailable, listen\n"
        "async def main():\n"
        "    try:\n"
        "        async with listen(sys.argv[1]):\n"
        "            print('mine', flush=True)\n"
        "            await trio.to_thread.run_sync(sys.stdin.read)\n"
        "    except SocketUnavailable:\n"
        "        print('taken', flush=True)\n"
        "trio.run(main)\n"
    )
    daemons = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    said = [daemon.stdout.readline() for daemon in daemons]  # type: ignore[union-attr]
    assert sorted(said) == [b"mine\n", b"taken\n", b"taken\n", b"taken\n"]
    assert path.is_socket()
    for daemon in daemons:
        daemon.communicate()
    assert os.listdir(tmp_path) == []


@trio_test
async def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert "belongs to user" in await refused(folder / "laned.sock")


@trio_test
async def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "written by everyone" in await refused(folder / "laned.sock")
    folder.chmod(0o1777)
    async with listen(folder / "laned.sock"):
        pass


@trio_test
async def test_a_path_too_long_for_a_socket_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / ("x" * MAX_PATH_BYTES)
    why = await refused(path)
    assert str(len(str(path))) in why
    assert str(MAX_PATH_BYTES) in why
    assert os.listdir(tmp_path) == []


@trio_test
async def test_the_longest_path_that_fits_works(tmp_path: Path) -> None:
    path = tmp_path / ("x" * (MAX_PATH_BYTES - len(str(tmp_path)) - 1))
    async with serving(path), connected(path):
        pass


@trio_test
async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    await refused(tmp_path / "file" / "laned.sock")


@trio_test
async def test_a_managers_socket_is_served_and_left_where_it_is(tmp_path: Path) -> None:
    """What was sent before anybody accepted is answered; the manager's own descriptor goes on listening."""
    path = tmp_path / "laned.sock"
    with socket.socket(socket.AF_UNIX) as managers:
        managers.bind(str(path))
        managers.listen()
        for _ in range(2):
            async with await trio.open_unix_socket(str(path)) as early:
                await early.send_all(b"already here")
                passed = managers.dup()
                passed.setblocking(False)
                async with inherit(passed) as opened, trio.open_nursery() as nursery:

                    async def handle(stream: trio.SocketStream) -> None:
                        await stream.send_all(b"got " + await stream.receive_some())

                    nursery.start_soon(accept, opened, handle, nursery)
                    assert await early.receive_some() == b"got already here"
                    nursery.cancel_scope.cancel()
            assert path.is_socket()


@trio_test
async def test_the_number_of_connections_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "laned.sock"
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 2)
    async with serving(path):
        async with connected(path), connected(path), connected(path, hello=False) as third:
            (error,) = await third.rest()
            assert error["code"] == "overloaded"
        # The two have left; the daemon may not have noticed yet.
        while True:
            async with await trio.open_unix_socket(str(path)) as stream:
                raw = Raw(stream)
                await raw.send({"type": "hello", "version": 1})
                if (await raw.next() or {})["type"] == "hello":
                    break


def test_the_default_path_is_the_users_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_path() == Path("/run/user/7/laned.sock")


@pytest.mark.parametrize("runtime", [None, "", "relative/folder"])
def test_the_default_path_without_a_runtime_folder(monkeypatch: pytest.MonkeyPatch, runtime: str | None) -> None:
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(listener.sys, "platform", "linux")
    monkeypatch.setattr(listener.os, "getuid", lambda: 4_000_000)
    assert default_socket_path() == Path("/tmp/laned-4000000/laned.sock")
    monkeypatch.setattr(listener.sys, "platform", "darwin")
    monkeypatch.setenv("HOME", "/Users/ada")
    assert default_socket_path() == Path("/Users/ada/Library/Caches/laned/laned.sock")


def test_a_runtime_folder_that_may_not_be_looked_at_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd's ProtectHome= hides /run/user."""
    real = os.stat

    def refuse(path: str, **options: object) -> os.stat_result:
        if str(path).startswith("/run/user"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(listener.sys, "platform", "linux")
    monkeypatch.setattr(os, "stat", refuse)
    assert default_socket_path() == Path(f"/tmp/laned-{os.getuid()}/laned.sock")
