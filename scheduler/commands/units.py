"""The service manager's files for this machine: those of deploy/, with this machine's paths and the options that were
given. Nothing is written here; scheduler/commands/install.py does that.

    system   /etc/systemd/system, and the user `laned`     /Library/LaunchDaemons
    user     ~/.config/systemd/user                        ~/Library/LaunchAgents
"""

from __future__ import annotations

import math
import os
import plistlib
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The first line of what we write: what does not have it is not ours to change.
MARK = "Written by `laned install-service`; `laned uninstall-service` removes it."
LABEL = "local.laned"
# The home of the user that a service of the machine runs as, and the folder that it starts in.
STATE = Path("/var/lib/laned")
# The folders that it may write to.
WRITABLE = (STATE, Path("/var/cache/laned"))
STORE = str(STATE / "store")
# From the end of a drain to launchd's kill: what was remembered goes to disk.
KILL_AFTER_DRAIN_S = 15
# Python packages that hold MLX's CUDA build.
_CUDA = ("mlx-cuda-12", "mlx-cuda-13")


@dataclass(frozen=True, slots=True)
class File:
    path: Path
    text: str

    @property
    def is_ours(self) -> bool:
        """Whether there is a file at the path, and we wrote it."""
        try:
            return MARK in self.path.read_text(encoding="utf-8", errors="replace")[:400]
        except FileNotFoundError:
            return False


@dataclass(frozen=True, slots=True)
class Plan:
    """files: what to write. folders: what has to be there for them to work. start, stop: commands for a shell."""

    files: tuple[File, ...]
    folders: tuple[Path, ...]
    start: tuple[str, ...]
    stop: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the service is to be. flags: of `laned serve`. Of all that these and the file say, what concerns the service
    manager, too: socket: where clients connect, None for the place where they look. drain_s: how long running requests
    go on at the end. writes: folders outside of WRITABLE that the daemon writes to. is_public: others than this machine
    are to reach /metrics."""

    flags: tuple[str, ...] = ()
    socket: str | None = None
    drain_s: float = 30.0
    writes: tuple[str, ...] = ()
    is_public: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Where things are. laned: the command's words. python: what runs it, links followed. templates: folder deploy/.
    cuda: MLX's CUDA build is there."""

    laned: tuple[str, ...]
    templates: Path
    home: Path
    config_home: Path
    root: Path = Path("/")
    python: Path = Path("/usr/bin/python3")
    is_mac: bool = False
    cuda: bool = False

    @property
    def group(self) -> str:
        """Of a service of the machine; its user is called the same."""
        return "_laned" if self.is_mac else "laned"

    @classmethod
    def this(cls) -> Machine:
        home = Path.home()
        configured = os.environ.get("XDG_CONFIG_HOME", "")
        return cls(
            laned=_command(),
            templates=_templates(),
            home=home,
            config_home=Path(configured) if os.path.isabs(configured) else home / ".config",
            python=Path(sys.executable).resolve(),
            is_mac=sys.platform == "darwin",
            cuda=any(map(_is_installed, _CUDA)),
        )


def plan(machine: Machine, asked: Asked, *, user: bool) -> Plan:
    """user: whether it is a service of one's own, not of the machine."""
    command = [*machine.laned, "serve", *asked.flags]
    return (_launchd if machine.is_mac else _systemd)(machine, command, asked, user)


def _systemd(machine: Machine, command: list[str], asked: Asked, user: bool) -> Plan:
    templates = machine.templates / "systemd" / ("user" if user else "")
    units = machine.config_home / "systemd" / "user" if user else machine.root / "etc" / "systemd" / "system"
    service = _set(_read(templates / "laned.service"), "ExecStart", " ".join(map(systemd_word, command)))
    if asked.writes and not user:
        service = _set(service, "ProtectSystem", f"strict\nReadWritePaths={' '.join(map(_systemd_path, asked.writes))}")
    if asked.is_public and not user:
        service = re.sub(r"(?m)^IPAddress(Deny|Allow)=.*\n", "", service)
    listening = _read(templates / "laned.socket")
    if asked.socket is not None:
        listening = _set(listening, "ListenStream", asked.socket.replace("%", "%%"))
    files = [File(units / "laned.socket", listening), File(units / "laned.service", service)]
    if machine.cuda:
        files.append(File(units / "laned.service.d" / "cuda.conf", _read(templates / "cuda.conf")))
    if not user:
        files.append(File(machine.root / "etc" / "sysusers.d" / "laned.conf", _read(templates / "laned.sysusers")))
    marked = tuple(File(file.path, f"# {MARK}\n{file.text}") for file in files)
    control = ("systemctl", "--user") if user else ("systemctl",)
    start = [" ".join((*control, "daemon-reload")), " ".join((*control, "enable --now laned.socket laned.service"))]
    start.append("journalctl --user-unit laned -f" if user else "journalctl -u laned -f")
    if not user:
        start.insert(0, "systemd-sysusers")
    return Plan(
        files=marked,
        folders=(),
        start=tuple(start),
        stop=((*control, "disable", "--now", "laned.socket", "laned.service"),),
        after=((*control, "daemon-reload"),),
    )


def _launchd(machine: Machine, command: list[str], asked: Asked, user: bool) -> Plan:
    job = plistlib.loads((machine.templates / "launchd" / ("agent.plist" if user else "daemon.plist")).read_bytes())
    library = (machine.home if user else machine.root) / "Library"
    path = library / ("LaunchAgents" if user else "LaunchDaemons") / f"{LABEL}.plist"
    listener = job["Sockets"]["Listener"]
    if user:
        listener["SockPathName"] = str(library / "Caches" / "laned" / "laned.sock")
        job["StandardErrorPath"] = str(library / "Logs" / "laned.log")
    job["ProgramArguments"] = command
    job["ExitTimeOut"] = math.ceil(asked.drain_s) + KILL_AFTER_DRAIN_S
    if asked.socket is not None:
        listener["SockPathName"] = asked.socket
    first, rest = plistlib.dumps(job, sort_keys=False).decode().split("\n", 1)
    domain = f"gui/{os.getuid()}" if user else "system"
    return Plan(
        files=(File(path, f"{first}\n<!-- {MARK} -->\n{rest}"),),
        folders=(Path(listener["SockPathName"]).parent,),
        start=(f"launchctl bootstrap {domain} {path}", f"tail -f {job['StandardErrorPath']}"),
        stop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
        after=(),
    )


def systemd_word(word: str) -> str:
    """A word of a command line as a unit has it: systemd expands % and $, and cuts at blanks (systemd.service(5))."""
    return _systemd_path(word.replace("$", "$$"))


def _systemd_path(word: str) -> str:
    """One of several paths in a unit, where $ is a character like others."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    word = word.replace("\n", "\\n").replace("\t", "\\t")
    return word if re.fullmatch(r"[\w@%+=:,./$-]+", word) else f'"{word}"'


def _set(unit: str, key: str, value: str) -> str:
    """The unit with another value for a key that it has once."""
    changed, number = re.subn(rf"(?m)^{key}=.*$", lambda _: f"{key}={value}", unit)
    assert number == 1, f"{number} lines {key}= in the unit"
    return changed


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _templates() -> Path:
    """deploy/ of a clone, or its copy in an installed package."""
    here = Path(__file__).parents[1]
    return next(folder for folder in (here / "deploy", here.parent / "deploy") if folder.is_dir())


def _command() -> tuple[str, ...]:
    """How this very laned is called: the script beside our Python, which needs neither PATH nor an activated venv."""
    script = Path(sys.executable).with_name("laned")
    return (str(script),) if os.access(script, os.X_OK) else (sys.executable, "-P", "-m", "scheduler.cli")


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
