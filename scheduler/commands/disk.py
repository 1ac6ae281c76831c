"""Whether a disk will do, for a store and for what is kept anyway: may it be written, is there room, how fast is it."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scheduler.commands.finding import Finding
from scheduler.commands.status import size_of

# Enough to be told from what a disk's own memory takes, little enough to be done with in a moment.
TRIAL_BYTES = 128 << 20
BLOCK_BYTES = 4 << 20
# A row of a thousand tokens of a model of eight billion parameters is some 150 MB: below these a restore takes seconds.
SLOW_READ_BYTES_PER_S = 200e6
SLOW_WRITE_BYTES_PER_S = 50e6
LEAST_FREE_BYTES = 5 << 30
# Darwin's fcntl() that keeps a file out of the page cache; Python has no name for it everywhere.
_F_NOCACHE = 48


def check_place(folder: Path) -> Finding:
    """Whether there is room in the folder and the right to use it; its speed is not measured."""
    place = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        do = "give yourself the right to, or set XDG_CACHE_HOME: what is made once for this machine is kept there"
        return Finding("warning", "disk", f"{place} cannot be written: {error.strerror or error}", do)
    free = shutil.disk_usage(place).free
    said = f"{size_of(free)} free in {place}"
    if free < LEAST_FREE_BYTES:
        do = "make room: models lie there, too; `laned doctor --store DIR` looks at another disk for a store"
        return Finding("warning", "disk", said, do)
    return Finding("ok", "disk", f"{said}; --store DIR measures a disk for a store")


def _nearest(folder: Path) -> Path:
    """The folder, or what there is of the path to it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_store(folder: Path) -> Iterator[Finding]:
    """Write and read a file in the folder, which is gone again afterwards."""
    place = _nearest(folder)
    if not place.is_dir():
        yield Finding("problem", "store", f"{place} is no folder", "choose another for --store")
        return
    free = shutil.disk_usage(place).free
    if free < LEAST_FREE_BYTES:
        yield Finding("warning", "store", f"{size_of(free)} free in {place}", "make room, or choose another disk")
    try:
        write_s, read_s = _trial(place, min(TRIAL_BYTES, free // 4))
    except OSError as error:
        said = f"{place} cannot be written: {error.strerror or error}"
        yield Finding("problem", "store", said, "give yourself the right to, or choose another folder for --store")
        return
    num_bytes = min(TRIAL_BYTES, free // 4)
    write, read = num_bytes / write_s, num_bytes / read_s
    is_new = "" if folder.exists() else " (the folder will be made)"
    said = f"{folder}{is_new}: writes {rate(write)}, reads {rate(read)}, {size_of(free)} free"
    if read < SLOW_READ_BYTES_PER_S or write < SLOW_WRITE_BYTES_PER_S:
        yield Finding("warning", "store", said, "slow: prompts may be computed as fast as they are read; take an SSD")
    else:
        yield Finding("ok", "store", said)


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


def _trial(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Seconds to write so many bytes until they are on the disk, and to read them from there. Raises OSError."""
    block = os.urandom(BLOCK_BYTES)  # some file systems compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        handle = file.fileno()
        began_s = time.perf_counter()
        for start in range(0, num_bytes, BLOCK_BYTES):
            file.write(block[: num_bytes - start])
        os.fsync(handle)
        write_s = time.perf_counter() - began_s
        _forget_cached(handle)
        os.lseek(handle, 0, os.SEEK_SET)
        began_s = time.perf_counter()
        while file.readinto(memoryview(bytearray(BLOCK_BYTES))):
            pass
        return write_s, time.perf_counter() - began_s


def _forget_cached(handle: int) -> None:
    """Have what follows read from the disk and not from memory, where the system can be told so."""
    with suppress(OSError):
        if sys.platform == "darwin":
            fcntl.fcntl(handle, _F_NOCACHE, 1)
        elif hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
