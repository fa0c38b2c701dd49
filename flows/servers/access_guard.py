"""Guard of the pages that we serve on loopback: an ASGI application that wraps the page's own application.

Any web page that is open in the user's browser can send requests to 127.0.0.1, and Prefect's API can run code. The
guard recognizes such requests by their headers Origin and Sec-Fetch-Site. A foreign page may also have a name that
resolves to 127.0.0.1 (DNS rebinding); the guard recognizes its requests by their header Host. Other users of the
machine can reach the port, too, but do not have the key.
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
"""Path at which a server of ours proves that it has the key. The client does not send the key."""
SERVES = "/eckart/serves"
"""Path at which a server of ours names its program and its database. The client must send the key."""

# Any port, because the user may connect through a tunnel.
_HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?")
_REALM = b'Basic realm="eckart", charset="UTF-8"'
# With this header, browsers do not show our page in a frame of a foreign page.
_NO_FRAMES = (b"content-security-policy", b"frame-ancestors 'self'")

Application = Callable[[Any, Any, Any], Awaitable[None]]


def proof(key: str, port: int, nonce: str) -> str:
    """Return the answer to `nonce` that only a holder of the key can compute.

    The answer depends on host and port, so that another program cannot pass on the answer of a server of ours.
    """
    return hmac.new(key.encode(), f"{gethostname()} {port} {nonce}".encode(), hashlib.sha256).hexdigest()


class Guard:
    """An ASGI application that passes to `app` only requests of its own pages, and only those with the right password.

    Args:
        app: the application to protect.
        key: the key of this user's servers, `user:password`. At `PROOF`, the server proves that it has this key.
        auth: `user:password` that each request must give by HTTP Basic authentication; None: no check here, because the
            application checks it itself, or no password is wanted.
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
    """Return why a request of a foreign page is refused; empty for others, and for a link that the user followed."""
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
    """Return all values of a header, joined, so that no comparison succeeds if the header is given twice."""
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
