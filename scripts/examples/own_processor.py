"""A logits processor of one's own: a text without a letter, as lipograms are.

    python scripts/examples/own_processor.py engines/ "Read Psalms 103." --without e

The processor sees every place of a block of drafts by itself, so what it rules out is ruled out of
drafts too, and the text is that of plain decoding under the same rule.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

import specrun


class Without:
    """Rules out every token whose text has ``letter`` in it."""

    def __init__(self, engine: specrun.Engine, letter: str) -> None:
        texts = (engine.tokenizer.decode([token]) for token in range(engine.tokenizer.size))
        self._banned = [token for token, text in enumerate(texts) if letter in text.lower()]

    def __call__(
        self, tokens: NDArray[np.int64], logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """``tokens``: those before the place; ``logits`` ``[vocabulary]`` of it."""
        allowed = logits.copy()  # the engine's own array is read only
        allowed[self._banned] = -np.inf
        return allowed


def main() -> None:
    """Print the text by drafting, and that plain decoding gives the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("--without", default="e", metavar="LETTER")
    asked = parser.parse_args()
    with specrun.load(asked.folder) as engine:
        rule = Without(engine, asked.without.lower())
        drafted, plain = (
            engine.generate(asked.prompt, method=method, logits_processor=rule, max_new_tokens=48)
            for method in ("auto", "plain")
        )
    print(drafted.text)
    same = "the same" if drafted.tokens == plain.tokens else "another"
    print(f"[{drafted.stats.accepted} drafts accepted; plain decoding gives {same} text]")


if __name__ == "__main__":
    main()
