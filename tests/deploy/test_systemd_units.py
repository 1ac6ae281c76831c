"""The units, read by systemd's own tools and by their rules among themselves."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler import cli, configuration
from scheduler.options import OPTIONS
from scheduler.usage import Parser
from tests.deploy.folder import DEPLOY, LANED, PACKAGED

SYSTEM = DEPLOY / "systemd"
USER = SYSTEM / "user"
SERVICE_TOML = DEPLOY / "service.toml"
SERVICES = ("laned.service", "laned@.service", "laned-store.service")
UNITS = (*SERVICES, "laned.socket", "laned@.socket", "laned-store.socket")
# systemd's own measure, from 0 to 10.
MOST_EXPOSED = 2.0

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
needs_sysusers = pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed"
)


def entries(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Section: its lines, as (key, value), in order; a key may come several times."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in path.read_text().splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = found.setdefault(match[1], [])
        elif line and not line.startswith("#"):
            key, value = line.split("=", 1)
            section.append((key, value))
    return found


def one(path: Path, section: str, key: str) -> str:
    (value,) = (value for name, value in entries(path)[section] if name == key)
    return value


@pytest.fixture
def placed() -> Iterator[Path]:
    """The units with the laned of this Python, for a tool that looks whether it is there."""
    with tempfile.TemporaryDirectory() as folder:  # sockets are thought of in it, and their paths have to be short
        yield place_units(Path(folder))


def place_units(root: Path) -> Path:
    for path in (*SYSTEM.glob("laned*.s[eo]*"), *USER.glob("laned*")):
        folder = root / ("user" if path.parent == USER else "system")
        folder.mkdir(exist_ok=True)
        text = path.read_text().replace(PACKAGED, str(LANED)).replace("%h/.local/bin/laned", str(LANED))
        (folder / path.name).write_text(text)
    for folder in ("system", "user"):
        drop_in = root / f"{folder}-cuda" / "laned.service.d" / "cuda.conf"
        shutil.copytree(root / folder, root / f"{folder}-cuda")
        drop_in.parent.mkdir()
        shutil.copy((SYSTEM if folder == "system" else USER) / "cuda.conf", drop_in)
    return root


def analyze(*argv: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(cwd), "SYSTEMD_LOG_LEVEL": "warning"}
    return subprocess.run(
        ["systemd-analyze", *argv], cwd=cwd, capture_output=True, text=True, env=environment, timeout=60, check=False
    )


@needs_analyze
@pytest.mark.parametrize("folder", ["system", "system-cuda"])
def test_systemd_finds_no_fault(placed: Path, folder: str) -> None:
    names = [name.replace("@", "@llama") for name in UNITS]
    checked = analyze("verify", *(f"./{name}" for name in names), cwd=placed / folder)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@needs_analyze
@pytest.mark.parametrize("folder", ["user", "user-cuda"])
def test_nor_does_a_users(placed: Path, folder: str) -> None:
    checked = analyze("verify", "--user", "./laned.socket", "./laned.service", cwd=placed / folder)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@needs_analyze
@pytest.mark.parametrize("folder", ["system", "system-cuda"])
@pytest.mark.parametrize("unit", SERVICES)
def test_little_is_exposed(placed: Path, folder: str, unit: str) -> None:
    threshold = str(round(MOST_EXPOSED * 10))
    checked = analyze("security", "--offline=true", f"--threshold={threshold}", f"./{unit}", cwd=placed / folder)
    assert checked.returncode == 0, checked.stdout
    (level,) = re.findall(r"Overall exposure level for .*: ([\d.]+)", checked.stdout)
    assert float(level) <= MOST_EXPOSED


@needs_sysusers
def test_the_user_is_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    made = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(SYSTEM / "laned.sysusers")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "laned:x:" in (tmp_path / "etc" / "passwd").read_text()
    assert "laned:x:" in (tmp_path / "etc" / "group").read_text()


@pytest.mark.parametrize("path", [*(SYSTEM / name for name in SERVICES), USER / "laned.service"], ids=lambda p: p.name)
def test_what_is_started_is_a_command_of_ours_with_options_that_it_has(path: Path) -> None:
    words = one(path, "Service", "ExecStart").split()[1:]
    command = words.pop(0)
    assert command in cli._COMMANDS
    if command == "store":
        assert words.pop(0) == "serve"
    parser = Parser("serve", "", ())
    configuration.add_flags(parser)
    given = vars(parser.parse(words))
    assert set(given) <= {"config", *(option.field for option in OPTIONS)}


@pytest.mark.parametrize("path", [SYSTEM / "laned.service", SYSTEM / "laned@.service", USER / "laned.service"])
def test_a_daemons_unit_overrides_nothing_that_its_file_may_say(path: Path) -> None:
    _, command, *flags = one(path, "Service", "ExecStart").split()
    assert (command, flags[0], len(flags)) == ("serve", "--config", 2)


def test_what_the_file_of_a_service_says_is_what_the_units_let_it_do() -> None:
    found = configuration.read_config(str(SERVICE_TOML))
    assert set(found) == {"model", "allow_group", "store"}
    assert found["allow_group"] == (one(SYSTEM / "laned.socket", "Socket", "SocketGroup"),)
    state = one(SYSTEM / "laned.service", "Service", "StateDirectory")
    assert Path(found["store"]).is_relative_to(Path("/var/lib") / state)


def hardening(path: Path) -> dict[str, str]:
    """What follows NoNewPrivileges: all of it forbids something."""
    lines = entries(path)["Service"]
    start = [key for key, _ in lines].index("NoNewPrivileges")
    found: dict[str, str] = {}
    for key, value in lines[start:]:
        found[key] = f"{found[key]}; {value}" if key in found else value
    return found


def test_the_three_are_hardened_alike() -> None:
    alone, instance, store = (hardening(SYSTEM / name) for name in SERVICES)
    assert alone == instance
    differ = {key for key in alone | store if alone.get(key) != store.get(key)}
    assert differ == {"PrivateNetwork", "PrivateUsers", "RestrictAddressFamilies", "IPAddressAllow"}, "it needs less"


def test_instance_and_store_meet_at_one_socket_and_one_user() -> None:
    address = one(SYSTEM / "laned-store.socket", "Socket", "ListenStream")
    assert address in one(SYSTEM / "laned-store.service", "Service", "ExecStart").split()
    assert f'#store_socket = "{address}"\n' in SERVICE_TOML.read_text()
    assert {one(SYSTEM / name, "Service", "User") for name in SERVICES} == {"laned"}
    for name in ("laned", "laned@", "laned-store"):
        socket, service = entries(SYSTEM / f"{name}.socket"), entries(SYSTEM / f"{name}.service")
        assert ("Requires", f"{name.replace('@', '@%i')}.socket") in service["Unit"]
        assert dict(socket["Socket"])["SocketMode"] == ("0600" if name == "laned-store" else "0660")
        assert dict(service["Service"])["Type"] == "notify"


@pytest.mark.parametrize("path", [SYSTEM / "laned.service", SYSTEM / "laned@.service", USER / "laned.service"])
def test_a_kill_comes_after_the_daemons_own_patience(path: Path) -> None:
    (drain_s,) = (option.default for option in OPTIONS if option.name == "drain-timeout")
    assert int(one(path, "Service", "TimeoutStopSec").removesuffix("s")) > drain_s
    assert one(path, "Service", "WatchdogSec") == "3min"
    assert one(path, "Service", "ExecReload") == "/bin/kill -HUP $MAINPID"
    assert one(path, "Service", "RestartPreventExitStatus") == "2"


def test_no_key_stands_twice_by_mistake() -> None:
    for path in (*SYSTEM.glob("laned*.s*"), *USER.glob("laned.*")):
        if path.suffix == ".sysusers":
            continue
        for section, lines in entries(path).items():
            keys = [key for key, _ in lines if key not in ("SystemCallFilter", "Environment", "After")]
            assert len(keys) == len(set(keys)), (path.name, section)
