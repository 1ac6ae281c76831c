"""How far the loading of the model is: a bar on a terminal, a line for each phase elsewhere, and a status line for the
service manager."""

from __future__ import annotations

import logging
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from scheduler.notify import Notifier

logger = logging.getLogger(__name__)


class LoadingStopped(Exception):
    """Loading was told to stop."""


class BytesColumn(DownloadColumn):
    """Nothing where no bytes are counted."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class LoadProgress:
    """Is told by the model's thread; stop() may be called from any other."""

    def __init__(self, console: Console | None, notifier: Notifier | None = None) -> None:
        """console: where to draw, None where nobody looks."""
        self._notifier = notifier or Notifier()
        self._bar = console and Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            BytesColumn(binary_units=True),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._phase: str | None = None
        self._stopped = False

    def stop(self) -> None:
        """Make the next report raise LoadingStopped."""
        self._stopped = True

    def __call__(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        if self._stopped:
            raise LoadingStopped
        self._notifier.loading(phase, done_bytes, total_bytes)
        if phase != self._phase:
            self._phase = phase
            logger.debug("loading: %s", phase)
            if self._bar:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(phase, total=total_bytes or None)
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes or None)

    def __enter__(self) -> LoadProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
