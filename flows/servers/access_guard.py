"""Guard the pages that we serve on loopback: an ASGI application around the page's own.

A web page that somebody opens in a browser can send requests to 127.0.0.1, and Prefect's API runs code. The headers
Origin and Sec-Fetch-Site tell such requests apart; the header Host tells those of a page whose owner lets its name
resolve to 127.0.0.1 (DNS rebinding). Other users of the machine can reach the port, too, but lack the key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from socket import gethostname
from typing import Any

PROOF = "/eckart/proof"
"""The path where a server of ours proves that it has the key, without being given it."""
SERVES = "/eckart/serves"
"""The path where it names its program and its database. It asks for the key."""

_HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?")  # with a tunnel the port may be another one
_REALM = b'Basic realm="eckart", charset="UTF-8"'
_NO_FRAMES = (b"content-security-policy", b"frame-ancestors 'self'")  # no foreign page may show this one in a frame

Application = Callable[[Any, Any, Any], Awaitable[None]]


def proof(key: str, port: int, nonce: str) -> str:
    """Return the answer that only a holder of the key can give, bound to host and port so that none can relay it."""
    return hmac.new(key.encode(), f"{gethostname()} {port} {nonce}".encode(), hashlib.sha256).hexdigest()


class Guard:
    """Let only requests of this machine's own pages and of holders of the key reach an application.

    Args:
        app: the application.
        key: the key that `PROOF` proves.
        auth: `user:password` that HTTP's Basic scheme must give; None if the application asks by itself.
        serves: the answer at `SERVES`.
    """

    def __init__(self, app: Application, key: str, auth: str | None = None, serves: str = "") -> None:
        self._app, self._key, self._serves = app, key, serves
        self._wanted = _basic(auth) if auth else None

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if reason := _foreign(scope):
            await _refuse(scope, send, 403, reason)
        elif scope["path"] == PROOF and scope["type"] == "http":
            nonce = scope["query_string"].decode("latin-1")
            await _answer(send, 200, proof(self._key, scope["server"][1], nonce).encode())
        elif (wanted := self._wanted_at(scope)) and not hmac.compare_digest(_header(scope, b"authorization"), wanted):
            await _refuse(scope, send, 401, b"This server asks for its key.", (b"www-authenticate", _REALM))
        elif scope["path"] == SERVES and scope["type"] == "http":
            await _answer(send, 200, self._serves.encode())
        else:
            await self._app(scope, receive, _unframed(send))

    def _wanted_at(self, scope: Mapping[str, Any]) -> bytes | None:
        return _basic(self._key) if scope["path"] == SERVES else self._wanted


def _basic(auth: str) -> bytes:
    return b"Basic " + base64.b64encode(auth.encode())


def _foreign(scope: Mapping[str, Any]) -> bytes:
    """Return why a request comes from a foreign page; empty if it does not, or if somebody followed a link."""
    host, origin, site, mode = (
        _header(scope, name).lower() for name in (b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode")
    )
    if not _HOST.fullmatch(host):
        return b"Address this server as 127.0.0.1 or localhost."
    if origin and origin != b"http://" + host:
        return b"Pages of another origin may not use this server."
    if site not in (b"", b"none", b"same-origin") and not (mode == b"navigate" and scope.get("method") == "GET"):
        return b"Pages of another site may not use this server."
    return b""


def _header(scope: Mapping[str, Any], name: bytes) -> bytes:
    """Return all values of a header, joined: a second value makes every comparison fail."""
    return b",".join(value for header, value in scope["headers"] if header == name)


async def _refuse(scope: Mapping[str, Any], send: Any, status: int, reason: bytes, *more: tuple[bytes, bytes]) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, status, reason, *more)


async def _answer(send: Any, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"text/plain"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _unframed(send: Any) -> Any:
    async def sent(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), _NO_FRAMES]}
        await send(message)

    return sent
