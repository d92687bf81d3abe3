"""Ends of a text against an obviously correct twin that decodes every prefix anew."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from test_text import TOKENIZERS

from specrun.stopping import Stopping
from specrun.text import BROKEN, Tokenizer


def twin(
    tokenizer: Tokenizer, tokens: Sequence[int], eos: Sequence[int], stop: Sequence[str], most: int
) -> tuple[int, str, str]:
    """Kept tokens, text and reason."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        starts = [at for string in stop if (at := text.rstrip(BROKEN).find(string)) >= 0]
        if starts:
            return count, text[: min(starts)], "stop"
        if tokens[count - 1] in eos:
            return count, text, "eos"
        if count == most:
            return count, text, "length"
    raise AssertionError("give enough tokens")


def in_blocks(
    stopping: Stopping, tokens: Sequence[int], rng: random.Random
) -> tuple[int, list[str], str | None]:
    """Feed the tokens in blocks of random size."""
    kept, pieces, start = 0, [], 0
    while True:
        block = tokens[start : start + rng.randrange(1, 7)]
        cut = stopping.take(block)
        kept += cut.kept
        pieces.append(cut.text)
        if cut.reason is not None:
            return kept, pieces, cut.reason
        assert cut.kept == len(block)
        start += len(block)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_equals_the_twin_in_any_blocks(name: str) -> None:
    tokenizer = Tokenizer.wrap(TOKENIZERS[name])
    rng = random.Random(name)
    words = "words and more 🦊 ab abab 中é the text"
    pieces = [*words.split(" "), " ", "a", "b", "🎉"]
    reasons = set()
    for _ in range(400):
        text = "".join(rng.choice(pieces) for _ in range(30))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if rng.random() < 0.3:  # bytes that make no character
            tokens = [rng.randrange(2, 250) for _ in range(40)]
        shown = tokenizer.decode(tokens).replace(BROKEN, "")
        stop = []
        for _ in range(rng.randrange(3)):
            at = rng.randrange(max(1, len(shown)))
            stop += [part] if (part := shown[at : at + rng.randrange(1, 6)]) else []
        eos = [rng.choice(tokens)] if rng.random() < 0.3 else []
        most = rng.randrange(1, len(tokens) + 1)
        expected = twin(tokenizer, tokens, eos, stop, most)
        stopping = Stopping(tokenizer, eos_token_ids=eos, stop=stop, max_tokens=most)
        kept, texts, reason = in_blocks(stopping, tokens, rng)
        assert (kept, "".join(texts), reason) == expected, (tokens, stop, eos, most)
        reasons.add(reason)
    assert reasons == {"stop", "eos", "length"}
