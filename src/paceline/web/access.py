"""Who may read the page: checks of every request, and headers of every response.

Loopback is not private on a shared machine: every user of it can connect, and every web page that a browser
shows can make it send requests. A request therefore needs a cookie, which only the address with the random
token sets. The cookie belongs to a random path, because browsers send cookies to all ports of a host: another
user's server on another port does not know the path. A request for /metrics, which browsers do not send, has
a token instead.
"""

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "paceline"
METRICS = "/metrics"
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.I)
MAX_QUERY_BYTES = 2000
TEXT = (b"content-type", b"text/plain; charset=utf-8")
# Sent with every response, also with errors.
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


def _secret() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Access:
    """The secrets of one server. The token is in the printed address, the session in the cookie.

    metrics_token: for /metrics only, besides the token; None: /metrics is not answered."""

    token: str = field(default_factory=_secret, repr=False)
    session: str = field(default_factory=_secret, repr=False)
    path: str = field(default_factory=lambda: secrets.token_urlsafe(12), repr=False)
    metrics_token: str | None = field(default=None, repr=False)

    def url(self, host: str) -> str:
        return f"http://{host}/?token={self.token}"


class Guard:
    """Passes a request on only if it is from the page of this server in a browser of its user."""

    def __init__(self, app: App, access: Access):
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers(scope)
        refused = self._refuse(scope, headers)
        if refused is not None:
            await _answer(send, *refused)
        elif scope["path"] == "/favicon.ico":  # browsers ask for it if the address has no page with an icon
            await _answer(send, 204, "", [])
        elif scope["path"] == "/":
            await self._log_in(scope, send)
        elif scope["path"] == METRICS and self._access.metrics_token is not None:
            if self._may_read_metrics(scope, headers):
                await self._app(scope, receive, _with_headers(send))
            else:
                text = "/metrics requires the token: Authorization: Bearer TOKEN"
                await _answer(send, 401, text, [TEXT, (b"www-authenticate", b"Bearer")])
        elif not self._has_session(scope, headers):
            await _answer(send, 403, "open the address that paceline watch printed")
        else:
            scope = {**scope, "path": scope["path"].removeprefix(f"/{self._access.path}"), "root_path": ""}
            await self._app(scope, receive, _with_headers(send))

    def _refuse(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason if no request like this is ever answered."""
        if scope["method"] != "GET":
            return 405, "only GET is answered"
        if not HOST.fullmatch(headers.get("host", "")):  # DNS rebinding: a name that resolves to 127.0.0.1
            return 403, "the Host of the request must be 127.0.0.1 or localhost"
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            return 414, f"the query is longer than {MAX_QUERY_BYTES} bytes"
        if scope["path"] != "/" and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "the request comes from another site"
        return None

    async def _log_in(self, scope: Scope, send: Send) -> None:
        if not _is_equal(_find_token(scope), self._access.token):
            await _answer(send, 403, "the token is wrong; open the address that paceline watch printed")
            return
        path = f"/{self._access.path}/"
        cookie = f"{COOKIE}={self._access.session}; Path={path}; HttpOnly; SameSite=Strict"
        # A redirect would not send a strict cookie if the address was opened from a link of another site. The
        # refresh also removes the token from the history of the browser.
        page = (
            f'<!doctype html><title>Paceline</title><link rel="icon" href="{path}icon.svg">'
            f'<meta http-equiv="refresh" content="0;url={path}">'
        )
        html = (b"content-type", b"text/html; charset=utf-8")
        await _answer(send, 200, page, [html, (b"set-cookie", cookie.encode())])

    def _has_session(self, scope: Scope, headers: dict[str, str]) -> bool:
        if not scope["path"].startswith(f"/{self._access.path}/"):
            return False
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        given = cookies[COOKIE].value if COOKIE in cookies else ""
        return _is_equal(given, self._access.session)

    def _may_read_metrics(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Return whether the request has a token: `Authorization: Bearer TOKEN`, or ?token=TOKEN."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip() if kind.lower() == "bearer" else _find_token(scope)
        return _is_equal(token, self._access.token) or _is_equal(token, self._access.metrics_token or "\0")


def _find_token(scope: Scope) -> str:
    """Return the token in the query of a request, or ""."""
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[-1]


def _is_equal(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


def _headers(scope: Scope) -> dict[str, str]:
    """Return the headers of a request. A header that occurs twice counts as its values together."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        key = name.decode("latin-1").lower()
        headers[key] = f"{headers[key]},{text}" if key in headers else text
    return headers


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            fixed = {name for name, _ in HEADERS}
            own = [pair for pair in message.get("headers", []) if pair[0].lower() not in fixed]
            message = {**message, "headers": [*own, *HEADERS]}
        await send(message)

    return send_with_headers


async def _answer(
    send: Send, status: int, text: str, headers: Iterable[tuple[bytes, bytes]] = (TEXT,)
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *HEADERS]})
    await send({"type": "http.response.body", "body": text.encode()})
