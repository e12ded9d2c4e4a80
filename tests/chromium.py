"""A headless Chromium through its debugging pipe: null-terminated JSON on two file descriptors, no dependency."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One page of one browser; `value` evaluates JavaScript in it."""

    def __init__(self, url: str, profile: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._write, self._read, self._process = _spawn(profile)
        self._buffer, self._last, self._session = b"", 0, None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Page.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        while self.value("document.readyState") != "complete":
            pass

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key: str) -> None:
        text = " " if key == " " else ""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code="Space" if text else key, text=text)

    def click(self, selector: str) -> None:
        """A real click at the middle of an element."""
        self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        middle = "(r => [r.x + r.width / 2, r.y + r.height / 2])"
        box = self.value(f"{middle}(document.querySelector({selector!r}).getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def select(self, selector: str, value: Any) -> None:
        self.value(
            f"(e => {{ e.value = {json.dumps(str(value))}; e.dispatchEvent(new Event('change')); }})"
            f"(document.querySelector({selector!r}))"
        )

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 2**16)
            if not chunk:
                raise RuntimeError("the browser has closed its pipe")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._write)
        os.close(self._read)


def _spawn(profile: Path) -> tuple[int, int, int]:
    """A browser: where to write to it, where to read from it, its process."""
    ends = [*os.pipe(), *os.pipe()]
    # Out of the way of 3 and 4, where the browser expects its ends.
    from_us, write, read, to_us = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in ends)
    for fd in ends:
        os.close(fd)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    assert BINARY is not None
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    pipes = [(os.POSIX_SPAWN_DUP2, from_us, 3), (os.POSIX_SPAWN_DUP2, to_us, 4)]
    process = os.posix_spawn(BINARY, [BINARY, *flags, "about:blank"], os.environ, file_actions=[*quiet, *pipes])
    for fd in (from_us, to_us):
        os.close(fd)
    return write, read, process
