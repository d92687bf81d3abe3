"""What ``--schedule auto`` gains or loses against plain decoding and against every fixed length.

    specrun tune ENGINES
    python scripts/auto_schedule.py ENGINES [--method prompt-lookup] [--tokens 256] [--repeats 5]

Two texts, one that drafting is made for (a paragraph to be repeated) and one where it hardly pays.
All settings must first give the tokens of plain decoding; then they take turns, in an order that
changes, and the medians of their decoding times (without prefill) are compared, from this run only.
Exit status 1 where ``auto`` is more than 3 % slower than plain decoding on a text where no fixed
length is faster, or more than 5 % slower than the best fixed length elsewhere. A table for people,
one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import specrun

PARAGRAPH = (
    "The lighthouse keeper climbed 199 steps every evening, lit the lamp, wrote the weather into a"
    " book with a green cover, and watched the ferries pass until the harbour was dark and quiet."
    " In winter he carried coal up the same stairs, two buckets at a time, and counted the steps"
    " aloud so that he would not fall asleep. When the fog came in he rang a brass bell once a"
    " minute, and the ferries answered from far out on the water, one after the other, until he"
    " knew that all of them had found the narrow way between the rocks. On Sundays his sister came"
    " with a basket of bread, two newspapers, and whatever the post had brought, and they drank"
    " coffee on the iron gallery while the gulls walked up and down in front of them. She asked him"
    " every time whether he would not rather live in the town, where there were lamps in the"
    " streets and people to talk to in the evening, and every time he said that he had a lamp of"
    " his own."
    " When she had gone he wrote her name into the green book, beside the weather, and how many"
    " ferries had passed while she was there."
)
PROMPTS = {
    "repeats": f"Repeat this paragraph word for word:\n\n{PARAGRAPH}",
    "new": "Write a short story about a violin that nobody can tune.",
}
PLAIN, AUTO = "plain", "auto"


def setting(name: str, method: str) -> dict[str, Any]:
    """Options of ``plain``, ``auto``, or a fixed number of drafts."""
    if name == PLAIN:
        return {"method": "plain"}
    if name == AUTO:
        return {"method": method, "num_assistant_tokens_schedule": "auto"}
    return {
        "method": method,
        "num_assistant_tokens": int(name),
        "num_assistant_tokens_schedule": "constant",
    }


def decode(engine: specrun.Engine, prompt: str, tokens: int, **options: Any) -> specrun.Result:
    """A greedy text, to its end or that many tokens: behind its end a text repeats itself."""
    result: specrun.Result = engine.generate(
        prompt, max_new_tokens=tokens, do_sample=False, strict=True, **options
    )
    return result


def seconds_of(result: specrun.Result) -> float:
    """Without prefill."""
    return sum(value for phase, value in result.stats.seconds.items() if phase != "prefill")


def measure(
    engine: specrun.Engine,
    prompt: str,
    method: str,
    names: list[str],
    tokens: int,
    repeats: int,
    *,
    ignore_eos: bool,
) -> tuple[dict[str, float], int]:
    """Median seconds of every setting, and the tokens of the text.

    Raises SystemExit where the tokens differ.
    """
    ends: dict[str, Any] = {"eos_token_ids": ()} if ignore_eos else {}
    expected = decode(engine, prompt, tokens, **setting(PLAIN, method), **ends).tokens
    for name in names:
        if decode(engine, prompt, tokens, **setting(name, method), **ends).tokens != expected:
            raise SystemExit(f"{method}, {name}: other tokens than plain decoding")
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(names, len(names)):
            result = decode(engine, prompt, tokens, **setting(name, method), **ends)
            times[name].append(seconds_of(result))
    return {name: statistics.median(values) for name, values in times.items()}, len(expected)


def judge(times: dict[str, float]) -> tuple[str, float, bool]:
    """The best setting but auto, how much slower auto is, and whether that is within bounds."""
    best = min((name for name in times if name != AUTO), key=times.__getitem__)
    slower = times[AUTO] / times[best] - 1
    return best, slower, slower <= (0.03 if best == PLAIN else 0.05)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--method", default="prompt-lookup")
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ignore-eos", action="store_true", help="texts of exactly --tokens")
    given = parser.parse_args()
    names = [PLAIN, *map(str, given.drafts), AUTO]
    found: dict[str, Any] = {}
    fine = True
    with specrun.load(given.engines, threads=given.threads) as engine:
        for text, prompt in PROMPTS.items():
            times, tokens = measure(
                engine,
                prompt,
                given.method,
                names,
                given.tokens,
                given.repeats,
                ignore_eos=given.ignore_eos,
            )
            best, slower, within = judge(times)
            fine = fine and within
            found[text] = {
                "seconds": times,
                "tokens": tokens,
                "best": best,
                "auto_slower": round(slower, 4),
            }
            print(f"{text}: {tokens} tokens by {given.method}, tokens per second")
            for name, value in times.items():
                rate, against = tokens / value, times[PLAIN] / value
                print(f"  {name:>5}  {rate:8.1f}  {against:5.2f} x plain")
            verdict = "within bounds" if within else "OUT OF BOUNDS"
            print(f"  auto takes {slower:+.1%} of the time of {best}: {verdict}")
    print(json.dumps(found))
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
