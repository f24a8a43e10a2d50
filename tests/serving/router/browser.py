"""A headless Chromium, told what to do over the pipes of its DevTools protocol."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
LEAST_FD = 10  # of our ends: the browser has its own at 3 and 4
CLOSE_S, ANSWER_S = 30, 60


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser of its own; close it.

    Attributes:
        errors: what its console was told: exceptions, refused loads, failed requests.
    """

    def __init__(self, program: str, profile: Path, *, width: int = 1280, is_dark: bool = False):
        ours, theirs = _pipe()
        its, us = _pipe()
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        shell = f'exec "$@" 3<&{its} 4>&{theirs}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(its, theirs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(its)
        os.close(theirs)
        self._told, self._say = os.fdopen(ours, "rb"), os.fdopen(us, "wb", buffering=0)
        self._rest, self._num_said, self._session = b"", 0, ""
        self.errors: list[str] = []
        try:
            self._attach(width, is_dark=is_dark)
        except BaseException:
            self._end()
            raise

    def _attach(self, width: int, *, is_dark: bool) -> None:
        pages = self._call("Target.getTargets")["targetInfos"]
        [target] = [one["targetId"] for one in pages if one["type"] == "page"]
        told = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = told["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        assert "errorText" not in self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page, wait for it if it is a promise, return its JSON."""
        told = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def text(self, selector: str) -> str:
        """Return what is to be read at a place; "": there is no such place."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, text = {"Enter": (13, "\r"), "Tab": (9, "")}[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """Write a picture of all of the page."""
        told = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = ""
            self._call("Browser.close")
        self._say.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._end()

    def _end(self) -> None:
        self._say.close()
        self._process.kill()
        self._process.wait()
        self._told.close()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_said += 1
        message = {"id": self._num_said, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._say.write(json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._num_said:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            is_told, _, _ = select.select([self._told], [], [], ANSWER_S)
            assert is_told, f"the browser has said nothing for {ANSWER_S} s"
            part = self._told.read1()
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


def _pipe() -> tuple[int, int]:
    """Make a pipe whose ends have numbers that the browser's do not have."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, LEAST_FD) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
