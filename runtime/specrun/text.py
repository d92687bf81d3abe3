"""Text to token ids, and token ids to text while they arrive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers

from specrun.errors import FolderError, UsageError
from specrun.manifest import REEXPORT

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class Piece(NamedTuple):
    """A token of a text, and the characters ``[start, end)`` of the text that it comes from."""

    id: int
    start: int
    end: int


class Tokenizer:
    """The checkpoint's ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise FolderError(f"{path}: does not load: {error}", hint=REEXPORT) from error
        self._setup()

    @classmethod
    def wrap(cls, tokenizer: tokenizers.Tokenizer) -> Tokenizer:
        """Over a tokenizer that is in memory already."""
        self = cls.__new__(cls)
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._setup()
        return self

    def _setup(self) -> None:
        # Guards the switch between special tokens that count as such and as mere text.
        self._lock = threading.Lock()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.byte_ids = self._byte_ids()

    def _byte_ids(self) -> frozenset[int]:
        """Ids of the tokens ``<0x00>`` to ``<0xFF>``, where the decoder joins bytes."""
        names = (f"<0x{byte:02X}>" for byte in range(256))
        ids = [id_ for name in names if (id_ := self._tokenizer.token_to_id(name)) is not None]
        # Asked of the decoder itself: other tokenizers have such tokens as mere text.
        letter = self._tokenizer.token_to_id("<0x41>")
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        return frozenset(ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``; special tokens written in it count as such.

        Raises UsageError for text that is not Unicode (half of a surrogate pair).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"prompt: not valid Unicode text: {error.reason} at {error.start}",
                hint="give the prompt as UTF-8",
            ) from error
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def split(self, text: str) -> list[Piece]:
        """Tokens of ``text`` with their places in it; special tokens written in it are text."""
        pieces = self._split(text)
        # Some models hold special tokens as words and find them in mere text: part the word.
        for id_, start, end in pieces:
            if id_ in self.special_ids and text[start:end] == self.name_of(id_):
                cut = start + 1
                rest = self.split(text[cut:])
                return self._split(text[:cut]) + [Piece(i, s + cut, e + cut) for i, s, e in rest]
        return pieces

    def _split(self, text: str) -> list[Piece]:
        with self._lock:
            self._tokenizer.encode_special_tokens = True
            try:
                found = self._tokenizer.encode(text, add_special_tokens=False)
            finally:
                self._tokenizer.encode_special_tokens = False
        return [Piece(id_, *span) for id_, span in zip(found.ids, found.offsets, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_many(self, sequences: Sequence[list[int]]) -> list[str]:
        """Texts of several sequences, each as ``decode`` gives it."""
        return self._tokenizer.decode_batch(sequences, skip_special_tokens=True)

    def name_of(self, id_: int) -> str | None:
        """How the vocabulary writes a token; None for an id that it does not have."""
        return self._tokenizer.id_to_token(id_)

    def id_of(self, name: str) -> int | None:
        """The token that the vocabulary writes so."""
        return self._tokenizer.token_to_id(name)

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)


class Detokenizer:
    """Text of growing ids, in pieces that are never taken back.

    For all ids given, the pieces of every ``push`` and of ``finish`` together are
    ``decode(ids)``. A piece is held back while it may still change: a character whose bytes are
    not all there, and a run of byte tokens, which the decoder replaces as a whole when any byte
    of it turns out wrong. Each step decodes a short window, not the text so far::

        [0, start)     emitted, and not needed any more
        [start, read)  emitted; the context that keeps the decoder from trimming a leading space
        [read, end)    held back
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0  # in the window
        self._context = ""  # text of window[:read]
        self.pending = ""  # text of window[read:], not final

    def push(self, token: int) -> str:
        """The text that ``token`` makes final, often its own, sometimes none or more."""
        if token in self._tokenizer.special_ids:
            return ""
        self._window.append(token)
        self.pending = self._tokenizer.decode(self._window)[len(self._context) :]
        if self.pending.endswith(BROKEN) or token in self._tokenizer.byte_ids:
            return ""
        return self._release()

    def finish(self) -> str:
        """What was held back; broken characters show as U+FFFD."""
        return self._release()

    def _release(self) -> str:
        text = self.pending
        if text:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._context = self._tokenizer.decode(self._window)
        self.pending = ""
        return text
