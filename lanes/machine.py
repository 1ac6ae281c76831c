"""What this machine lets a process use: processor cores and memory, the limits of containers (cgroups) counted in.

Every function takes the root of the file system, so that a test can show it another machine. Imports no MLX.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def physical_cores(root: Path = ROOT) -> int:
    """Cores with their own arithmetic units that this process may run on; at least 1.

    Two hardware threads of one core count once: matrix products gain nothing from the second.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(root, cpu) for cpu in cpus}
    quota = _cpu_quota(root)
    return max(1, len(cores) if quota is None else min(len(cores), int(quota)))


def memory_bytes(root: Path = ROOT) -> int:
    """Memory this process may use: the machine's, or less where a container has a limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text is not None and text.isdigit():  # cgroup 2 writes "max" where there is no limit
                limits.append(int(text))
    return min(limits)


def _siblings(root: Path, cpu: int) -> str:
    """A name for the core that a hardware thread is part of, equal for all its threads."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _cpu_quota(root: Path) -> float | None:
    """Processors' worth of time per second that the cgroups allow; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of those above it: each may hold a limit, the lowest counts."""
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = base
        elif controller in controllers.split(","):
            top = base / controller
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return None
