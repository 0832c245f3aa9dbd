"""A running `paceline watch`, and requests to it that no code of Paceline makes."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import start

STATIC = Path(__file__).parents[2] / "src/paceline/web/static"
URL = re.compile(r"http://([\w.]+(?::\d+)?)/\?token=(\S+)")


def why_not_built() -> str | None:
    built = (STATIC / "page.js").is_file()
    return None if built else "the page of paceline watch is not built: make page"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Watching:
    """A server at an address, which is a port or the path of a Unix socket."""

    address: int | Path
    host: str
    token: str
    output: Any
    path: str = ""
    cookie: str = ""
    _streams: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}/?token={self.token}"

    def log_in(self) -> "Watching":
        answer = self.ask(f"/?token={self.token}", cookie=None)
        assert answer.status == 200, answer
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        self.path = re.search(r"url=(/\S+/)", answer.text)[1]
        return self

    def connect(self) -> socket.socket:
        if isinstance(self.address, int):
            return socket.create_connection(("127.0.0.1", self.address), timeout=60)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        connection.connect(str(self.address))
        return connection

    def send(self, target: str, method: str, cookie: str | None, **headers: str) -> socket.socket:
        given = {"Host": self.host, "Connection": "close"} | ({"Cookie": cookie} if cookie else {})
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self.connect()
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return connection

    def ask(self, target: str, method: str = "GET", cookie: str | None = "", **headers: str) -> Answer:
        """Send one request; target "x" without a slash is below the path of the page."""
        whole = target if target.startswith("/") else self.path + target
        with self.send(whole, method, self.cookie if cookie == "" else cookie, **headers) as connection:
            data = b""
            while piece := connection.recv(2**16):
                data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        found = {name.lower(): value for name, _, value in pairs}
        if found.get("transfer-encoding") == "chunked":
            body = b"".join(body.split(b"\r\n")[1::2])
        return Answer(int(first.split()[1]), found, body)

    def messages(self, **query: str) -> Iterator[dict[str, Any]]:
        """Yield the messages of a stream."""
        words = "&".join(f"{name}={value}" for name, value in query.items())
        with self.send(f"{self.path}stream?{words}", "GET", self.cookie) as connection:
            data = b""
            while piece := connection.recv(2**16):
                data += piece
                while (end := data.find(b"\n\n")) >= 0:
                    event, data = data[:end], data[end + 2 :]
                    begin = event.find(b"data: ")
                    if begin >= 0:
                        yield json.loads(re.sub(rb"\r\n[0-9a-f]+\r\n", b"", event[begin + 6 :]))


@contextlib.contextmanager
def watch(*words: str | Path, at: Path) -> Iterator[Watching]:
    """Yield a server that `paceline watch` with these words started, to which a browser logged in."""
    with start("watch", *words, at=at, XDG_CACHE_HOME=str(at / "cache")) as running:
        running.wait_until(lambda: URL.search(running.output_so_far().out) is not None, "listening")
        host, token = URL.search(running.output_so_far().out).groups()
        path = re.match(r"listening on (\S+): ", running.output_so_far().out)
        address = Path(path[1]) if path else int(host.rpartition(":")[2])
        yield Watching(address, host, token, running).log_in()
