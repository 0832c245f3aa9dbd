"""A headless Chromium without a network, controlled over pipes by the DevTools protocol."""

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_MS = 60_000


@functools.cache
def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. `requests` are the addresses that pages asked for; `errors` what their console reported."""

    def __init__(self, to: int, back: int):
        self._to, self._back = to, os.fdopen(back, "rb")
        self._numbers = itertools.count(1)
        self._rest = b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._back.fileno(), 2**20)
            assert piece, "Chromium has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                entry = parameters["entry"]
                self.errors.append(" ".join(filter(None, (entry["text"], entry.get("url")))))
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def open(self, page: Path | str, width: int = 1200, is_dark: bool = False) -> None:
        """Open a file or an address and wait until it has drawn."""
        self.requests, self.errors, self._loaded = [], [], False
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        while not self._loaded:
            self._read()
        self.draw()

    def draw(self) -> None:
        """Wait for the next frame, in which a change of the controls is drawn."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.run(frames)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")


@contextlib.contextmanager
def start_browser(folder: Path) -> Iterator[Browser]:
    """Yield a browser whose profile is in `folder`. It resolves no host name and uses no proxy."""
    program = find_chromium()
    assert program is not None
    from_us, to_us = os.pipe(), os.pipe()

    def place() -> None:  # Chromium reads from descriptor 3 and writes to 4
        read, write = os.dup(from_us[0]), os.dup(to_us[1])
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--proxy-server=http://127.0.0.1:9",
            f"--user-data-dir={folder}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=place,
        start_new_session=True,
    )
    os.close(from_us[0])
    os.close(to_us[1])
    browser = Browser(from_us[1], to_us[0])
    try:
        yield browser
    finally:
        with contextlib.suppress(OSError):
            os.write(browser._to, b'{"id": 0, "method": "Browser.close"}\0')
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(browser._to)
        browser._back.close()
