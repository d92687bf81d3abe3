"""Checks that the bundled pair says through the engines what transformers says, in every setting.

    python scripts/check_tiny.py
    python scripts/check_tiny.py --engines engines/ --tokens 64

Exports gemma4-tiny (unless ``--engines`` is given), lets transformers continue every prompt of
``tests/data/prompts.json`` greedily, and compares plain decoding, prompt lookup and the MTP drafter
with 1 to 8 drafts and both schedules. Prints a table; the exit status is 1 on a mismatch. Where two
of transformers' own logits are within 1e-4, either token is right, and the text counts as a tie.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from numpy.typing import NDArray

import specrun
from specexport import exporter, tokenizer_files
from specexport.options import ExportOptions
from specexport.sources import resolve_pair
from specrun.options import SCHEDULES
from specrun.stats import Stats

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "prompts.json"
PRESET = "gemma4-tiny"
TIE = 1e-4
DRAFT_LENGTHS = range(1, 9)
DRAFTING = ("prompt-lookup", "mtp-drafter")

Verdict = Literal["equal", "tie", "different"]


@dataclass(frozen=True)
class Text:
    """A prompt and what transformers says behind it: ``tokens``, ``logits`` at each of them."""

    prompt: list[int]
    tokens: list[int]
    logits: NDArray[np.float32] = field(repr=False)

    def until(self, end_ids: Sequence[int]) -> list[int]:
        """The tokens up to the first end id, which is included."""
        ends = [i for i, token in enumerate(self.tokens) if token in end_ids]
        return self.tokens[: ends[0] + 1] if ends else self.tokens

    def compare(self, tokens: Sequence[int]) -> Verdict:
        """``tokens`` against as many of this text's."""
        for index, (ours, theirs) in enumerate(zip(tokens, self.tokens, strict=False)):
            if ours != theirs:
                row = self.logits[index]
                return "tie" if float(row[theirs] - row[ours]) <= TIE else "different"
        return "equal"


class Setting(NamedTuple):
    """How to decode: ``k`` drafts per round, 0 for plain decoding."""

    method: str
    schedule: str
    k: int

    def options(self) -> dict[str, Any]:
        """As options of ``generate``; without end ids, so that every text is as long."""
        return {
            "method": self.method,
            "num_assistant_tokens_schedule": self.schedule,
            "num_assistant_tokens": self.k,
            "eos_token_ids": [],
            "strict": True,
        }


def settings() -> Iterator[Setting]:
    """Plain decoding, then every drafting method, schedule and length."""
    yield Setting("plain", "constant", 0)
    for method in DRAFTING:
        for schedule in SCHEDULES:
            for k in DRAFT_LENGTHS:
                yield Setting(method, schedule, k)


def export(folder: Path, **options: Any) -> Path:
    """The preset as an engine folder, compared with transformers on the way."""
    exporter.export(*resolve_pair(PRESET), folder, ExportOptions(**options))
    return folder


def load_reference() -> Any:
    """The target in transformers, fp32, with no end id."""
    target, _ = resolve_pair(PRESET)
    model: Any = target.load_reference()
    model.generation_config.eos_token_id = None
    return model


def encode(prompts: Sequence[str]) -> list[list[int]]:
    """The prompts through the checkpoint's own tokenizer and chat template."""
    target, _ = resolve_pair(PRESET)
    tokenizer = tokenizer_files.load(target.path)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]


def greedy(model: Any, prompt: list[int], count: int) -> Text:
    """``count`` tokens by transformers' ``generate``."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return Text(prompt, out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).numpy())


def accepted_per_round(stats: Sequence[Stats]) -> float:
    """Mean number of drafts that stood in a round."""
    return sum(s.accepted for s in stats) / max(1, sum(s.rounds for s in stats))


def check(engine: specrun.Engine, texts: Sequence[Text], setting: Setting) -> tuple[str, bool]:
    """A line of the table, and whether no text was different."""
    counts: dict[Verdict, int] = {"equal": 0, "tie": 0, "different": 0}
    stats = []
    for text in texts:
        result = engine.generate(text.prompt, max_new_tokens=len(text.tokens), **setting.options())
        complete = len(result.tokens) == len(text.tokens)
        counts[text.compare(result.tokens) if complete else "different"] += 1
        stats.append(result.stats)
    line = f"{setting.method:14}{setting.schedule:11}{setting.k:2}"
    line += "".join(f"{count:11}" for count in counts.values())
    return f"{line}{accepted_per_round(stats):16.2f}", not counts["different"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 on a mismatch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=Path, help="an engine folder of gemma4-tiny")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    options = parser.parse_args(arguments)
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.engines or export(Path(scratch) / "engines")
        model = load_reference()
        texts = [greedy(model, prompt, options.tokens) for prompt in encode(prompts)]
        print(f"{len(texts)} prompts, {options.tokens} new tokens each, against transformers")
        print("method        schedule    k      equal       ties  different  accepted/round")
        right = True
        with specrun.load(folder) as engine:
            for setting in settings():
                line, equal = check(engine, texts, setting)
                print(line, flush=True)
                right &= equal
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
