"""A headless Chromium without a network, driven by Playwright."""

import contextlib
import functools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page, Request

TIMEOUT_MS = 60_000
# It resolves no host name and uses no proxy; tests run as root.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--proxy-server=http://127.0.0.1:9",
)


@functools.cache
def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab. `requests` are the addresses that pages asked for; `errors` what their console reported."""

    def __init__(self, page: "Page"):
        self.page = page
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", self._add_request)
        page.on("console", self._add_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _add_request(self, request: "Request") -> None:
        self.requests.append(request.url)

    def _add_message(self, message: "ConsoleMessage") -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} {message.location['url']}")

    def log_in(self, address: str, cookie: str, path: str) -> None:
        """Store the cookie NAME=VALUE, which belongs to a path."""
        name, value = cookie.split("=", 1)
        host = address.split("/")[2].partition(":")[0]
        self.page.context.add_cookies([{"name": name, "value": value, "domain": host, "path": path}])

    def open(self, page: Path | str, width: int = 1200, is_dark: bool = False) -> None:
        """Open a file or an address and wait until it has drawn."""
        self.page.goto("about:blank")  # another fragment of the same address would not load it again
        self.requests, self.errors = [], []
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme="dark" if is_dark else "light")
        self.page.goto(page if isinstance(page, str) else page.absolute().as_uri())
        self.draw()

    def draw(self) -> None:
        """Wait for the next frame, in which a change of the controls is drawn."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.run(frames)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.page.evaluate(script)

    def drag(self, points: Sequence[tuple[float, float]]) -> None:
        """Press the mouse at the first point, move it to the others, and release it."""
        mouse = self.page.mouse
        mouse.move(*points[0])
        mouse.down()
        for point in points[1:]:
            mouse.move(*point)
        mouse.up()


@contextlib.contextmanager
def start_browser() -> Iterator[Browser]:
    """Yield a browser with a new profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        page = chromium.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        yield Browser(page)
        chromium.close()
