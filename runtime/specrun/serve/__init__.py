"""An OpenAI-compatible server of one engine folder, with a chat page and metrics.

    from specrun.serve import ServeOptions, start

    with start(engine, ServeOptions(port=8000)) as server:
        print(server.url)

Needs the extra ``serve`` (FastAPI, uvicorn, prometheus_client); nothing of it is loaded before
``start`` is called.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from specrun.errors import UsageError
from specrun.serve.settings import ServeOptions

if TYPE_CHECKING:
    from specrun.engine import Engine
    from specrun.serve.server import Server

__all__ = ["ServeOptions", "server_class", "start"]

PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client")


def start(engine: Engine, options: ServeOptions | None = None) -> Server:
    """Serve ``engine`` in threads of their own, until the server is closed.

    The engine has no other user meanwhile. Raises UsageError where the extra is missing or the
    address is taken.
    """
    return server_class()(engine, options or ServeOptions()).start()


def server_class() -> type[Server]:
    """The class of servers. Raises UsageError where the extra is missing."""
    try:
        from specrun.serve.server import Server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in PACKAGES:
            raise
        missing = [name for name in PACKAGES if find_spec(name) is None] or [str(error.name)]
        raise UsageError(
            f"serve: needs the extra 'serve'; not installed of it: {', '.join(missing)}",
            hint='pip install "specrun[serve]", or from a checkout: pip install ".[serve]"',
        ) from error
    return Server
