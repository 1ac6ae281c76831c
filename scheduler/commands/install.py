"""`laned install-service` and `laned uninstall-service`: the service manager's files, written, shown and removed.

Only files that carry our mark are replaced or removed.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from scheduler import configuration
from scheduler.commands.units import STATE, STORE, WRITABLE, Asked, File, Machine, Plan, plan
from scheduler.options import OPTIONS, Options
from scheduler.usage import CommandFailed, Parser, UsageError

# Options whose value is a path, and those where it is one if there is such a file. A service starts in another folder
# than the one who types.
_PATHS = ("store", "store_socket", "socket")
_PERHAPS_PATHS = ("model", "chat_template", "blas")


def install(argv: Sequence[str]) -> int:
    parser = Parser(
        "install-service",
        "Write the service manager's files for this machine (systemd's units, or launchd's property list), and show\n"
        "them. It takes the options of `laned serve`; the service will run with them. Nothing is started.",
        (
            "laned install-service --user --model mlx-community/Qwen3-4B-4bit",
            "laned install-service --user --config ~/.config/laned/laned.toml --dry-run",
            "sudo laned install-service --config /etc/laned/laned.toml",
        ),
    )
    parser.add_argument("--user", action="store_true", help="a service of your own, not of the machine")
    parser.add_argument("--dry-run", action="store_true", help="show the files, and write nothing")
    configuration.add_flags(parser)
    given = parser.parse(argv)
    _make_absolute(given)
    options = configuration.load(given)
    machine = Machine.this()
    asked = _asked(machine, given, options)
    chosen = plan(machine, asked, user=given.user)
    for file in chosen.files:
        print(f"# {file.path}\n{file.text}")
    for note in () if given.user else _notes(machine, asked, options, getattr(given, "config", None)):
        print(f"laned: note: {note}", file=sys.stderr)
    if given.dry_run:
        return 0
    _write(chosen)
    print("Written. To start it:")
    sudo = "" if given.user or os.geteuid() == 0 else "sudo "
    for line in chosen.start:
        print(f"  {sudo}{line}")
    return 0


def uninstall(argv: Sequence[str]) -> int:
    parser = Parser(
        "uninstall-service",
        "Stop the service that `laned install-service` made, and remove its files. Models, the store, the\n"
        "configuration and the user stay.",
        ("laned uninstall-service --user", "sudo laned uninstall-service --dry-run"),
    )
    parser.add_argument("--user", action="store_true", help="the service of your own, not of the machine")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    given = parser.parse(argv)
    machine = Machine.this()
    chosen = plan(machine, Asked(), user=given.user)
    ours = [file.path for file in _all_files(machine, given.user) if file.is_ours]
    if not ours:
        raise CommandFailed(f"There is no service here that `laned install-service` made ({chosen.files[0].path}).")
    for command in chosen.stop:
        _do(command, given.dry_run)
    for path in ours:
        print(f"rm {path}")
        if not given.dry_run:
            _remove(path)
    for command in chosen.after:
        _do(command, given.dry_run)
    return 0


def _all_files(machine: Machine, user: bool) -> tuple[File, ...]:
    """All that may have been written, whether there was a GPU then or not."""
    return plan(replace(machine, cuda=True), Asked(), user=user).files


def _make_absolute(given: argparse.Namespace) -> None:
    """Paths that hold wherever the service starts, of those that were given as flags."""
    for field in ("config", *_PATHS, *_PERHAPS_PATHS):
        path = getattr(given, field, None)
        if path is not None and (field not in _PERHAPS_PATHS or Path(path).expanduser().exists()):
            setattr(given, field, os.path.abspath(os.path.expanduser(path)))


def _asked(machine: Machine, given: argparse.Namespace, options: Options) -> Asked:
    flags = _flags(given, options)
    if not given.user and getattr(given, "config", None) is None:
        # A file has the last word on these, also when it is changed later.
        if options.store is None and options.store_socket is None:
            flags += ["--store", STORE]
        if not options.allow_user and not options.allow_group:
            flags += ["--allow-group", machine.group]
    home = machine.home if given.user else STATE
    store = None if options.store is None else _within(home, options.store)
    return Asked(
        flags=tuple(flags),
        socket=None if options.socket is None else _within(home, options.socket),
        drain_s=options.drain_timeout,
        writes=() if store is None or any(map(Path(store).is_relative_to, WRITABLE)) else (store,),
        is_public=options.metrics_port is not None and not _is_loopback(options.metrics_host),
    )


def _flags(given: argparse.Namespace, options: Options) -> list[str]:
    """What was given, as flags again."""
    flags = []
    if (config := getattr(given, "config", None)) is not None:
        flags += ["--config", config]
    for option in OPTIONS:
        value = getattr(given, option.field, None)
        if value is None or option.field == "socket":
            continue
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{option.name}")
        elif option.kind.is_list:
            for name, folder in getattr(options, option.field).items():
                flags += [f"--{option.name}", f"{name}={folder}"]
        else:
            flags += [f"--{option.name}", value]
    return flags


def _within(home: Path, path: str) -> str:
    """A path of the file, as the service will understand it."""
    return os.path.normpath(home / (path[2:] if path.startswith("~/") else path))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _notes(machine: Machine, asked: Asked, options: Options, config: str | None) -> Iterator[str]:
    """What will not work as a service of the machine, as far as one can tell from here, and what has to be done."""
    for place in (Path(machine.laned[0]), machine.python):
        if _is_in_home(place):
            yield (
                f"{place} is in somebody's home, which the service cannot see: install laned elsewhere, as in "
                "/opt/laned, or give --user"
            )
            break
    for name, path in (
        ("config", config),
        ("model", options.model),
        ("store", options.store),
        ("store-socket", options.store_socket),
        ("blas", options.blas),
        *(("adapter", folder) for folder in options.adapter.values()),
    ):
        if path is not None and _is_in_home(Path(path)):
            yield f"--{name} {path} is in somebody's home, which the service cannot see: move it, or give --user"
    for folder in asked.writes:
        yield (
            f"{folder} has to be there, and to belong to the service's user: "
            f"sudo install -d -o {machine.group} -g {machine.group} -m 750 {shlex.quote(folder)}"
        )
    if asked.is_public and not machine.is_mac:
        yield (
            f"/metrics is to be reached at {options.metrics_host}, so the unit does not keep the service to the "
            "loopback (IPAddressDeny=any): whoever reaches that address may read them"
        )
    if config is not None and options.store is None and options.store_socket is None:
        yield f'nothing is remembered on disk: {config} may say store = "{STORE}"'
    if config is not None and not options.allow_user and not options.allow_group:
        yield f'nobody but root and the service\'s user may connect: {config} may say allow_group = ["{machine.group}"]'


def _is_in_home(path: Path) -> bool:
    return path.is_absolute() and Path(os.path.realpath(path)).parts[1:2] in (("home",), ("root",), ("Users",))


def _write(chosen: Plan) -> None:
    for file in chosen.files:
        if file.path.exists() and not file.is_ours:
            raise CommandFailed(f"{file.path} was not written by `laned install-service`: move it away first.")
    try:
        for folder in chosen.folders:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in chosen.files:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file.path.write_text(file.text, encoding="utf-8")
    except PermissionError as error:
        raise CommandFailed(
            f"{error.filename}: {error.strerror}. Run it as root, or give --user for a service of your own."
        ) from None
    except OSError as error:
        raise CommandFailed(f"{error.filename}: {error.strerror}.") from None


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}.") from None
    if path.parent.name.endswith(".d") and path.parent.name.startswith("laned") and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _do(command: Sequence[str], dry_run: bool) -> None:
    """Run one of the service manager's commands; it may be that there is nothing to stop."""
    print(shlex.join(command))
    if dry_run:
        return
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]} is not on this machine, so the service cannot be stopped.")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        print(f"laned: note: it ended with status {done.returncode}", file=sys.stderr)
