"""What signals ask of the daemon.

SIGTERM, SIGINT   the end: refuse what is new, finish what runs
SIGHUP            the options anew, as far as a running daemon can take them
SIGUSR1           all stacks: Python's threads on standard error, which works even where everything hangs, and
                  Trio's tasks in the log, whatever its level, which takes a Trio that still turns
"""

from __future__ import annotations

import faulthandler
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import trio

from scheduler import log

logger = logging.getLogger(__name__)

_STANDARD_ERROR = 2
_TRIO = Path(trio.__file__).parent


class Signals:
    """watch() has to run for anything to be noticed."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        """on_stop is called when the end is asked for, however often, before `stop` is set."""
        self.stop = trio.Event()
        self._on_stop = on_stop
        self._reload = trio.Event()

    async def watch(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        with trio.open_signal_receiver(*watched) as received:
            # In front of Trio's handler, which it calls afterwards.
            faulthandler.register(signal.SIGUSR1, _STANDARD_ERROR, all_threads=True, chain=True)
            try:
                task_status.started()
                async for number in received:
                    self._take(number)
            finally:
                faulthandler.unregister(signal.SIGUSR1)

    async def reload_asked(self) -> None:
        """Return when SIGHUP has come since the last call; several count as one."""
        await self._reload.wait()
        self._reload = trio.Event()

    def _take(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload.set()
        elif number == signal.SIGUSR1:
            for line in tasks():
                log.asked_for(logger, "task %s", line)
        else:
            logger.info("%s: draining", signal.Signals(number).name)
            self._on_stop()
            self.stop.set()


def tasks() -> Iterator[str]:
    """A line for each of Trio's tasks that runs code of ours: its name, and where it waits, innermost place first."""
    waiting = [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        if task is None:
            continue
        waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        frames = [(Path(frame.f_code.co_filename), line) for frame, line in task.iter_await_frames()]
        places = [f"{file.parent.name}/{file.name}:{line}" for file, line in frames if not file.is_relative_to(_TRIO)]
        if places:
            yield f"{task.name}: {' < '.join(reversed(places))}"
