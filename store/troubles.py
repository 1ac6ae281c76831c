"""What goes wrong with a disk: counted each time, logged once per kind until that kind is over."""

from __future__ import annotations

import errno
import logging

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    return error.errno in _FULL


class Troubles:
    def __init__(self) -> None:
        self.num = 0
        self._under_way: dict[str, set[int | None]] = {}

    def note(self, doing: str, error: OSError) -> None:
        """doing: what did not work, as in "write to /store"."""
        self.num += 1
        kinds = self._under_way.setdefault(doing, set())
        if error.errno not in kinds:
            kinds.add(error.errno)
            logger.warning("cannot %s: %s", doing, error)

    def over(self, doing: str) -> None:
        """It worked."""
        if self._under_way.pop(doing, None):
            logger.info("can %s again", doing)
