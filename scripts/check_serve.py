"""Many clients at once: a server gives what single runs give, its memory stays, its queue ends.

    python scripts/check_serve.py FOLDER [--requests 200] [--waves 6] [--seed 0] [--tokens 64]

Serves the folder with ``specrun serve`` in a process of its own and asks with OpenAI's client, all
requests of a wave at once, streamed: every method of the folder, draft lengths, chats and
completions, greedy and with seeds, with and without stop strings, drawn from the seed. A tenth of
the clients leave in the middle. What all others got must be, letter by letter, what an engine gives
that runs the same request alone, and what those that left had must be its beginning. Then nothing
may run any more, the server's own counts must be those of the clients, and memory (RssAnon of the
server) may grow by less than 10 % from the second wave on: before the first every buffer was made
as large as it may become, and in it the heap grows to what so many connections take. A second
server with a short queue must refuse with status 429 and Retry-After what does not fit, and answer
all others. A table for people, one JSON line last; exit status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

import specrun
from specrun.options import GenerateOptions

MOST_GROWTH = 0.10  # what is in use does not grow; the gaps between are as they come
PROMPTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "prompts.json"
SECONDS = 600.0  # for one request, in the queue and at work


@dataclass(frozen=True)
class Wish:
    """A request, as the client sends it and as the engine takes it. ``leaves``: after so many
    pieces of text."""

    chat: bool
    prompt: str
    options: dict[str, Any]
    leaves: int | None

    def fields(self) -> dict[str, Any]:
        """Of the client's call."""
        ours = ("method", "num_assistant_tokens")
        named = {"max_new_tokens": "max_tokens"}
        given = {named.get(name, name): value for name, value in self.options.items()}
        extra = {name: given.pop(name) for name in ours if name in given}
        return {**given, "extra_body": extra, "stream": True}

    def alone(self, engine: specrun.Engine) -> str:
        """The text of a single run."""
        more = {"num_assistant_tokens_schedule": "heuristic_transient"}
        resolved = engine.resolve(GenerateOptions(method=self.options["method"]))
        kept = resolved.num_assistant_tokens_schedule == "heuristic"
        options = {**self.options, **(more if kept else {})}
        prompt: Any = [{"role": "user", "content": self.prompt}] if self.chat else self.prompt
        result: specrun.Result = engine.generate(prompt, raw=not self.chat, **options)
        return result.text


@dataclass
class Report:
    """What was asked and what was wrong. ``memory``: bytes after each wave."""

    asked: int = 0
    completed: int = 0
    left: int = 0
    refused: int = 0
    seconds: float = 0.0
    methods: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of memory since the second wave, as a share."""
        settled = self.memory[1:]
        return settled[-1] / settled[0] - 1 if settled else 0.0

    @property
    def right(self) -> bool:
        """Whether nothing was wrong."""
        return not self.wrong and self.growth < MOST_GROWTH

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**self.__dict__, "methods": dict(self.methods), "growth": round(self.growth, 4)}


class Server:
    """``specrun serve`` in a process of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "specrun.cli", "serve", str(folder), "--port", "0", *flags]
        # Or each of its threads may keep as much of what was freed as another one is using.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stderr is not None
        found = None
        for line in self._process.stderr:
            if found := re.search(r"serving (\S+) at (http://\S+): ", line):
                break
        if found is None:
            raise RuntimeError("the server did not start")
        self.model, self.url = found[1], found[2]

    def memory(self) -> int:
        """Bytes that are its own (RssAnon)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
        assert found is not None
        return int(found[1]) * 1024

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M)
        return sum(map(float, values))

    def idle(self) -> bool:
        """Whether nothing runs or waits; asked for some seconds."""
        for _ in range(200):
            state = httpx.get(f"{self.url}/health").json()
            if state["running"] == state["waiting"] == 0:
                return True
            time.sleep(0.05)
        return False

    def client(self) -> openai.AsyncOpenAI:
        """One that never tries again; it opens up to 1000 connections."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS
        )

    def close(self) -> int:
        """End it; its exit status."""
        self._process.terminate()
        return self._process.wait(60)


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[Server]:
    """A server that ends with this."""
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        status = server.close()
    if status != 0:
        raise RuntimeError(f"the server ended with status {status}")


def methods_of(engine: specrun.Engine) -> list[str]:
    """All that the folder has."""
    return ["plain", "prompt-lookup", *engine.manifest.drafters]


def draw(engine: specrun.Engine, count: int, tokens: int, rng: random.Random) -> list[Wish]:
    """``count`` requests, of which a tenth leaves."""
    prompts = prompts_for(engine)
    methods = methods_of(engine)
    leaving = set(rng.sample(range(count), count // 10))
    wishes = []
    for index in range(count):
        options: dict[str, Any] = {
            "method": methods[index % len(methods)],
            "max_new_tokens": rng.randint(tokens // 4, tokens),
        }
        if options["method"] != "plain" and rng.random() < 0.5:
            options["num_assistant_tokens"] = rng.randint(1, 4)
        if rng.random() < 0.3:
            options |= {"temperature": 0.8, "seed": rng.randrange(1000)}
        if rng.random() < 0.2:
            options["stop"] = [rng.choice([".", "\n", " the", "7"])]
        leaves = rng.randint(1, 4) if index in leaving else None
        if leaves is not None:
            options["max_new_tokens"] = 4 * tokens
        chat = engine.chat_template is not None and rng.random() < 0.7
        wishes.append(Wish(chat, rng.choice(prompts), options, leaves))
    return wishes


def largest(wishes: list[Wish], batch: int) -> list[Wish]:
    """Of every method as many as run at once, each as long as any of ``wishes``."""
    prompt = max((wish.prompt for wish in wishes), key=len)
    chat = any(wish.chat for wish in wishes)
    most = max(wish.options["max_new_tokens"] for wish in wishes)
    methods = dict.fromkeys(wish.options["method"] for wish in wishes)
    return [
        Wish(chat, prompt, {"method": method, "max_new_tokens": most}, None)
        for method in methods
        for _ in range(batch)
    ]


def prompts_for(engine: specrun.Engine) -> list[str]:
    """Texts that the folder can read: those of the tests, or digits for a toy."""
    if engine.tokenizer.size < 100:
        return ["12312", "123", "4512345", "9", "1212121212"]
    found: list[str] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return found


async def ask(client: openai.AsyncOpenAI, model: str, wish: Wish) -> tuple[str, bool]:
    """The text that came, and whether it came to its end."""
    if wish.chat:
        messages: Any = [{"role": "user", "content": wish.prompt}]
        stream: Any = await client.chat.completions.create(
            model=model, messages=messages, **wish.fields()
        )
    else:
        stream = await client.completions.create(model=model, prompt=wish.prompt, **wish.fields())
    pieces: list[str] = []
    async with stream:
        async for chunk in stream:
            choice = chunk.choices[0]
            if choice.finish_reason is not None:
                return "".join(pieces), True
            if piece := choice.delta.content if wish.chat else choice.text:
                pieces.append(piece)
            if wish.leaves is not None and len(pieces) >= wish.leaves:
                break
    return "".join(pieces), False


async def wave(server: Server, wishes: list[Wish]) -> list[tuple[str, bool] | BaseException]:
    """All of them at once."""
    async with server.client() as client:
        asked = (ask(client, server.model, wish) for wish in wishes)
        return await asyncio.gather(*asked, return_exceptions=True)


def compare(
    report: Report, wishes: list[Wish], found: list[tuple[str, bool] | BaseException], texts: Any
) -> None:
    """Enter what came of a wave. ``texts``: of single runs, by request."""
    for wish, came in zip(wishes, found, strict=True):
        report.asked += 1
        report.methods[wish.options["method"]] += 1
        if isinstance(came, openai.RateLimitError):
            report.refused += 1
            if "retry-after" not in came.response.headers:
                report.wrong.append("429 without Retry-After")
            continue
        if isinstance(came, BaseException):
            report.wrong.append(f"{wish}: {type(came).__name__}: {came}"[:500])
            continue
        text, whole = came
        wanted = texts[wish_key(wish)]
        report.completed += whole
        report.left += not whole
        if text != wanted if whole else not wanted.startswith(text):
            report.wrong.append(f"{wish}: {text[:80]!r} is not {wanted[:80]!r}")
        if not whole and wish.leaves is None:
            report.wrong.append(f"{wish}: the stream ended before its end")


def wish_key(wish: Wish) -> str:
    """The same for equal requests."""
    return json.dumps([wish.chat, wish.prompt, wish.options], sort_keys=True)


def check(
    folder: Path, *, requests: int, waves: int, tokens: int, seed: int, batch: int = 8
) -> Report:
    """Run all of it."""
    rng, report = random.Random(seed), Report()
    with specrun.load(folder, threads=1) as engine:
        wishes = draw(engine, requests, tokens, rng)
        texts = {wish_key(wish): wish.alone(engine) for wish in [*wishes, *largest(wishes, 1)]}
    flags = ("--threads", "1", "--max-batch", str(batch), "--timeout", str(SECONDS))
    with served(folder, *flags, "--max-waiting", str(requests)) as server:
        warm = largest(wishes, batch)
        compare(report, warm, asyncio.run(wave(server, warm)), texts)
        start = time.monotonic()
        for _ in range(waves):
            compare(report, wishes, asyncio.run(wave(server, wishes)), texts)
            if not server.idle():
                report.wrong.append("something still runs when all clients are gone")
            report.memory.append(server.memory())
            rng.shuffle(wishes)
        report.seconds = round(time.monotonic() - start, 1)
        if report.refused:
            report.wrong.append(f"{report.refused} requests were refused while there was room")
        ended = server.metric("specrun_generations_total")
        if ended != report.asked:
            report.wrong.append(f"the server counts {ended:g} texts, {report.asked} were asked for")
    _check_queue(folder, report, wishes, texts, flags)
    return report


def _check_queue(
    folder: Path, report: Report, wishes: list[Wish], texts: Any, flags: tuple[str, ...]
) -> None:
    """A short queue refuses; what it takes is right."""
    short = Report()
    few = [wish for wish in wishes if wish.leaves is None][:40]
    with served(folder, *flags, "--max-batch", "1", "--max-waiting", "2") as server:
        compare(short, few, asyncio.run(wave(server, few)), texts)
        again = [wish for wish in few[:1] if server.idle()]
        compare(short, again, asyncio.run(wave(server, again)), texts)
    report.refused = short.refused
    report.wrong += short.wrong
    if not short.refused or short.completed < 3:
        report.wrong.append(f"of {short.asked} at a queue of 2, {short.refused} were refused")


def table(report: Report) -> str:
    """For people."""
    memory = ", ".join(f"{size / 2**20:.1f}" for size in report.memory)
    lines = {
        "asked": f"{report.asked} ({', '.join(f'{k} {v}' for k, v in report.methods.items())})",
        "completed": f"{report.completed}, equal to single runs unless told below",
        "left in the middle": str(report.left),
        "refused by a short queue": f"{report.refused} with 429",
        "memory by wave, MiB": f"{memory} ({report.growth:+.1%})",
        "seconds": f"{report.seconds:.1f}",
        "wrong": str(len(report.wrong)),
    }
    return "\n".join([f"{n:<26}{v}" for n, v in lines.items()] + report.wrong[:20])


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=200, help="at once, in every wave")
    parser.add_argument("--waves", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report = check(
        given.folder,
        requests=given.requests,
        waves=given.waves,
        tokens=given.tokens,
        seed=given.seed,
    )
    print(table(report))
    print(json.dumps(report.as_dict(), ensure_ascii=False))
    return 0 if report.right else 1


if __name__ == "__main__":
    raise SystemExit(main())
