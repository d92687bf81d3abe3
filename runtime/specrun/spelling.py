"""How tokens are written where they stand alone: in traces and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable

from specrun.text import BROKEN, Tokenizer


def names(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[int, str]:
    """How each token is written alone: its text, else its name in the vocabulary, else ``#id``."""
    wanted = sorted(set(ids))
    # Behind another token: alone, some decoders take away the space in front.
    anchor = tokenizer.encode("a", add_special_tokens=False, parse_special=False)[:1]
    known = [id_ for id_ in wanted if tokenizer.name_of(id_) is not None]
    before, *behind = tokenizer.decode_many([anchor, *([*anchor, id_] for id_ in known)])
    texts = {
        id_: text[len(before) :]
        for id_, text in zip(known, behind, strict=True)
        if text.startswith(before)
    }
    found = {}
    for id_ in wanted:
        text = texts.get(id_, "")
        broken = not text or BROKEN in text or id_ in tokenizer.special_ids
        found[id_] = (tokenizer.name_of(id_) or f"#{id_}") if broken else text
    return found
