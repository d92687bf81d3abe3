"""What an open engine folder says of fixed prompts: on the CPU it is the reference, on a device it
is compared with that. NumPy and the runtime only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import specrun
from specrun.target import Verifier

SEED = 20
WIDTHS = (1, 5, 17)  # rows of a step: plain decoding, 4 drafts, 16 drafts
SHORT = (7, 20, 33)  # tokens of the prompts that are continued
LONG = 250  # a prompt after which 17 rows let the KV buffers grow
NEW_TOKENS = 24
Arrays = dict[str, NDArray[Any]]
GREEDY: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": NEW_TOKENS,
    "eos_token_ids": (),
    "strict": True,
}


def tokens(count: int, size: int) -> list[int]:
    """Tokens at random, the same everywhere, some of their n-grams twice."""
    half = np.random.default_rng(SEED + count).integers(0, size, -(-count // 2))
    found: list[int] = np.concatenate([half, half])[:count].tolist()
    return found


def logits(target: Verifier, size: int, long: int = LONG) -> Arrays:
    """Logits by what was run, each float32 ``[rows, vocabulary]``, with rollbacks in between.

    ``wanted``: the last row of a prompt of ``long`` tokens; steps of 1, 5 and 17 rows behind it;
    17 rows one by one; 5 rows again, after 17 other rows that were rolled back.
    """
    text = np.array([tokens(long + max(WIDTHS), size)], dtype=np.int64)
    target.truncate(0)
    found = {"prefill": _logits(target.prefill(text[:, :long], want_logits=True))}
    for rows in WIDTHS:
        target.truncate(long)
        block = text[:, long : long + rows]
        found[f"{rows} rows"] = _logits(target.verify(block, want_logits=True))
    target.truncate(long)
    steps = [text[:, at : at + 1] for at in range(long, text.shape[1])]
    single = [_logits(target.verify(one, want_logits=True)) for one in steps]
    found["one by one"] = np.concatenate(single)
    target.truncate(long)
    target.verify((text[:, long:] + 1) % size)
    target.truncate(long)
    found["after a rollback"] = _logits(target.verify(text[:, long : long + 5], want_logits=True))
    target.truncate(0)
    return found


def _logits(rows: Any) -> NDArray[np.float32]:
    return np.array(rows.logits[0], dtype=np.float32)


@dataclass(frozen=True)
class Text:
    """A greedy text: its ``tokens``, and what was drafted in the rounds, by the number of tokens
    that stood before."""

    tokens: list[int]
    drafts: dict[int, list[int]]
    acceptance: float


def text(engine: specrun.Engine, prompt: Sequence[int], method: str, num_draft: int) -> Text:
    """The greedy continuation of a prompt. Raises EngineError where the drafter fails."""
    drafts: dict[int, list[int]] = {}

    def watch(round_: specrun.Round) -> None:
        before = round_.committed_length - len(round_.emitted) - len(prompt)
        drafts[before] = list(round_.proposal)

    asked: dict[str, Any] = (
        {}
        if method == "plain"
        else {
            "num_assistant_tokens": num_draft,
            "num_assistant_tokens_schedule": "constant",
        }
    )
    made = engine.generate(list(prompt), method=method, on_round=watch, **GREEDY, **asked)
    return Text(made.tokens, drafts, made.stats.acceptance)


def texts(
    engine: specrun.Engine, methods: Sequence[str], num_draft: int, size: int
) -> dict[str, list[Text]]:
    """By method, one text per prompt."""
    prompts = [tokens(count, size) for count in SHORT]
    return {m: [text(engine, prompt, m, num_draft) for prompt in prompts] for m in methods}


def leads(engine: specrun.Engine, size: int, texts_: Sequence[Text]) -> list[NDArray[np.float32]]:
    """By prompt, for every token of a text, logits of the target one row at a time,
    ``[count, vocabulary]``: the plainest loop there is."""
    target, found = engine.target, []
    for count, made in zip(SHORT, texts_, strict=True):
        target.truncate(0)
        prompt = np.array([tokens(count, size)], dtype=np.int64)
        rows = [_logits(target.prefill(prompt, want_logits=True))]
        for token in made.tokens[:-1]:
            rows.append(_logits(target.verify(np.array([[token]]), want_logits=True)))
        found.append(np.concatenate(rows))
        target.truncate(0)
    return found


def write(path: Path, arrays: Arrays, said: dict[str, list[Text]]) -> None:
    """A reference: logits as ``.npz``, texts as JSON beside it."""
    np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    plain = {method: [vars(one) for one in many] for method, many in said.items()}
    path.with_suffix(".json").write_text(json.dumps(plain), encoding="utf-8")


def read(path: Path) -> tuple[Arrays, dict[str, list[Text]]]:
    """What ``write`` wrote."""
    with np.load(path.with_suffix(".npz")) as file:
        arrays = {name: file[name] for name in file.files}
    said = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return arrays, {method: [_text(one) for one in many] for method, many in said.items()}


def _text(said: dict[str, Any]) -> Text:
    drafts = {int(before): list(drafted) for before, drafted in said["drafts"].items()}
    return Text(said["tokens"], drafts, said["acceptance"])
