"""A headless Chromium, spoken to over a pair of pipes in its DevTools protocol: JSON between zero bytes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Not an expectation: what hangs should fail.
HANGS_S = 90.0


class Page:
    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = replies
        self._ids = count(1)
        self._unread = b""
        self._session: str | None = None
        (target,) = (each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": number, "method": method, "params": params, **session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (reply := self._next()).get("id") != number:
            pass
        assert "error" not in reply, reply
        return reply["result"]

    def _next(self) -> Any:
        while b"\0" not in self._unread:
            data = os.read(self._replies, 1 << 20)
            assert data, "Chromium has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline_s = time.monotonic() + HANGS_S
        while not self.run(script):
            assert time.monotonic() < deadline_s, f"it never came true: {script}"
            time.sleep(0.05)

    def show(self, url: str, width: int = 1000, height: int = 720, *, dark: bool = False, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    assert PATH is not None
    from_us, commands = os.pipe()
    replies, to_us = os.pipe()
    flags = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe --user-data-dir={folder}"
    # Chromium reads descriptor 3 and writes 4.
    shell = f"exec {PATH} {flags} about:blank 3<&{from_us} 4>&{to_us}"
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", shell], stderr=log, stdout=log, pass_fds=(from_us, to_us))
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(commands, replies)
    finally:
        os.close(commands)
        os.close(replies)
        process.terminate()
        process.wait(HANGS_S)
