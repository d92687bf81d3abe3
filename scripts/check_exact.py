"""Counts tokens that differ from plain decoding, in exact mode (none) and without, and the cost.

    python scripts/check_exact.py --folder engines/
    python scripts/check_exact.py --folder engines/ --folder other/ --prompts 20 -k 2 -k 5

Every folder is opened twice, in exact mode and as usual. Every prompt, a piece of the licence or of
``tests/data/prompts.json``, is continued greedily by plain decoding and by every method the folder
has with every number of drafts; in each mode the tokens are compared with that mode's own plain
ones. All settings take turns on a prompt, so that their times have met the same disturbances.
Progress on stderr; a table per folder, with times relative to the usual plain decoding; one JSON
line last; exit status 1 where exact mode differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import specrun

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (ROOT / "LICENSE", ROOT / "tests" / "data" / "prompts.json")
WORDS = (1, 150)  # of a prompt, at least and at most
NUM_DRAFTS = (2, 5, 9)
TITLES = {True: "exact mode", False: "as usual"}


class Setting(NamedTuple):
    """How to decode: ``k`` drafts a round, 0 for plain decoding."""

    method: str
    k: int
    exact: bool


@dataclass
class Count:
    """Sums over prompts: ``texts`` and ``tokens`` that differ from plain decoding in that mode,
    ``accepted`` drafts of ``rounds``, seconds of prefill and of the rest."""

    texts: int = 0
    tokens: int = 0
    accepted: int = 0
    rounds: int = 0
    prefill: float = 0.0
    decoding: float = 0.0

    def add(self, result: specrun.Result, plain: Sequence[int]) -> None:
        """Enter a text and what plain decoding gave."""
        different = sum(ours != theirs for ours, theirs in zip(result.tokens, plain, strict=True))
        stats = result.stats
        self.texts += different > 0
        self.tokens += different
        self.accepted += stats.accepted
        self.rounds += stats.rounds
        self.prefill += stats.seconds["prefill"]
        self.decoding += sum(stats.seconds.values()) - stats.seconds["prefill"]


def prompts(count: int) -> Iterator[str]:
    """Pieces of the texts, the same in every run."""
    pieces = [path.read_text(encoding="utf-8") for path in TEXTS]
    words = [word for text in pieces for word in text.split()]
    generator = random.Random(0)
    for _ in range(count):
        start = generator.randrange(len(words))
        yield " ".join(words[start : start + generator.randint(*WORDS)])


def settings(
    methods: Sequence[str], num_drafts: Sequence[int], modes: Sequence[bool]
) -> list[Setting]:
    """Plain decoding first, which the others are compared with; each in all ``modes``."""
    drafting = [(method, k) for method in methods for k in num_drafts]
    return [Setting(*each, exact) for each in [("plain", 0), *drafting] for exact in modes]


def check(folder: Path, options: argparse.Namespace) -> dict[Setting, Count]:
    """All counts of one folder."""
    usual = specrun.load(folder, threads=options.threads)
    width = {} if options.width is None else {"exact_width": options.width}
    exact = specrun.load(folder, threads=options.threads, exact=True, **width)
    modes = (True,) if options.exact_only else (True, False)
    with usual, exact:
        counts = {
            setting: Count()
            for setting in settings([*usual.manifest.drafters, "prompt-lookup"], options.k, modes)
        }
        most = usual.max_context - options.tokens
        for index, prompt in enumerate(prompts(options.prompts), 1):
            ids = usual.encode(prompt, specrun.GenerateOptions(raw=True))[:most]
            plain: dict[bool, list[int]] = {}
            for setting, count in counts.items():
                engine = exact if setting.exact else usual
                result = engine.generate(ids, **_options(setting, options.tokens))
                count.add(result, plain.setdefault(setting.exact, result.tokens))
            differ = [
                sum(c.texts for s, c in counts.items() if s.exact == m) for m in (True, False)
            ]
            print(
                f"{folder}: {index} of {options.prompts} prompts,"
                f" {differ[0]} texts differ in exact mode, {differ[1]} without",
                file=sys.stderr,
                flush=True,
            )
    return counts


def _options(setting: Setting, tokens: int) -> dict[str, Any]:
    return {
        "method": setting.method,
        "num_assistant_tokens": setting.k,
        "num_assistant_tokens_schedule": "constant",
        "max_new_tokens": tokens,
        "min_new_tokens": 0,
        "eos_token_ids": (),
        "do_sample": False,
        "strict": True,
    }


def table(counts: dict[Setting, Count]) -> str:
    """A row per method and number of drafts, modes side by side; times against the last mode's
    plain decoding."""
    modes = sorted({setting.exact for setting in counts}, reverse=True)
    base = counts[Setting("plain", 0, modes[-1])].decoding
    lines = [
        "                    " + "".join(f"| {TITLES[mode]:33}" for mode in modes),
        "method           k  " + "| tokens differ  accepted    time  " * len(modes),
    ]
    for method, k in dict.fromkeys(setting[:2] for setting in counts):
        cells = []
        for exact in modes:
            count = counts[Setting(method, k, exact)]
            accepted = count.accepted / max(1, count.rounds)
            cells.append(f"{count.tokens:13}  {accepted:8.2f}  {count.decoding / base:6.2f}")
        lines.append(f"{method:14} {k:3}  | " + "  | ".join(cells))
    prefill = [counts[Setting("plain", 0, exact)].prefill for exact in modes]
    if len(modes) == 2:
        lines.append(f"prompts are read in {prefill[0] / prefill[1]:.2f} times the usual time")
    return "\n".join(lines)


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, action="append", required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("-k", type=int, action="append", help="drafts per round; repeatable")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--exact-only", action="store_true", help="leave the usual mode out")
    parser.add_argument("--width", type=int, help="rows of a run in exact mode")
    options = parser.parse_args()
    options.k = options.k or list(NUM_DRAFTS)
    if options.prompts < 1 or options.tokens < 1 or min(options.k) < 1:
        parser.error("--prompts, --tokens and -k must be at least 1")
    report = {}
    wrong = 0
    for folder in options.folder:
        try:
            counts = check(folder, options)
        except specrun.SpecrunError as error:
            parser.error(f"{error}" + (f"; {error.hint}" if error.hint else ""))
        print(f"{folder}: {options.prompts} prompts, {options.tokens} tokens each")
        print(table(counts), flush=True)
        wrong += sum(count.texts for setting, count in counts.items() if setting.exact)
        report[str(folder)] = [{**s._asdict(), **asdict(c)} for s, c in counts.items()]
    print(json.dumps({"prompts": options.prompts, "tokens": options.tokens, "folders": report}))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
