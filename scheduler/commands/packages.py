"""Whether what is installed is what this version of laned asks for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distributions, requires, version

from scheduler.commands.finding import Finding

# Name, and the versions that will do; what only an extra asks for has a marker behind a semicolon.
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)$")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")
# MLX's parts that bring the same files: of two the one installed last wins, or half of each does.
BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
SYNC = "install laned again, in a clone with `uv sync`"


def check_packages() -> Iterator[Finding]:
    yield _requirements(requires("laned") or (), version)
    yield from _backends(found.metadata["Name"] for found in distributions())


def _requirements(needed: Iterable[str], version_of: Callable[[str], str]) -> Finding:
    wrong, known = [], []
    for requirement in needed:
        match = _REQUIREMENT.match(requirement.strip())
        if match is None:
            continue
        name, bounds = match[1], match[2]
        try:
            found = version_of(name)
        except PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        known.append(f"{name} {found}")
        if not satisfies(found, bounds):
            wrong.append(f"{name} is {found}, laned asks for {bounds.strip()}")
    if wrong:
        return Finding("problem", "packages", "; ".join(wrong), SYNC)
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding("ok", "packages", ", ".join([f"Python {python}", *sorted(known)]))


def _backends(installed: Iterable[str]) -> Iterator[Finding]:
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in installed if name}
    found = [name for name in BACKENDS if name in names]
    if len(found) > 1:
        said = f"{' and '.join(found)} are installed side by side, and have files of the same names"
        yield Finding("problem", "MLX's parts", said, f"pip uninstall {' '.join(found)}, then install the one you want")


def satisfies(found: str, bounds: str) -> bool:
    """Whether a version is within bounds such as ">=0.32.4,<0.33". Only the numbers that it begins with count."""
    numbers = _numbers(found)
    for relation, bound in _BOUND.findall(bounds):
        ours, theirs = _level(numbers, _numbers(bound))
        holds = {
            ">=": ours >= theirs,
            "<=": ours <= theirs,
            "==": ours == theirs,
            "!=": ours != theirs,
            "<": ours < theirs,
            ">": ours > theirs,
        }
        if not holds[relation]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def _level(ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both with as many numbers: 1.2 is 1.2.0."""
    length = max(len(ours), len(theirs))
    return ours + (0,) * (length - len(ours)), theirs + (0,) * (length - len(theirs))
