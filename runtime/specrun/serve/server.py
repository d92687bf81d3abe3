"""A server at work: the socket, the threads, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from specrun import __version__
from specrun.errors import UsageError
from specrun.manifest import MANIFEST
from specrun.pool import Pool
from specrun.process import Closing
from specrun.serve import app
from specrun.serve.answers import Spelling
from specrun.serve.asks import Asks
from specrun.serve.metrics import Metrics
from specrun.serve.replies import Served
from specrun.serve.runs import Desk
from specrun.serve.settings import ServeOptions

if TYPE_CHECKING:
    from specrun.engine import Engine

BACKLOG = 2048
SIGNALS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger("specrun.serve")


class Server(Closing):
    """Serves one engine, which has no other user as long as this is open.

    It listens from its making on, and answers from ``start`` or ``run`` on.
    """

    def __init__(self, engine: Engine, settings: ServeOptions) -> None:
        self._settings = settings
        self._socket = _listen(settings)
        try:
            self._pool = Pool(
                engine, max_batch=settings.max_batch, max_waiting=settings.max_waiting
            )
        except BaseException:
            self._socket.close()
            raise
        metrics = Metrics(self._pool)
        self._desk = Desk(self._pool, Asks(engine, settings, log.warning), metrics)
        served = Served(
            engine,
            settings.model_name or engine.manifest.target.id,
            _fingerprint(engine),
            Spelling(engine.tokenizer),
        )
        self.model = served.model
        self._uvicorn = _Uvicorn(
            app.make(served, settings, self._pool, self._desk, metrics), settings, self._pool
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> Server:
        """Answer in a thread of its own."""
        self._thread = threading.Thread(target=self._serve, name="specrun-serve", daemon=True)
        self._thread.start()
        return self

    def run(self) -> None:
        """Answer until SIGTERM or Ctrl-C. Those that run then may end, for ``grace`` seconds."""
        self._serve()

    def close(self) -> None:
        """End as after SIGTERM, and free the engine."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._pool.close()
        self._desk.close()
        self._socket.close()

    def _serve(self) -> None:
        asyncio.run(self._uvicorn.serve(sockets=[self._socket]))


class _Uvicorn(uvicorn.Server):
    """Ends in an order: nothing new, those that run, those that take too long."""

    def __init__(self, asgi: ASGIApp, settings: ServeOptions, pool: Pool) -> None:
        super().__init__(
            uvicorn.Config(
                asgi,
                log_level="info" if settings.access_log else "warning",
                access_log=settings.access_log,
                server_header=False,
                log_config=None,  # whoever embeds it decides
                lifespan="off",
                ws="none",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=math.ceil(settings.grace) + 5,  # who does not read
            )
        )
        self._grace = settings.grace
        self._pool = pool

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does; but a signal that was obeyed is not raised once more at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._pool.stop_taking()
        late = asyncio.get_running_loop().call_later(self._grace, self._pool.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()


def _listen(settings: ServeOptions) -> socket.socket:
    host = settings.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(
            f"host: cannot listen on {settings.host}, port {settings.port}: {error.strerror}",
            hint="give another host or port; port 0 is a free one",
        ) from error


def _fingerprint(engine: Engine) -> str:
    """Changes with the engines: what a seed gives holds for one of them."""
    digest = hashlib.sha256((engine.folder / MANIFEST).read_bytes()).hexdigest()
    return f"specrun-{__version__}-{digest[:10]}"
