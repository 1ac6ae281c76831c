"""What is handled together, where each piece by itself would cost a launch and memory of its own. Imports no MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def in_groups(items: Iterable[T], size_of: Callable[[T], int], most_bytes: int) -> list[list[T]]:
    """Neighbours, up to so many bytes together, or one alone that is larger."""
    groups: list[list[T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not groups or size > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(item)
        room -= size
    return groups
