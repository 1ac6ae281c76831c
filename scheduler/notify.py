"""What the service manager is told: that we load, are ready, reload, stop, and that we are alive (sd_notify(3)).

A message is one datagram of lines NAME=VALUE to the socket that $NOTIFY_SOCKET names. Without that variable, as under
launchd or in a terminal, nothing is sent, and nobody has to ask which it is.

**The watchdog is fed by work, not by a timer.** alive() is called by the loop when the model's thread has answered it:
after each turn, and while nothing is to be done after a question that goes there and back. Neither a thread that hangs
nor a loop that hangs can call it. It may be called as often as one likes: it sends a few messages per watchdog period.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

# How often an idle loop asks the model's thread, where no watchdog wants it more often. It costs 0.3 ms.
IDLE_BEAT_S = 10.0
# Messages per period of the watchdog: half would do (sd_watchdog_enabled(3)), if nothing were ever late.
BEATS_PER_PERIOD = 4
# A model of many gigabytes takes longer to load than any unit's TimeoutStartSec: each report of progress buys so much.
# The longest silence is that of one large file being read from a slow disk.
LOADING_EXTENSION_S = 600.0
# A person does not read `systemctl status` faster, and a download reports hundreds of times a second.
STATUS_EVERY_S = 0.5


class Notifier:
    """All methods may be called from any thread, and none raises for what the manager does."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """address: of the socket, "@" in front of an abstract one. watchdog_s: the period, None where there is none."""
        self._address = address
        self._period_s = watchdog_s
        self._fed_s = float("-inf")
        self._said: tuple[float, str] = (float("-inf"), "")
        self.beat_s = IDLE_BEAT_S if watchdog_s is None else min(IDLE_BEAT_S, watchdog_s / BEATS_PER_PERIOD)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Notifier:
        """Take what systemd left in the environment, so that no child of ours speaks in our name."""
        address = environment.pop("NOTIFY_SOCKET", None)
        period_us, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        meant_for_us = pid in ("", str(os.getpid()))
        watchdog_s = int(period_us) / 1e6 if period_us.isdecimal() and int(period_us) and meant_for_us else None
        return cls(address or None, watchdog_s)

    def loading(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        """How far the model is. Each report lets the start take longer; one that stands still times out."""
        now_s = time.monotonic()
        part = f" ({done_bytes * 100 // total_bytes} %)" if total_bytes else ""
        before_s, before = self._said
        if phase == before and now_s - before_s < STATUS_EVERY_S:
            return
        self._said = (now_s, phase)
        self._send(STATUS=f"Loading the model: {phase}{part}", EXTEND_TIMEOUT_USEC=_us(LOADING_EXTENSION_S))

    def ready(self, status: str) -> None:
        """The socket answers: after the start, and after each reloading()."""
        self._send(READY="1", STATUS=status)

    def reloading(self) -> None:
        self._send(RELOADING="1", MONOTONIC_USEC=_us(time.monotonic()), STATUS="Rereading the options")

    def stopping(self, status: str, patience_s: float) -> None:
        """We end by ourselves within patience_s, whatever the unit's TimeoutStopSec says."""
        self._send(STOPPING="1", STATUS=status, EXTEND_TIMEOUT_USEC=_us(patience_s))

    def alive(self) -> None:
        """Feed the watchdog. To be called only by one who has just seen the model's thread answer."""
        if self._period_s is None:
            return
        now_s = time.monotonic()
        if now_s - self._fed_s >= self._period_s / BEATS_PER_PERIOD / 2:
            self._fed_s = now_s
            self._send(WATCHDOG="1")

    def _send(self, **values: str) -> None:
        if self._address is None:
            return
        # A value is one line; what stands in it may come from a model's folder.
        lines = "\n".join(f"{name}={' '.join(value.split())}" for name, value in values.items())
        where = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                # A manager that does not read may not hold up a step: a lost message is mended by the next one.
                sock.setblocking(False)
                sock.sendto(lines.encode(), where)
        except OSError as error:
            logger.debug("the service manager at %s takes no message: %s", self._address, error)


def _us(seconds: float) -> str:
    return str(int(seconds * 1e6))
