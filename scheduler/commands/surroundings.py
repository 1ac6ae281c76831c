"""What `laned doctor` sees of the machine without MLX: how busy it is, memory, limits, the socket, a running daemon."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trio

from scheduler.client import Client, ClientError
from scheduler.commands.finding import Finding
from scheduler.commands.status import duration, size_of
from scheduler.listener import MAX_CONNECTIONS, SocketUnavailable, check_path
from scheduler.log import printable

# Less memory than this, free, and not even a small model runs beside what runs already.
LEAST_FREE_BYTES = 2 << 30
# Files and sockets of the daemon's own.
OTHER_DESCRIPTORS = 64
# A daemon says hello at once. One that does not is loading its model, behind a socket that somebody else opened.
HELLO_S = 3.0


def check_load(load: float, cores: int) -> Finding:
    """load: the mean number of processes that want to run, of the last minute."""
    said = f"{load:.1f} processes want to run, on {cores} core{'s' * (cores > 1)}"
    if load > cores / 2:
        do = "what is measured here is less than this machine can do; end what else runs, and look again"
        return Finding("warning", "load", said, do)
    return Finding("ok", "load", said)


def check_memory(total_bytes: int, free_bytes: int | None) -> Finding:
    """total_bytes: what this process may have at most. free_bytes: what other programs leave now, None: not known."""
    if free_bytes is None:
        return Finding("ok", "memory", size_of(total_bytes))
    said = f"{size_of(free_bytes)} free of {size_of(total_bytes)}"
    if free_bytes < LEAST_FREE_BYTES:
        do = "weights and rows have to fit into it: end something, take a smaller model, or fewer bits"
        return Finding("warning", "memory", said, do)
    return Finding("ok", "memory", said)


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("ok", "open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}")
    said = f"up to {soft:,}, and {MAX_CONNECTIONS:,} clients may connect"
    more = hard == resource.RLIM_INFINITY or hard >= needed
    do = f"ulimit -n {needed}, before laned serve" if more else "raise the hard limit, as an administrator"
    return Finding("warning", "open files", said, f"{do}; or have fewer clients at a time")


def check_socket(path: Path) -> Iterator[Finding]:
    """Whether a daemon could open it, or one answers there already, and how that one fares."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        mode = 0
    report = trio.run(_ask, path) if stat.S_ISSOCK(mode) else None
    if isinstance(report, Mapping):
        yield _permissions(path, mode)
        yield from check_daemon(report)
        return
    try:
        check_path(path)
    except SocketUnavailable as unavailable:
        if report is None:
            yield Finding("problem", "socket", printable(str(unavailable)), "choose another path with --socket")
        else:
            do = "if it is not loading a model, end it"
            yield Finding("warning", "socket", f"something listens on {path}, but {printable(report)}", do)
        return
    found = "left by a daemon that is gone, and will be replaced" if stat.S_ISSOCK(mode) else "can be opened"
    yield Finding("ok", "socket", f"{path}: {found}; no daemon runs there")


def _permissions(path: Path, mode: int) -> Finding:
    folder = path.parent.stat().st_mode
    if mode & 0o077 and folder & 0o011:
        said = f"{path} may be opened by other users (mode {stat.S_IMODE(mode):o})"
        return Finding("warning", "socket", said, "laned checks who they are; if none should come, chmod 600 it")
    return Finding("ok", "socket", f"{path}: for its owner only")


async def _ask(path: Path) -> Mapping[str, Any] | str:
    """A daemon's report, or why there is none."""
    with trio.move_on_after(HELLO_S):
        try:
            async with Client(path) as client:
                return await client.status()
        except ClientError as error:
            return str(error)
    return f"has said nothing for {HELLO_S:.0f} s"


def check_daemon(report: Mapping[str, Any], installed: str | None = None) -> Iterator[Finding]:
    """Of a running daemon's report. installed: the version of laned that asks."""
    installed = installed or version("laned")
    model, totals = report.get("model", {}), report.get("totals", {})
    running = str(report.get("version", "?"))
    name, up = printable(str(model.get("name", "?"))), duration(report.get("uptime_s", 0))
    said = f"{name} for {up}, process {report.get('pid')}"
    if running != installed:
        do = "start it anew, to get the version that is installed"
        yield Finding("warning", "daemon", f"{said}; it is laned {printable(running)}, installed is {installed}", do)
    else:
        yield Finding("ok", "daemon", said)
    if model.get("lane") == "serial":
        do = "docs/families.md tells which models are batched"
        said = f"one request at a time: {printable(str(model.get('lane_reason')))}"
        yield Finding("warning", "daemon's lane", said, do)
    if failed := totals.get("failed"):
        said = f"{failed:,} of {totals.get('requests', 0):,} requests have failed"
        yield Finding("warning", "daemon", said, "its log says why")


def load_and_cores() -> tuple[float, int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return os.getloadavg()[0], cores
