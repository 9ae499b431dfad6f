"""A headless Chromium for tests, driven over its debugging pipe: no package, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOUND = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page. `errors` holds what its scripts threw and what it printed as an error; `requests` what it loaded."""

    def __init__(self, write: int, read: int, timeout_s: float):
        self._write, self._read, self.timeout_s = write, read, timeout_s
        self._buffer, self._id = b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1280, height: int = 900) -> None:
        """Load a file at a window size, and wait until it is there."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", metrics)
        self._loaded = False
        self._call("Page.navigate", {"url": path.as_uri()})
        end = time.monotonic() + self.timeout_s
        while not self._loaded:
            self._handle(self._receive(end))

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives; AssertionError where it throws."""
        answer = self._call("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        answer = self._call("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params or {}}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.timeout_s
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._handle(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {self.timeout_s:g} s"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _handle(self, event: dict[str, Any]) -> None:
        name, params = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(str(params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif name == "Page.loadEventFired":
            self._loaded = True


@contextmanager
def browser(profile: Path, timeout_s: float = 120) -> Iterator[Browser]:
    """A browser with an empty profile folder, ended afterwards."""
    assert FOUND is not None
    to_child, write = os.pipe()
    read, from_child = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4; the shell puts ours there, in an order that
    # survives their being 3 or 4 already
    command = [FOUND, *FLAGS, f"--user-data-dir={profile}"]
    shell = f'exec 8<&{to_child} 9>&{from_child}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command], pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_child)
    os.close(from_child)
    try:
        yield Browser(write, read, timeout_s)
    finally:
        os.close(write)  # that is how it is told to end
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read)
