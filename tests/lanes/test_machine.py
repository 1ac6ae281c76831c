"""Cores and memory, on machines and in containers that are a few files in a folder."""

import os
from pathlib import Path

import pytest

from lanes.machine import memory_bytes, physical_cores


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def all_one_core(root: Path) -> Path:
    """Every processor is a thread of the same core."""
    names = (f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in range(os.cpu_count() or 1))
    return put(root, dict.fromkeys(names, "0-255\n"))


def test_threads_of_a_core_count_once(tmp_path: Path) -> None:
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert physical_cores(tmp_path) == here  # nothing is known of siblings
    assert physical_cores(all_one_core(tmp_path)) == 1
    assert 1 <= physical_cores() <= (here or 1)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ({"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
    ],
)
def test_a_containers_share_of_the_processor(tmp_path: Path, files: dict[str, str], quota: int | None) -> None:
    without_limit = physical_cores(tmp_path)
    assert physical_cores(put(tmp_path, files)) == (without_limit if quota is None else min(quota, without_limit))


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "max"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1000000"}, 1000000),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "2000000",
                "sys/fs/cgroup/a/b/memory.max": "1000000",
            },
            1000000,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000"}, 1000000),
        ({"proc/self/cgroup": "3:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "3000000"}, 3000000),
        ({"proc/self/cgroup": "3:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_a_containers_limit_of_memory(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(put(tmp_path, files)) == (limit or machine)
