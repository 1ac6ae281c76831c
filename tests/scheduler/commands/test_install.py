"""`laned install-service`, on a machine made of folders, and as a command with a systemctl that only writes down."""

import os
import plistlib
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler import configuration
from scheduler.commands import install
from scheduler.commands.units import MARK, Asked, Machine, plan, systemd_word
from scheduler.options import Options
from scheduler.usage import Parser

LINUX = Machine(
    laned=("/opt/laned/bin/laned",),
    templates=Path(__file__).parents[3] / "deploy",
    home=Path("/home/ada"),
    config_home=Path("/home/ada/.config"),
)
MAC = replace(LINUX, home=Path("/Users/ada"), is_mac=True)


def lines(text: str, key: str) -> list[str]:
    return [line.removeprefix(f"{key}=") for line in text.splitlines() if line.startswith(f"{key}=")]


def test_a_service_of_the_machine() -> None:
    made = plan(LINUX, Asked(("--model", "org/x")), user=False)
    texts = {str(file.path): file.text for file in made.files}
    assert set(texts) == {
        "/etc/systemd/system/laned.socket",
        "/etc/systemd/system/laned.service",
        "/etc/sysusers.d/laned.conf",
    }
    assert all(text.startswith(f"# {MARK}\n") for text in texts.values())
    service = texts["/etc/systemd/system/laned.service"]
    assert lines(service, "ExecStart") == ["/opt/laned/bin/laned serve --model org/x"]
    assert (lines(service, "ReadWritePaths"), lines(service, "IPAddressDeny")) == ([], ["any"])
    assert made.start[-2] == "systemctl enable --now laned.socket laned.service"


def test_ones_own_socket_is_kept() -> None:
    made = plan(LINUX, Asked(socket="/srv/50% off.sock"), user=False)
    assert lines(made.files[0].text, "ListenStream") == ["/srv/50%% off.sock"]


def test_the_unit_lets_the_daemon_do_what_it_was_told_to() -> None:
    text = plan(LINUX, Asked(writes=("/ssd/laned", "/mnt/50% $x"), is_public=True), user=False).files[1].text
    assert lines(text, "ReadWritePaths") == ['/ssd/laned "/mnt/50%% $x"']
    assert lines(text, "ProtectSystem") == ["strict"]
    assert "IPAddress" not in text
    users = plan(LINUX, Asked(writes=("/ssd/laned",), is_public=True), user=True).files[1].text
    assert users == plan(LINUX, Asked(), user=True).files[1].text, "it is not shut in"


def test_a_service_of_ones_own() -> None:
    made = plan(LINUX, Asked(("--model", "x")), user=True)
    assert [str(file.path) for file in made.files] == [
        "/home/ada/.config/systemd/user/laned.socket",
        "/home/ada/.config/systemd/user/laned.service",
    ]
    assert lines(made.files[0].text, "ListenStream") == ["%t/laned.sock"]
    assert lines(made.files[1].text, "ExecStart") == ["/opt/laned/bin/laned serve --model x"]
    assert made.start[0] == "systemctl --user daemon-reload"


@pytest.mark.parametrize("user", [True, False])
def test_a_gpu_is_let_through(user: bool) -> None:
    last = plan(replace(LINUX, cuda=True), Asked(), user=user).files[2]
    assert last.path.parts[-2:] == ("laned.service.d", "cuda.conf")
    assert "MemoryDenyWriteExecute=no" in last.text


@pytest.mark.parametrize("user", [True, False])
def test_a_mac(user: bool) -> None:
    asked = Asked(("--model", "x"), socket=None if user else "/var/run/other.sock", drain_s=299.5)
    made = plan(MAC, asked, user=user)
    (file,) = made.files
    assert MARK in file.text.splitlines()[1]
    job = plistlib.loads(file.text.encode())
    assert job["ProgramArguments"] == ["/opt/laned/bin/laned", "serve", "--model", "x"]
    assert job["ExitTimeOut"] == 315
    listener = job["Sockets"]["Listener"]
    if user:
        assert str(file.path) == "/Users/ada/Library/LaunchAgents/local.laned.plist"
        assert listener["SockPathName"] == "/Users/ada/Library/Caches/laned/laned.sock"
        assert made.folders == (Path("/Users/ada/Library/Caches/laned"),)
        assert made.start[0] == f"launchctl bootstrap gui/{os.getuid()} {file.path}"
        assert "YOU" not in file.text
    else:
        assert str(file.path) == "/Library/LaunchDaemons/local.laned.plist"
        assert listener["SockPathName"] == "/var/run/other.sock"


def test_words_are_quoted_as_systemd_reads_them() -> None:
    assert systemd_word("--model") == "--model"
    assert systemd_word("50%") == "50%%"
    assert systemd_word("a b") == '"a b"'
    assert systemd_word("$HOME") == "$$HOME"
    assert systemd_word('say "hi"\\') == '"say \\"hi\\"\\\\"'
    assert systemd_word("two\nlines") == '"two\\nlines"'
    assert systemd_word("") == '""'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a systemctl in bin/ that writes down what it is told."""
    control = tmp_path / "bin" / "systemctl"
    control.parent.mkdir()
    control.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n')
    control.chmod(0o755)
    return tmp_path


def laned(home: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}
    environment.pop("XDG_CONFIG_HOME", None)
    command = [sys.executable, "-m", "scheduler.cli", *argv]
    root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = root
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, timeout=60, check=False)


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")


NOTHING = Asked()


def notes(machine: Machine = LINUX, asked: Asked = NOTHING, config: str | None = None, **options: Any) -> list[str]:
    return list(install._notes(machine, asked, Options(**{"model": "org/x", **options}), config))


def test_what_a_hardened_service_cannot_see_is_told() -> None:
    assert notes() == []
    for there in (replace(LINUX, python=Path("/root/.pyenv/bin/python3")), replace(LINUX, laned=("/home/ada/laned",))):
        (note,) = notes(there)
        assert "is in somebody's home, which the service cannot see" in note
    inside: dict[str, Any] = {"model": "/home/ada/m", "store": "/root/s", "adapter": {"sql": "/home/ada/sql"}}
    told = notes(config="/home/ada/laned.toml", allow_user=("ada",), **inside)
    assert [note.split(" is in somebody's home")[0] for note in told] == [
        "--config /home/ada/laned.toml",
        "--model /home/ada/m",
        "--store /root/s",
        "--adapter /home/ada/sql",
    ]


def test_what_else_has_to_be_done_is_told() -> None:
    (note,) = notes(asked=Asked(writes=("/ssd/my laned",)))
    assert note.endswith("sudo install -d -o laned -g laned -m 750 '/ssd/my laned'")
    (note,) = notes(asked=Asked(is_public=True), metrics_host="0.0.0.0")
    assert "0.0.0.0" in note
    assert "IPAddressDeny" in note
    store, access = notes(config="/etc/laned/laned.toml")
    assert 'may say store = "/var/lib/laned/store"' in store
    assert 'may say allow_group = ["laned"]' in access


@linux_only
def test_installed_shown_and_removed(home: Path) -> None:
    (home / "laned.toml").write_text('model = "demo"\n')
    dry = laned(home, "install-service", "--user", "--config", "laned.toml", "--max-rows", "8", "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")
    units = home / ".config" / "systemd" / "user"
    assert not units.exists()
    done = laned(home, "install-service", "--user", "--config", "laned.toml", "--max-rows", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(dry.stdout)
    assert "  systemctl --user enable --now laned.socket laned.service\n" in done.stdout
    (command,) = lines((units / "laned.service").read_text(), "ExecStart")
    assert command.endswith(f" serve --config {home}/laned.toml --max-rows 8"), "a path that holds wherever it starts"
    assert laned(home, "install-service", "--user", "--model", "demo").returncode == 0, "what is ours may be replaced"
    assert lines((units / "laned.service").read_text(), "ExecStart")[0].endswith(" serve --model demo")
    assert not (home / "told").exists()

    dry = laned(home, "uninstall-service", "--user", "--dry-run")
    assert (dry.returncode, len(list(units.iterdir()))) == (0, 2)
    gone = laned(home, "uninstall-service", "--user")
    assert (gone.returncode, gone.stdout, gone.stderr) == (0, dry.stdout, "")
    assert list(units.iterdir()) == []
    told = (home / "told").read_text().splitlines()
    assert told == ["--user disable --now laned.socket laned.service", "--user daemon-reload"]


@linux_only
def test_what_somebody_else_wrote_stays(home: Path) -> None:
    unit = home / ".config" / "systemd" / "user" / "laned.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    done = laned(home, "install-service", "--user", "--model", "demo")
    assert done.returncode == 1
    assert done.stderr == f"laned: {unit} was not written by `laned install-service`: move it away first.\n"
    assert [path.name for path in unit.parent.iterdir()] == ["laned.service"]
    gone = laned(home, "uninstall-service", "--user")
    assert gone.returncode == 1
    assert "There is no service here that `laned install-service` made" in gone.stderr
    assert unit.read_text() == "[Service]\nExecStart=/bin/true\n"


@linux_only
def test_mistakes_are_told_before_anything_is_written(home: Path) -> None:
    for argv, status in ((["--user"], 2), (["--user", "--model", "demo", "--max-rows", "0"], 2)):
        done = laned(home, "install-service", *argv)
        assert (done.returncode, done.stdout) == (status, "")
        assert len(done.stderr.splitlines()) == 1
    assert not (home / ".config").exists()


@linux_only
def test_a_folder_that_may_not_be_written_is_told(home: Path) -> None:
    (home / ".config").write_text("in the way")
    done = laned(home, "install-service", "--user", "--model", "demo")
    assert done.returncode == 1
    assert ".config" in done.stderr
    assert "Traceback" not in done.stderr
    assert stat.S_ISREG((home / ".config").stat().st_mode)


def shown(home: Path, *argv: str) -> tuple[str, str]:
    """What would be written, and the notes."""
    done = laned(home, "install-service", *argv, "--dry-run")
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@linux_only
def test_a_file_is_left_the_last_word(home: Path) -> None:
    """What a flag says the file could not say later."""
    (home / "laned.toml").write_text('model = "demo"\nallow_user = ["root"]\nsocket = "/srv/x.sock"\n')
    text, told = shown(home, "--config", "laned.toml")
    (command,) = lines(text, "ExecStart")
    assert command.endswith(f" serve --config {home}/laned.toml")
    assert lines(text, "ListenStream") == ["/srv/x.sock"]
    assert "nothing is remembered on disk" in told
    assert "nobody but root" not in told


@linux_only
def test_what_the_file_says_concerns_the_unit_too(home: Path) -> None:
    (home / "laned.toml").write_text(
        'model = "demo"\nallow_group = ["root"]\nstore = "/ssd/laned"\nmetrics_port = 9100\nmetrics_host = "::"\n'
    )
    text, told = shown(home, "--config", "laned.toml")
    assert lines(text, "ReadWritePaths") == ["/ssd/laned"]
    assert lines(text, "IPAddressDeny") == []
    assert "install -d -o laned -g laned -m 750 /ssd/laned" in told
    text, told = shown(home, "--config", "laned.toml", "--store", "/var/cache/laned/x", "--metrics-host", "::1")
    assert (lines(text, "ReadWritePaths"), lines(text, "IPAddressDeny")) == ([], ["any"])
    (home / "laned.toml").write_text('model = "demo"\nallow_group = ["root"]\nstore = "~/kept"\n')
    text, told = shown(home, "--config", "laned.toml")
    assert lines(text, "ReadWritePaths") == [], "the service's home, not that of the one who installs it"


@linux_only
def test_a_service_of_the_machine_keeps_its_store_where_it_may_write(home: Path) -> None:
    for given in (["--store", "/srv/x"], ["--store-socket", "/run/s"]):
        text, _ = shown(home, "--model", "demo", *given)
        (command,) = lines(text, "ExecStart")
        assert command.endswith(f" serve --model demo {' '.join(given)} --allow-group laned")
    text, _ = shown(home, "--model", "demo")
    (command,) = lines(text, "ExecStart")
    assert command.endswith(" serve --model demo --store /var/lib/laned/store --allow-group laned")
    text, _ = shown(home, "--model", "demo", "--allow-group", "staff")
    assert lines(text, "ExecStart")[0].endswith(" --allow-group staff --store /var/lib/laned/store")


@linux_only
def test_adapters_are_given_on_each_with_its_whole_path(home: Path) -> None:
    flags = ["--adapter", "sql=./x", "../y", "--adapter", "sum=/z"]
    text, _ = shown(home, "--user", "--model", "demo", *flags)
    (command,) = lines(text, "ExecStart")
    assert command.endswith(
        f" serve --model demo --adapter sql={home}/x --adapter default={home.parent}/y --adapter sum=/z"
    )
    parser = Parser("serve", "", ())
    configuration.add_flags(parser)
    words = shlex.split(command)
    given = parser.parse(words[words.index("serve") + 1 :])
    assert dict(configuration.load(given).adapter) == {
        "sql": f"{home}/x",
        "default": f"{home.parent}/y",
        "sum": "/z",
    }
