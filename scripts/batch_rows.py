"""The rows of a batch job: what a line asks for and what is generated for it.

A line of the input is a JSON object, or in a text file the prompt itself::

    {"prompt": "Read Psalms 103."}
    {"prompt": [2, 17, 4], "id": "a7", "options": {"max_new_tokens": 20, "temperature": 0.8}}
    {"messages": [{"role": "user", "content": "Explain Dictionaries."}]}

``options`` are fields of :class:`specrun.GenerateOptions` by name, over those of the whole job.
What is sampled for a row depends on its own seed, the job's plus the row's index, and on nothing
that was generated before it, so the results are the same however rows are shared out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import specrun
from specrun import manifest, options, reading, resolve

Json = dict[str, Any]
FIELDS = ("prompt", "messages", "id", "options")
MAX_INPUT_BYTES = 4 << 30
STATEFUL = ("heuristic", "auto")  # schedules that go on from what was generated before


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the input and its place among all, from 0."""

    index: int
    line: bytes


@dataclasses.dataclass(frozen=True)
class Settings:
    """A job: an engine folder, how rows are read, and what holds for all of them.

    ``generate``: fields of :class:`specrun.GenerateOptions`, ``seed`` among them. ``json_lines``:
    whether a line is a JSON object or a prompt.
    """

    folder: str
    generate: Mapping[str, Any]
    json_lines: bool = True
    threads: int = 1

    def fingerprint(self, lines: Sequence[bytes]) -> str:
        """Equal for jobs that give the same results, but for their seeds."""
        generate = {name: value for name, value in self.generate.items() if name != "seed"}
        made = (Path(self.folder) / manifest.MANIFEST).read_bytes()
        told = json.dumps([generate, self.json_lines, self.threads], sort_keys=True).encode()
        return hashlib.sha256(b"\n".join([made, told, *lines])).hexdigest()

    def check(self) -> list[str]:
        """What will be said of every row, once. Raises FolderError or UsageError."""
        found = manifest.read(Path(self.folder).resolve(), drafters_may_miss=True)
        _row_options(options.build(options.GenerateOptions, self.generate), found)
        ignored = resolve.unsupported_defaults(found.generation.defaults)
        return [f"generation_config.json: {name}={ignored[name]!r} is not done" for name in ignored]


class Worker:
    """An engine folder that is open, and what it gives for rows."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._base = options.build(options.GenerateOptions, settings.generate)
        # An engine that fails is the error of a row: what PyTorch would give has other last bits.
        self.engine = specrun.load(settings.folder, threads=settings.threads, verify="engine")

    def __call__(self, row: Mapping[str, Any]) -> Json:
        """``index`` and ``line`` of a row in, ``line`` of its result out, as Ray Data has rows."""
        return {"line": self.answer(Row(row["index"], row["line"]))}

    def answer(self, row: Row) -> bytes:
        """The line of a row's result. What is wrong with the row is said in it, not raised."""
        result: Json = {"index": row.index}
        try:
            asked = read_row(row.line, json_lines=self._settings.json_lines)
            if "id" in asked:
                result["id"] = asked["id"]
            result |= self._generate(row.index, asked)
        except specrun.SpecrunError as error:
            result |= {"error": str(error), "hint": error.hint}
        return json.dumps(result, ensure_ascii=False).encode() + b"\n"

    def _generate(self, index: int, asked: Json) -> Json:
        own = asked.get("options", {})
        chosen = options.build(options.GenerateOptions, own, self._base)
        if "seed" not in own and chosen.seed is not None:
            chosen = dataclasses.replace(chosen, seed=chosen.seed + index)
        chosen = _row_options(chosen, self.engine.manifest)
        prompt = asked["messages"] if "messages" in asked else asked["prompt"]
        if isinstance(prompt, list) and prompt and all(isinstance(item, list) for item in prompt):
            raise specrun.UsageError("prompt: a row has one, got a list", hint="give a row each")
        # Of what it would warn, `check` has said the same before, or `strict` makes it an error.
        done = self.engine.generate(prompt, options=chosen, on_warning=lambda _: None)
        stats = done.stats
        result: Json = {"text": done.text, "tokens": done.tokens}
        result |= {"finish_reason": done.finish_reason, "method": stats.method}
        result |= {"acceptance": stats.acceptance, "drafted": stats.drafted}
        result |= {"accepted": stats.accepted, "target_steps": stats.target_steps}
        if done.options.do_sample:
            result["seed"] = done.options.seed
        return result


def _row_options(
    asked: options.GenerateOptions, found: manifest.Manifest
) -> options.GenerateOptions:
    """``asked`` with a schedule that begins anew with every row, and strict. Raises UsageError."""
    if asked.num_assistant_tokens_schedule in STATEFUL:
        raise specrun.UsageError(
            f"num_assistant_tokens_schedule: {asked.num_assistant_tokens_schedule!r} goes on from"
            " earlier generations, so rows would depend on who is given which",
            hint="use constant or heuristic_transient",
        )
    resolved = resolve.resolve_generate(asked, found)
    kept = resolved.num_assistant_tokens_schedule in STATEFUL
    schedule = "heuristic_transient" if kept else asked.num_assistant_tokens_schedule
    return dataclasses.replace(asked, num_assistant_tokens_schedule=schedule, strict=True)


def read_row(line: bytes, *, json_lines: bool) -> Json:
    """What a line asks for: an object with ``prompt`` or ``messages``. Raises UsageError."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise specrun.UsageError(f"row: is no UTF-8: {error}", hint="save it as UTF-8") from None
    if not json_lines:
        return {"prompt": text}
    try:
        row = reading.parse_json(text)
    except reading.ReadingError as error:
        raise specrun.UsageError(f"row: {error}", hint="write an object per line") from None
    if not isinstance(row, dict):
        raise specrun.UsageError(
            f"row: must be an object, got {reading.shown(row)}", hint='for example {"prompt": "Hi"}'
        )
    for name in row:
        if name not in FIELDS:
            raise specrun.UsageError(
                f"row: must have {', '.join(FIELDS)}, got {reading.shown(name)}",
                hint="options of the generation go into options",
            )
    if ("prompt" in row) == ("messages" in row):
        raise specrun.UsageError("row: needs prompt or messages, and not both", hint="give one")
    if not isinstance(row.get("options", {}), dict):
        raise specrun.UsageError(
            f"options: must be an object, got {reading.shown(row['options'])}",
            hint='for example {"max_new_tokens": 20}',
        )
    return row


def read_lines(path: Path) -> list[bytes]:
    """All lines that are not blank, without their ends. Raises ReadingError, OSError."""
    data = reading.read_bytes(path, MAX_INPUT_BYTES).removeprefix(b"\xef\xbb\xbf")
    lines = (line.removesuffix(b"\r") for line in data.split(b"\n"))
    return [line for line in lines if line.strip()]


def in_this_process(settings: Settings, rows: Sequence[Row]) -> Iterator[bytes]:
    """The lines of the results, one after the other, without Ray."""
    worker = Worker(settings)
    with worker.engine:
        for row in rows:
            yield worker.answer(row)
