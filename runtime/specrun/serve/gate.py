"""What every request passes: who asks, under which name the server was called, how much comes."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrun.serve.problems import Problem
from specrun.serve.settings import ServeOptions, is_loopback

OPEN = ("/", "/health")  # without a key
BODY_SECONDS = 60.0  # that a body may take to come
DRAINED = 8  # times the limit: so much of a body that is too long is read, so that its sender
# sees the answer and not a broken connection

LEFT = 499  # the status that counts where the client left before its answer began

Count = Callable[[str, int], None]


class Gate:
    """Around the app: refuses who has no key, and counts answers (``count(path, status)``).

    On the loopback it answers to the names of this machine alone: a page of another site, whose
    name was made to stand for 127.0.0.1, cannot use it. Nor can one that says where it is from
    (``Origin``), unless it is let. An answer that nobody waits for any more counts as ``LEFT``.
    """

    def __init__(self, app: ASGIApp, settings: ServeOptions, count: Count) -> None:
        self._app = app
        self._settings = settings
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        left = False

        async def watched() -> Message:
            nonlocal left
            message = await receive()
            left = left or message["type"] == "http.disconnect"
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], LEFT if left else message["status"])
            await send(message)

        try:
            self._check(scope)
        except Problem as problem:
            await problem.response()(scope, watched, counted)
            return
        await self._app(scope, watched, counted)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._settings.loopback and not is_loopback(host_of(headers.get("host", ""))):
            raise Problem(
                403, f"the server has not the name {headers.get('host', '')!r}", code="wrong_host"
            )
        origin = headers.get("origin")
        if origin is not None and not self._lets(origin, headers.get("host", "")):
            raise Problem(
                403,
                f"pages of {origin!r} may not ask here; the server's --cors-origin lets one",
                code="wrong_origin",
            )
        key = self._settings.api_key
        if key is None or scope["path"] in OPEN:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), key.encode())
        if kind.lower() != "bearer" or not right:
            raise Problem(
                401,
                "the server wants its API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _lets(self, origin: str, host: str) -> bool:
        """Whether a page from there may ask: the server's own, or one that the settings name."""
        scheme, _, place = origin.partition("://")
        own = scheme in ("http", "https") and place != "" and place.lower() == host.lower()
        return own or not {origin, "*"}.isdisjoint(self._settings.cors_origins)


def host_of(header: str) -> str:
    """The host of a ``Host`` header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


async def read_body(request: Request, limit: int) -> bytes:
    """The JSON that a request brings. Raises Problem."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Pages of other sites may send anything else without being asked.
        raise Problem(415, f"the body must be application/json, got {kind or 'nothing'!r}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(request, limit)
    except TimeoutError as error:
        raise Problem(408, "the body took too long", code="timeout") from error
    except ClientDisconnect as error:
        raise Problem(400, "the body did not come whole") from error


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        if size > DRAINED * limit:
            break
    if size > limit:
        raise Problem(413, f"the body has more than {limit} bytes", code="request_too_large")
    return b"".join(chunks)
