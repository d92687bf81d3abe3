"""Text to token ids, and token ids to text while they arrive."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from specrun.errors import EngineError, FolderError, UsageError
from specrun.limits import MAX_TOKENIZER_BYTES
from specrun.manifest import REEXPORT
from specrun.reading import unicode_fault

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


NOTHING = "\ufdd2"  # no character and no part of a token; stands in for text that is not looked at
MAX_GROWTH = 64  # times that a text may grow when it is normalized, and tokens put around it
MAX_COMPONENT = 4 << 20  # characters of the JSON of a normalizer and the like

Span = tuple[int, int]  # characters ``[start, end)`` of a text


class Piece(NamedTuple):
    """A token of a text, and the characters ``[start, end)`` of the text that it comes from."""

    id: int
    start: int
    end: int


class Tokenizer:
    """The checkpoint's ``tokenizer.json``."""

    def __init__(self, path: Path, *, vocab_size: int | None = None) -> None:
        """Raises FolderError; also where it has not ``vocab_size`` tokens."""
        try:
            size = path.stat().st_size
            if size > MAX_TOKENIZER_BYTES:
                raise ValueError(f"has {size} bytes, at most {MAX_TOKENIZER_BYTES} are read")
            with _panics_are(ValueError, "the library fails on it"):
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
                self._setup()
                self._check()
        except Exception as error:
            raise FolderError(f"{path}: does not load: {error}", hint=REEXPORT) from error
        if vocab_size is not None and self.size != vocab_size:
            raise FolderError(
                f"{path}: has {self.size} tokens, {vocab_size} in the manifest", hint=REEXPORT
            )

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
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._stand_ins: dict[int | None, tuple[str, int]] = {}
        self.byte_ids = self._byte_ids()

    def _check(self) -> None:
        """Raise ValueError where a text of some size becomes one of any size, or it panics."""
        parts = {name: _state(getattr(self._tokenizer, name, None)) for name in _COMPONENTS}
        for name in ("normalizer", "decoder"):
            if (growth := _growth(parts[name])) > MAX_GROWTH:
                raise ValueError(f"its {name} makes a text up to {growth:.3g} times as long")
        added = _added(_state(self._tokenizer.post_processor))
        if added > MAX_GROWTH:
            raise ValueError(f"its post_processor adds {added} tokens to a text")
        if (count := len(self._tokenizer.encode("a").ids)) > MAX_GROWTH:
            raise ValueError(f"it encodes 'a' as {count} tokens")

    def _byte_ids(self) -> frozenset[int]:
        """Ids of the tokens ``<0x00>`` to ``<0xFF>``, where the decoder joins bytes."""
        names = (f"<0x{byte:02X}>" for byte in range(256))
        ids = [id_ for name in names if (id_ := self._tokenizer.token_to_id(name)) is not None]
        # Asked of the decoder itself: other tokenizers have such tokens as mere text.
        letter = self._tokenizer.token_to_id("<0x41>")
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        return frozenset(ids)

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]:
        """Ids of ``text``. With ``parse_special`` special tokens written in it count as such.

        Raises UsageError for text that is not Unicode (half of a surrogate pair).
        """
        _check_unicode(text)
        if not parse_special and self.special_spans(text):
            return self._encode_plain(text, add_special_tokens)
        return self._encode(text, add_special_tokens).ids

    def encode_parts(self, text: str, plain: Sequence[Span]) -> list[int]:
        """The same without a bos; special tokens count as such but for those in ``plain`` spans."""
        _check_unicode(text)
        masked = list(text)
        for start, end in plain:
            masked[start:end] = NOTHING * (end - start)
        found = self._encode("".join(masked), False)
        counting = [
            (id_, *span)
            for id_, span in zip(found.ids, found.offsets, strict=True)
            if id_ in self.special_ids
        ]
        parts, place = [], 0
        for id_, start, end in counting:
            parts += [text[place:start], self._stand_in(id_)]
            place = end
        return self._encode_plain("".join([*parts, text[place:]]), False)

    def special_spans(self, text: str) -> list[Span]:
        """Where a special token is written in ``text``, in capitals or not."""
        pattern, lengths, folded = self._spellings
        spans: list[Span] = []
        if pattern is None:
            return spans
        end = 0
        for match in pattern.finditer(text):
            start = match.start()
            for length in lengths if start >= end else ():
                if text[start : start + length].casefold() in folded:
                    end = start + length
                    spans.append((start, end))
                    break
        return spans

    @cached_property
    def _spellings(self) -> tuple[re.Pattern[str] | None, list[int], frozenset[str]]:
        """What special tokens begin with, their lengths, and they themselves in small letters."""
        contents = [self._added[id_].content for id_ in self.special_ids]
        contents = [content for content in contents if content.strip()]
        if not contents:
            return None, [], frozenset()
        first = "".join(sorted({char for c in contents for char in (c[0].lower(), c[0].upper())}))
        lengths = sorted({len(content) for content in contents}, reverse=True)
        return (
            re.compile(f"[{re.escape(first)}]"),
            lengths,
            frozenset(content.casefold() for content in contents),
        )

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        with self._lock, _panics_are(EngineError, "tokenizer: the library fails on this text"):
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``, in which only stand-ins are special tokens.

        Some models hold special tokens as words and find them in mere text: those words are parted.
        """
        while True:
            found = self._encode_as_text(text, add_special_tokens)
            words = [
                start + 1
                for id_, (start, end) in zip(found.ids, found.offsets, strict=True)
                if id_ in self.special_ids and text[start:end] == self.name_of(id_)
            ]
            if not words:
                break
            parting = self._stand_in(None)
            cuts = [0, *words, len(text)]
            text = parting.join(text[a:b] for a, b in itertools.pairwise(cuts))
        meant = {id_: special for special, (_, id_) in self._stand_ins.items()}
        ids = (meant.get(id_, id_) for id_ in found.ids)
        return [id_ for id_ in ids if id_ is not None]

    def _encode_as_text(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        with self._lock, _panics_are(EngineError, "tokenizer: the library fails on this text"):
            self._tokenizer.encode_special_tokens = True
            try:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            finally:
                self._tokenizer.encode_special_tokens = False

    def _stand_in(self, special: int | None) -> str:
        """A text that counts as this special token even where special tokens are mere text.

        None: one that counts as nothing and parts words. Nobody can guess it and write it in a
        prompt. The tokenizer treats it as it does the token, also the space beside it.
        """
        if special not in self._stand_ins:
            text = f"\ufdd0{secrets.token_hex(16)}\ufdd1"
            like = None if special is None else self._added[special]
            token = tokenizers.AddedToken(
                text,
                single_word=like is not None and like.single_word,
                lstrip=like is not None and like.lstrip,
                rstrip=like is not None and like.rstrip,
                normalized=False,
                special=False,
            )
            with self._lock:
                self._tokenizer.add_tokens([token])
                id_ = self._tokenizer.token_to_id(text)
            assert id_ is not None
            self._stand_ins[special] = (text, id_)
        return self._stand_ins[special][0]

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
        found = self._encode_as_text(text, False)
        return [Piece(id_, *span) for id_, span in zip(found.ids, found.offsets, strict=True)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        with _panics_are(EngineError, "tokenizer: the library fails on these tokens"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_many(self, sequences: Sequence[list[int]]) -> list[str]:
        """Texts of several sequences, each as ``decode`` gives it."""
        with _panics_are(EngineError, "tokenizer: the library fails on these tokens"):
            return self._tokenizer.decode_batch(sequences, skip_special_tokens=True)

    def name_of(self, id_: int) -> str | None:
        """How the vocabulary writes a token; None for an id that it does not have."""
        return self._tokenizer.id_to_token(id_)

    def id_of(self, name: str) -> int | None:
        """The token that the vocabulary writes so."""
        return self._tokenizer.token_to_id(name)


_COMPONENTS = ("normalizer", "decoder")


@contextlib.contextmanager
def _panics_are(error: type[Exception], message: str) -> Iterator[None]:
    """A panic of the Rust library as ``error``; its class is none that ``except Exception`` has."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        raise error(f"{message}: {panic}") from panic


def _check_unicode(text: str) -> None:
    if (fault := unicode_fault(text)) is not None:
        raise UsageError(f"prompt: {fault}", hint="give the prompt as UTF-8")


def _state(component: Any) -> Any:
    """A normalizer or decoder as the JSON it was made from."""
    if component is None:
        return None
    text = component.__getstate__()
    if len(text) > MAX_COMPONENT:
        raise ValueError(f"a component of {len(text)} characters")
    return json.loads(text)


def _added(state: Any) -> int:
    """Tokens that a post-processor puts around a text, before it makes any."""
    if not isinstance(state, dict):
        return 0
    count = sum(_added(inner) for inner in state.get("processors") or ())
    tokens = state.get("special_tokens")
    if not isinstance(tokens, dict):
        return count
    lengths = {name: len(token.get("ids", ())) for name, token in tokens.items()}
    for piece in (*(state.get("single") or ()), *(state.get("pair") or ())):
        count += lengths.get((piece.get("SpecialToken") or {}).get("id"), 0)
    return count


def _growth(state: Any) -> float:
    """How many times longer than before a text can be behind a normalizer or decoder."""
    if not isinstance(state, dict):
        return 1.0
    growth = 1.0
    for inner in (*state.get("normalizers", ()), *state.get("decoders", ())):
        growth *= _growth(inner)
    if state.get("type") == "Replace":
        pattern = state.get("pattern") or {}
        least = max(1, len(str(pattern.get("String", ""))))
        growth *= max(1.0, len(str(state.get("content", ""))) / least)
    if state.get("type") == "Prepend":
        growth *= max(1.0, len(str(state.get("prepend", ""))))
    return growth


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
