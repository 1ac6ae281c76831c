"""`laned gateway` as a process of its own in front of a real daemon."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.daemon import LANED, START_S, STOP_S

_ADDRESS = re.compile(r"the gateway is at (http://\S+)")


class GatewayProcess:
    def __init__(self, folder: Path, socket: Path, *flags: str) -> None:
        self._log = folder / f"gateway-{time.monotonic_ns()}.log"
        command = [str(LANED), "gateway", "--socket", str(socket), "--port", "0", *flags]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url = self._wait_for_address()

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _wait_for_address(self) -> str:
        deadline_s = time.monotonic() + START_S
        while not (found := _ADDRESS.search(self.log)):
            assert self.process.poll() is None, f"the gateway ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline_s, f"the gateway hangs:\n{self.log}"
            time.sleep(0.05)
        return found[1]

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextmanager
def gateway_to(folder: Path, socket: Path, *flags: str) -> Iterator[GatewayProcess]:
    """A gateway that listens. It must end by SIGTERM, with no fault in its log."""
    running = GatewayProcess(folder, socket, *flags)
    try:
        yield running
        assert running.terminate() == 0, running.log
        assert "Traceback" not in running.log, running.log
    finally:
        running.process.kill()
        running.process.wait(STOP_S)
