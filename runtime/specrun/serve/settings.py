"""What a server is asked for. Standard library only."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from specrun.errors import UsageError
from specrun.options import DEFAULT_MAX_BATCH, DEFAULT_MAX_WAITING

MAX_KEY = 1024  # characters


@dataclass(frozen=True)
class ServeOptions:
    """How a server listens, and what it lets requests take.

    ``host``, ``port``: where it listens; port 0: a free one. Elsewhere than on the loopback it
    wants an ``api_key``, which every request must bring then, or ``without_key``.
    ``model_name``: of the model, in requests and answers (None: as the manifest has it).
    ``max_batch``: requests that run at once, in turn; each has KV buffers of its own.
    ``max_waiting``: those that wait for them; more get status 429.
    ``timeout``: seconds from the arrival of a request to the end of its text, at most.
    ``max_new_tokens``: where a request does not say (None: the checkpoint's default, else what the
    context has room for).
    ``max_prompt_tokens``: longest prompt (None: the context). ``max_body_bytes``: of a request.
    ``cors_origins``: whose pages a browser lets ask here; ``*``: everybody's.
    ``grace``: seconds that running requests have to end when the server does.
    ``page``: serve the chat page at ``/``. ``access_log``: a line per request on stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    without_key: bool = False
    model_name: str | None = None
    max_batch: int = DEFAULT_MAX_BATCH
    max_waiting: int = DEFAULT_MAX_WAITING
    timeout: float = 600.0
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 4 << 20
    cors_origins: tuple[str, ...] = ()
    grace: float = 30.0
    page: bool = True
    access_log: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            optional = name in ("max_new_tokens", "max_prompt_tokens") and value is None
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not optional and not whole:
                raise UsageError(
                    f"{name}: must be a whole number of at least {least}, got {value!r}",
                    hint=f"give {name} a value of {least} or more",
                )
        if self.port > 65535:
            raise UsageError(f"port: must be at most 65535, got {self.port}", hint="0: a free one")
        for name, positive in (("timeout", True), ("grace", False)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
                wanted = "above 0" if positive else "of 0 or more"
                raise UsageError(
                    f"{name}: must be seconds {wanted}, got {value!r}", hint="give a number"
                )
        if self.model_name is not None and not self.model_name:
            raise UsageError("model_name: must not be empty", hint="leave model_name out")
        self._check_key()
        for origin in self.cors_origins:
            _check_origin(origin)

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)

    def _check_key(self) -> None:
        key = self.api_key
        if key is not None:
            plain = key.isascii() and key.isprintable() and " " not in key
            if not key or len(key) > MAX_KEY or not plain:
                raise UsageError(
                    f"api_key: must be 1 to {MAX_KEY} printable ASCII characters without blanks",
                    hint="for example: openssl rand -hex 32",
                )
        elif not self.loopback and not self.without_key:
            raise UsageError(
                f"host: on {self.host!r} others could use the server, and no API key is set",
                hint="give --api-key-file FILE, or --without-key where everybody may",
            )


_LEAST = {
    "port": 0,
    "max_batch": 1,
    "max_waiting": 0,
    "max_new_tokens": 0,
    "max_prompt_tokens": 1,
    "max_body_bytes": 1024,
}


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    bare = origin == f"{parts.scheme}://{parts.netloc}" and parts.scheme and parts.netloc
    if origin != "*" and not bare:
        raise UsageError(
            f"cors_origins: must be origins of pages, got {origin!r}",
            hint="for example https://chat.example.org, without a path",
        )
