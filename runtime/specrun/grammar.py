"""What a text must be, as a grammar: a JSON schema, a regular expression or rules in Lark's form.

llguidance (MIT) follows the text through the grammar and says which tokens may come next. It needs
nothing but the bytes of the tokens, and bounds its own work. xgrammar does the same and depends on
PyTorch and transformers, which have no place here.

JSON is compact: no blank or line break between its parts. A grammar that allows them lets a model
write blanks for ever, and most tokens of compact JSON follow from the schema alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specrun.constraint import Constraint, said
from specrun.drafters.retokenize import spelled
from specrun.drafters.vocabulary import Surfaces
from specrun.errors import UsageError, install
from specrun.grammar_text import GRAMMARS
from specrun.options import GenerateOptions
from specrun.reading import shown
from specrun.text import Tokenizer

PACKAGE = "llguidance"
# What fuel buys takes up to some 0.2 s, and a state of the lexer up to 2 kB.
LIMITS = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# All of them, so that a schema cannot set them itself (by "x-guidance").
JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


class Vocabulary:
    """The tokens of a target as the library wants them; made once for a folder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UsageError where the library is not installed."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise UsageError(
                f"structured output needs {PACKAGE}, not installed here",
                hint=install("structured"),
            )
        import llguidance

        self._surfaces = Surfaces(tokenizer)
        # The library marks special tokens with the byte 0xFF, which no text has.
        found = (surface or b"" for surface in self._surfaces.of_all())
        self.texts = tuple(b"" if text.startswith(b"\xff") else text for text in found)
        self.size = len(self.texts)
        # The library's own end of a text, behind all tokens: which ones end a text here is said
        # with each request.
        self._end = self.size
        wrapped = _Wrapped(self._surfaces, self.texts, self._end)
        self.tokenizer: Any = llguidance.LLTokenizer(wrapped)  # type: ignore[arg-type]

    def spell(self, text: bytes) -> list[int]:
        """Tokens for ``text``, whole characters, inside a text; none where no tokens spell it."""
        return spelled(self._surfaces, text)

    @cached_property
    def trimmed(self) -> tuple[int, ...]:
        """Tokens whose blank a decoder drops at the beginning of a text."""
        decode = self._surfaces.tokenizer.decode
        blank = [id_ for id_, text in enumerate(self.texts) if text.startswith(b" ")]
        if not blank or decode(blank[:1]).startswith(" "):
            return ()
        return tuple(blank)


class _Wrapped:
    """A tokenizer by the names that the library asks for (its ``TokenizerWrapper``)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, surfaces: Surfaces, texts: Sequence[bytes], end: int) -> None:
        self._surfaces = surfaces
        self.eos_token_id = end
        self.tokens = [*texts, b"<end>"]
        self.special_token_ids = [*(id_ for id_, text in enumerate(texts) if not text), end]

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell ``text``; none where no tokens do."""
        return spelled(self._surfaces, text.encode("utf-8"))


@dataclass(frozen=True)
class Grammar:
    """What a text must be. ``name``: of the option that says so."""

    name: str
    vocabulary: Vocabulary
    _matcher: Any  # at the beginning of a text; never moved, only copied

    def constraint(self, prompt_length: int, end_ids: Sequence[int], vocab_size: int) -> Constraint:
        """For a text behind ``prompt_length`` tokens of a target that scores ``vocab_size``."""
        return Constraint(
            self.name,
            self._matcher.deep_copy(),
            self.vocabulary.texts,
            self.vocabulary.spell,
            prompt_length=prompt_length,
            end_ids=end_ids,
            vocab_size=vocab_size,
            not_first=self.vocabulary.trimmed,
        )


def compile_grammar(options: GenerateOptions, vocabulary: Vocabulary) -> Grammar:
    """The grammar of resolved ``options``, which have one.

    Raises UsageError: it is none, holds what the library does not support, is too large, or
    nothing that the target's tokens spell is in it.
    """
    import llguidance

    name, text = next((n, value) for n in GRAMMARS if (value := getattr(options, n)) is not None)
    limits: Any = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
    try:
        matcher = llguidance.LLMatcher(
            vocabulary.tokenizer, _source(name, text), log_level=0, limits=limits
        )
    except ValueError as error:
        raise _refused(name, text, str(error)) from error
    if matcher.is_error():
        raise _refused(name, text, matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        raise _refused(name, text, "; ".join(warnings))
    ends = tuple(options.eos_token_ids or ())
    grammar = Grammar(name, vocabulary, matcher)
    grammar.constraint(0, ends, vocabulary.size).check_start()
    return grammar


def _source(name: str, text: str) -> str:
    from llguidance import LLMatcher

    if name == "json_schema":
        options: Any = JSON_OPTIONS
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if name == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(text)


def _refused(name: str, text: str, reason: str) -> UsageError:
    hint = _HINTS[name]
    if name == "json_schema" and _UNSUPPORTED.search(reason):
        hint = _SUPPORTED
    if name != "grammar":
        reason = _of_pattern(reason)
    return UsageError(f"{name}: {said(reason)}, got {shown(text)}", hint=hint)


def _of_pattern(reason: str) -> str:
    """Why a regular expression is refused, without the rule that the library makes of it and the
    place in that; any other reason as it is."""
    if (found := re.search(r"regex parse error:\n.*?^error: ([^\n]*)", reason, _LINES)) is not None:
        return found[1]
    if (found := re.search(r"\(in regex\): (.*?)(?: in regex /|\n)", reason, _LINES)) is not None:
        return found[1]
    return reason


_LINES = re.DOTALL | re.MULTILINE
_UNSUPPORTED = re.compile("Unimplemented|Unknown format|not supported")
_SUPPORTED = (
    "leave it out or write it otherwise;"
    ' docs/generating.md says what is supported, under "Structured output"'
)
_HINTS = {
    "json_schema": "check the schema",
    "regex": "the syntax is that of Rust's regex crate, without look-around and back-references",
    "grammar": "give rules in Lark's form, with a rule start",
}
