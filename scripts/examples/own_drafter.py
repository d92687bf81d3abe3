"""A drafter of one's own: it proposes what followed the same tokens in texts that it was given.

    python scripts/examples/own_drafter.py engines/ "Read Psalms 103." --known phrases.txt

A help desk knows its own phrases, an editor the file it edits: where the target says them again,
they come in a few runs. Whatever a drafter proposes, the text stays that of plain decoding.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import specrun
from specrun.sampling import Sampler

N = 2  # tokens that have to be the same


class PhraseDrafter:
    """Four verbs: ``begin``, ``observe``, ``propose``, ``truncate``; see specrun.Drafter."""

    max_drafts: int | None = None  # any number
    needs_prompt_rows = False  # the target's hidden states are of no use to it

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], Sequence[int]] = {}
        for phrase in phrases:
            for end in range(N, len(phrase)):
                self._next[tuple(phrase[end - N : end])] = phrase[end:]

    def begin(self, tokens: Sequence[int]) -> None:
        """A prompt comes."""
        self._text = list(tokens)

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        """These were committed behind it, whether they were drafted or not."""
        self._text += tokens

    def propose(self, count: int, sampler: Sampler) -> Sequence[int]:
        """At most ``count`` tokens that may follow. None is fine: then the target goes on alone."""
        return self._next.get(tuple(self._text[-N:]), ())[:count]

    def truncate(self, length: int) -> None:
        """Forget what stands behind ``length`` tokens: nothing, as drafts are never kept here."""
        del self._text[length:]


def main() -> None:
    """Print the text, and in how many runs of the target it came."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("--known", type=Path, required=True, help="text file, a phrase per line")
    asked = parser.parse_args()
    with specrun.load(asked.folder) as engine:
        lines = asked.known.read_text(encoding="utf-8").splitlines()
        drafter = PhraseDrafter([engine.encode_more(line) for line in lines])
        plain = engine.generate(asked.prompt, method="plain", max_new_tokens=48)
        drafted = engine.generate(
            asked.prompt, drafter=drafter, num_assistant_tokens=8, max_new_tokens=48
        )
    print(drafted.text)
    same = "the same" if drafted.tokens == plain.tokens else "another"
    runs = f"{drafted.stats.target_steps} runs of the target, plain {plain.stats.target_steps}"
    print(f"[{runs}; plain decoding gives {same} text]")


if __name__ == "__main__":
    main()
