"""Two vocabularies side by side: which bytes a token stands for, and which tokens both have.

Written forms cannot be compared: byte-level BPE writes a space as ``Ġ`` and any other byte as a
character of its own, sentencepiece writes ``▁`` and ``<0x0A>``. Bytes can: they are asked of the
decoder, behind a token of which the text is known, so that nothing is trimmed at the start.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (2025); transformers' ``AssistantToTargetTranslator`` compares written
forms with the space marker replaced, and so takes bytes for other characters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrun.text import BROKEN, Tokenizer

SPACE = "▁"  # how sentencepiece writes a space


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 as it is, the others from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    written = {chr(byte): byte for byte in plain}
    return written | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
WRITTEN = {byte: character for character, byte in BYTE_OF.items()}


class Surfaces:
    """The bytes of every token of one tokenizer, as it stands inside a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, bytes | None] = {}
        # Decoders may trim what comes first, so every token is decoded behind this one.
        self._anchor = [piece.id for piece in tokenizer.split("a")[-1:]]
        self._anchor_text = tokenizer.decode(self._anchor)

    def of(self, id_: int) -> bytes | None:
        """The bytes of a token; None where it has none (a special token, an unknown id)."""
        if id_ not in self._known:
            self._known[id_] = self._surface(id_, self.tokenizer.decode([*self._anchor, id_]))
        return self._known[id_]

    def of_all(self) -> list[bytes | None]:
        """The bytes of every token, by id."""
        pairs = [[*self._anchor, id_] for id_ in range(self.tokenizer.size)]
        texts = self.tokenizer.decode_many(pairs)
        return [self._surface(id_, text) for id_, text in enumerate(texts)]

    def find(self, surface: bytes) -> int | None:
        """A token with these bytes, or None."""
        text = surface.decode("utf-8", "replace")
        names = [text.replace(" ", SPACE), "".join(WRITTEN[byte] for byte in surface), text]
        if len(surface) == 1:
            names.append(f"<0x{surface[0]:02X}>")
        for name in names:
            id_ = self.tokenizer.id_of(name)
            if id_ is not None and self.of(id_) == surface:
                return id_
        return None

    def _surface(self, id_: int, decoded: str) -> bytes | None:
        if id_ in self.tokenizer.special_ids or not decoded.startswith(self._anchor_text):
            return None
        text = decoded[len(self._anchor_text) :]
        if BROKEN not in text:
            return text.encode() or None
        # Bytes that make no whole character show only in how the vocabulary writes them.
        name = self.tokenizer.name_of(id_) or ""
        if id_ in self.tokenizer.byte_ids:
            return bytes([int(name[1:-1], 16)])
        if all(character in BYTE_OF for character in name):
            raw = bytes(BYTE_OF[character] for character in name)
            if raw.decode("utf-8", "replace") == text:
                return raw
        return text.encode() if BROKEN in name else None


class Common(NamedTuple):
    """Tokens that stand for the same in both vocabularies, pair by pair: int64 ``[n]`` each."""

    target: NDArray[np.int64]
    drafter: NDArray[np.int64]


class VocabularyPair:
    """A target's and a drafter's tokenizer; ids that a model or its tokenizer lacks are not used.

    ``table_size``, ``drafter_table_size``: tokens that each model scores. ``target_names``,
    ``drafter_names``: special tokens by role (``bos_token``, …), as the manifest has them.
    ``bos``: what the drafter's text begins with, where it adds that.
    """

    def __init__(
        self,
        target: Tokenizer,
        drafter: Tokenizer,
        *,
        table_size: int,
        drafter_table_size: int,
        target_names: Mapping[str, str],
        drafter_names: Mapping[str, str],
        target_adds_bos: bool = False,
        drafter_adds_bos: bool = False,
    ) -> None:
        self.target = Surfaces(target)
        self.drafter = Surfaces(drafter)
        self.table_size = table_size
        self.vocab_size = min(table_size, target.size)
        self.drafter_vocab_size = min(drafter_table_size, drafter.size)
        self.target_bos = _role(target, target_names, "bos_token") if target_adds_bos else None
        self.bos = _role(drafter, drafter_names, "bos_token") if drafter_adds_bos else None
        ends = _role(target, target_names, "eos_token"), _role(drafter, drafter_names, "eos_token")
        self.specials = self._specials(*ends)
        self.special_of = {there: here for here, there in self.specials.items()}
        if ends[0] in self.specials:
            self.special_of[self.specials[ends[0]]] = ends[0]

    def _specials(self, end: int | None, drafter_end: int | None) -> dict[int, int]:
        """Target's special token -> the drafter's: those written alike, and the end of a text.

        A drafter's text has one beginning, so none stands for that.
        """
        target, drafter = self.target.tokenizer, self.drafter.tokenizer
        pairs: dict[int, int] = {}
        for id_ in target.special_ids:
            there = drafter.id_of(target.name_of(id_) or "")
            if there is not None and there in drafter.special_ids:
                pairs[id_] = there
        if end is not None and drafter_end is not None:
            pairs[end] = drafter_end
        return {
            here: there
            for here, there in pairs.items()
            if there != self.bos and here < self.vocab_size and there < self.drafter_vocab_size
        }

    @functools.cached_property
    def common(self) -> Common:
        """Made at first use: it takes a second or two for vocabularies of 49,152 and 262,144."""
        sizes = self.vocab_size, self.drafter_vocab_size
        if sizes[0] <= sizes[1]:
            pairs = _matches(self.target, sizes[0], self.drafter, sizes[1])
        else:
            found = _matches(self.drafter, sizes[1], self.target, sizes[0])
            pairs = {here: there for there, here in found.items()}
        # Each drafter's token once, the end of a text rather than a second special token.
        pairs |= {here: there for there, here in self.special_of.items()}
        both = np.array(sorted(pairs.items()), dtype=np.int64).reshape(-1, 2)
        return Common(both[:, 0].copy(), both[:, 1].copy())

    @functools.cached_property
    def to_drafter(self) -> dict[int, int]:
        """Target's token -> the drafter's, for the common ones."""
        return dict(zip(self.common.target.tolist(), self.common.drafter.tolist(), strict=True))

    def to_target(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The drafter's logits ``[drafter's table]`` as the target's ``[table_size]``.

        Tokens that the drafter does not have get minus infinity, so they are never drawn.
        """
        row = np.full(self.table_size, -np.inf, dtype=np.float32)
        row[self.common.target] = logits[self.common.drafter]
        return row

    def mass(self, logits: NDArray[np.float32]) -> float:
        """Probability that the drafter gives to the common tokens together."""
        logits = logits[: self.drafter_vocab_size]
        weights = np.exp(logits - logits.max())
        return float(weights[self.common.drafter].sum() / weights.sum())


def _role(tokenizer: Tokenizer, names: Mapping[str, str], role: str) -> int | None:
    return tokenizer.id_of(names[role]) if role in names else None


def _matches(few: Surfaces, size: int, many: Surfaces, most: int) -> dict[int, int]:
    """Token of ``few`` -> token of ``many`` with the same bytes, for ids below the sizes.

    Of several tokens of ``few`` with the same bytes the one that an encoder gives: no byte token,
    then the first.
    """
    of_bytes: dict[bytes, int] = {}
    byte_ids = few.tokenizer.byte_ids
    for id_, surface in enumerate(few.of_all()[:size]):
        if surface is not None:
            former = of_bytes.setdefault(surface, id_)
            if former in byte_ids and id_ not in byte_ids:
                of_bytes[surface] = id_
    found = {id_: many.find(surface) for surface, id_ in of_bytes.items()}
    return {id_: there for id_, there in found.items() if there is not None and there < most}
