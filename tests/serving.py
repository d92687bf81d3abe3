"""A server of a toy, its clients, and the same engines alone to compare with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import toys

import specrun
from specrun.serve import ServeOptions, start
from specrun.serve.server import Server

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Every method at once, and room for texts that do not end before a test wants them to.
TOY = toys.Toy(
    history_weight=1,
    drafter=True,
    draft=toys.Toy(history_weight=1, max_context=40_000),
    chat_template=CHAT,
    max_context=40_000,
)
LONG = 30_000  # tokens: a minute or so, which nobody waits for
MODEL = "toy"


class Serving:
    """``client``: OpenAI's, that never tries again; ``http``: without its help; ``alone``: the
    same folder, opened once more."""

    def __init__(self, folder: Path, options: dict[str, Any], opening: dict[str, Any]) -> None:
        self.engine = specrun.load(folder, threads=1, **opening)
        self.alone = specrun.load(folder, threads=1)
        settings = ServeOptions(**{"port": 0, **options})
        self.server: Server = start(self.engine, settings)
        key = settings.api_key or "none"
        url = self.server.url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
        self.http = httpx.Client(
            base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"}
        )

    @property
    def pool(self) -> Any:
        """The server's."""
        return self.server._pool

    def chat(self, text: str = "12312", **fields: Any) -> Any:
        """The client's answer to one message."""
        messages: Any = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model=MODEL, messages=messages, **fields)

    def complete(self, prompt: Any = "12312", **fields: Any) -> Any:
        """The client's answer to a prompt."""
        return self.client.completions.create(model=MODEL, prompt=prompt, **fields)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        """A body as it is, with a message in it unless it has its own."""
        if path.endswith("chat/completions"):
            body = {"messages": [{"role": "user", "content": "12312"}], **body}
        return self.http.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """A value of the metrics page; 0 where there is none yet."""
        for line in self.http.get("/metrics").text.splitlines():
            place, _, value = line.rpartition(" ")
            bare, _, rest = place.partition("{")
            if bare == name and all(f'{key}="{item}"' in rest for key, item in labels.items()):
                return float(value)
        return 0.0

    def close(self) -> None:
        """End everything."""
        self.client.close()
        self.http.close()
        self.server.close()
        self.engine.close()
        self.alone.close()


@contextlib.contextmanager
def serving(
    folder: Path,
    toy: toys.Toy = TOY,
    opening: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """Serve ``toy``, written into ``folder``; ``options``: of ServeOptions."""
    made = Serving(toys.write_folder(folder, toy), options, opening or {})
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that must come soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
