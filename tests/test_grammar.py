"""Grammars over tokens: what is asked for, what tokens mean, what may follow a prefix."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from specrun import GenerateOptions, UsageError
from specrun.constraint import Constraint
from specrun.grammar import Vocabulary, compile_grammar
from specrun.grammar_text import MAX_RULES, MAX_SCHEMA
from specrun.text import Tokenizer

TINY = Path(__file__).parents[1] / "export/specexport/bundled/gemma4-tiny/target/tokenizer.json"
END = "<end>"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def byte_level(*merges: str, added: str = "<call>") -> Tokenizer:
    """Byte-level BPE with a few merges, a special token and an added one that is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(merge[:-1], merge[-1]) for merge in merges]
    vocabulary = {name: id_ for id_, name in enumerate([*alphabet, *merges])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    made.add_tokens([AddedToken(added, special=False)])
    return Tokenizer.wrap(made)


def sentencepiece_like() -> Tokenizer:
    """Words with ▁, byte tokens, and a decoder that drops a blank at the beginning."""
    names = [END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdé", "▁a", "▁b", "ab"]
    vocabulary = {name: id_ for id_, name in enumerate(names)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    made.add_special_tokens([END])
    return Tokenizer.wrap(made)


BYTES = byte_level("ab", "abc", "Ġa", "Ã©", '":', '{"', '":"')
TOKENIZERS = {"bytes": BYTES, "pieces": sentencepiece_like(), "gemma4-tiny": Tokenizer(TINY)}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def constrain(vocabulary: str = "bytes", *, size: int = 0, **options: Any) -> Constraint:
    """Behind a prompt of two tokens; END ends the text."""
    tokenizer = TOKENIZERS[vocabulary]
    end = next(id_ for name in (END, "<eos>") if (id_ := tokenizer.id_of(name)) is not None)
    given = GenerateOptions(**{"eos_token_ids": end, **options})
    grammar = compile_grammar(given, VOCABULARIES[vocabulary])
    ends = given.eos_token_ids or ()
    return grammar.constraint(2, ends, size or tokenizer.size)


def may_follow(constraint: Constraint, text: list[int], size: int) -> set[int]:
    """Tokens that are left behind a text; raises where nothing is said about it."""
    logits = np.arange(size, dtype=np.float32)
    left = constraint(np.array([0, 0, *text], dtype=np.int64), logits)
    assert np.array_equal(left[left > -np.inf], logits[left > -np.inf])
    return set(np.flatnonzero(left > -np.inf).tolist())


def ids(*names: str, vocabulary: str = "bytes") -> list[int]:
    found = [TOKENIZERS[vocabulary].id_of(name) for name in names]
    assert None not in found
    return [id_ for id_ in found if id_ is not None]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (True, "{}"),
        ({}, "{}"),
        ("true", "{}"),
        (' {"type" : "object"}\n', '{"type":"object"}'),
        ({"enum": ("é", None)}, '{"enum":["é",null]}'),
        (PERSON, json.dumps(PERSON, separators=(",", ":"))),
    ],
)
def test_schemas_become_text(given: Any, text: str) -> None:
    options = GenerateOptions(json_schema=given)
    assert options.json_schema == text and options.structured


def deep(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


CIRCLE: dict[str, Any] = {}
CIRCLE["items"] = CIRCLE


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("json_schema", False, "json_schema: must be a schema, got False"),
        ("json_schema", [], "json_schema: must be a schema, got []"),
        ("json_schema", "[]", "json_schema: must be a JSON object, got '[]'"),
        ("json_schema", "{", "json_schema: not JSON: Expecting"),
        ("json_schema", '{"a":1,"a":2}', "json_schema: the field 'a' comes twice"),
        ("json_schema", {"maximum": float("nan")}, "json_schema: Out of range float values"),
        ("json_schema", {"maximum": 10**30}, "json_schema: the number '1000000000000"),
        ("json_schema", {"enum": [b"x"]}, "json_schema: Object of type bytes"),
        ("json_schema", {"const": "\ud800"}, "json_schema: the text '\\ud800' is not valid"),
        ("json_schema", {"enum": [*range(6000)]}, "holds some 6001 values, at most 5000"),
        ("json_schema", CIRCLE, "json_schema: is nested too deep"),
        ("json_schema", {"x-guidance": {"lenient": True}}, "json_schema: holds 'x-guidance'"),
        ("json_schema", {"const": "x" * MAX_SCHEMA}, "json_schema: has 65549 characters, at most"),
        ("regex", 5, "regex: must be a text, got 5"),
        ("regex", "a" * (MAX_RULES["regex"] + 1), "regex: has 8193 characters, at most 8192"),
        ("regex", "\udc00", "regex: not valid Unicode"),
        ("grammar", b"start:", "grammar: must be a text"),
    ],
)
def test_what_is_no_grammar_at_all(option: str, given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        GenerateOptions(**{option: given})
    assert len(str(caught.value)) < 400


def test_one_grammar_at_a_time() -> None:
    with pytest.raises(UsageError, match="regex: excludes json_schema, got both"):
        GenerateOptions(json_schema=True, regex="a")
    with pytest.raises(UsageError, match="grammar: excludes regex, got both"):
        GenerateOptions(grammar='start: "a"', regex="a")


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("json_schema", {"type": "strnig"}, "json_schema: Invalid type: strnig, got"),
        ("json_schema", {"not": {}}, 'json_schema: Unimplemented keys: ["not"]'),
        ("json_schema", {"uniqueItems": True}, "json_schema: Unimplemented keys"),
        ("json_schema", {"$ref": "#/$defs/a"}, "json_schema: "),
        ("json_schema", {"$ref": "http://localhost:9/x"}, "is not present in a registry"),
        ("json_schema", {"$ref": "file:///etc/passwd"}, "is not present in a registry"),
        ("json_schema", {"$ref": "#"}, "json_schema: the grammar cannot go on after 0 tokens"),
        ("json_schema", deep(150), "json_schema: "),
        ("json_schema", {"type": "integer", "multipleOf": 999999937}, "fuel exhausted"),
        ("json_schema", {"format": "nonsense", "type": "string"}, "Unknown format: nonsense"),
        (
            "json_schema",
            {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(6)]}
                       for i in range(8)]},
            "schema too large",
        ),
        ("regex", "(?=a)b", "look-ahead and look-behind, is not supported"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(" * 4000 + ")" * 4000, "regex: "),
        ("regex", r"[^\s\S]", "regex: the grammar cannot go on after 0 tokens of the text"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000, "too deeply nested"),
        ("grammar", 'start: <other> "a"', "unknown special token"),
        ("grammar", 'start: <end> "a"', "no token can follow after 0 of the text"),
        ("grammar", f'start: <[{BYTES.id_of(END)}]> "a"', "no token can follow after 0 of"),
    ],
)  # fmt: skip
def test_what_the_library_refuses(option: str, given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        constrain(**{option: given})
    message = str(caught.value)
    assert message.startswith(f"{option}: ") and len(message) < 500 and "\n" not in message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("option", "given", "says", "hint"),
    [
        ("json_schema", {"not": {}}, 'Unimplemented keys: ["not"]', "leave it out or write it"),
        ("json_schema", {"format": "x", "type": "string"}, "Unknown format: x", "leave it out or"),
        (
            "json_schema",
            {"pattern": "(?=a)", "type": "string"},
            "look-around, including look-ahead and look-behind, is not supported",
            "leave it out or",
        ),
        ("json_schema", {"type": "foo"}, "Invalid type: foo", "check the schema"),
        (
            "json_schema",
            {"type": "integer", "minimum": 5, "maximum": 1},
            "Unsatisfiable schema: minimum (5) is greater than maximum (1)",
            "check the schema",
        ),
        ("regex", "(", "unclosed group", "the syntax is that of Rust's"),
        ("regex", "a$b", "lookarounds not supported yet; End", "the syntax is that of Rust's"),
        ("grammar", "start: foo", 'at 1(8): unknown name: "foo" 1 | start: foo ^', "give rules"),
    ],
)
def test_the_way_out(option: str, given: Any, says: str, hint: str) -> None:
    """The keyword is to be left out where it is known and not supported, and nowhere else."""
    with pytest.raises(UsageError) as caught:
        constrain(**{option: given})
    assert str(caught.value).startswith(f"{option}: {says}, got ")
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "((([a-z]+d?){50}){50}){50}"},
        {"regex": "(a|b)*a(a|b){200}"},
        {"regex": "(a*)*" * 200},
        {"json_schema": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
        {"json_schema": {"type": "array", "minItems": 10**7, "items": {"type": "integer"}}},
        {"json_schema": {"type": "string", "pattern": "((a{100}){100}){100}"}},
        {"json_schema": {"enum": [f"{i:05}" for i in range(4000)]}},
        {"grammar": "start: a\na: a a | /[ab]/"},
    ],
)
def test_large_grammars_are_walked(options: dict[str, Any]) -> None:
    """Bounded work for each token: twenty of them, each one that is allowed."""
    constraint, rng = constrain(**options), random.Random(1)
    text: list[int] = []
    while len(text) < 20:
        found = sorted(may_follow(constraint, text, BYTES.size) - set(ids(END)))
        if not found:
            break
        text.append(rng.choice(found))
    assert len(text) >= 4


def test_a_grammar_that_grows_too_large_on_the_way() -> None:
    """The library stops before it takes the machine; the error says how far the text came."""
    constraint = constrain(regex="b(a{200}){200}c")
    with pytest.raises(UsageError, match=r"cannot go on after 0 tokens of .*: lexer error"):
        may_follow(constraint, ids("b", "a", "a"), BYTES.size)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_tokens_mean(name: str) -> None:
    """Texts of tokens together are what the decoder gives, behind one that is not trimmed."""
    tokenizer, texts = TOKENIZERS[name], VOCABULARIES[name].texts
    rng = random.Random(0)
    usable = [id_ for id_, text in enumerate(texts) if text]
    anchor = ids("a", vocabulary=name)
    for _ in range(200):
        some = [*anchor, *rng.choices(usable, k=5)]
        data = b"".join(texts[id_] for id_ in some)
        try:
            wanted = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # half of a character, which no grammar allows to stay
        assert tokenizer.decode(some) == wanted
    assert {id_ for id_, text in enumerate(texts) if not text} >= tokenizer.special_ids


@pytest.mark.parametrize("name", ["bytes", "gemma4-tiny"])
def test_what_tokens_mean_to_the_library(name: str) -> None:
    """It reads such tokenizers itself, too: all texts are equal, but for the special tokens."""
    import llguidance

    tokenizer, vocabulary = TOKENIZERS[name], VOCABULARIES[name]
    own = llguidance.LLTokenizer(tokenizer._tokenizer.to_str())
    for id_, text in enumerate(vocabulary.texts):
        if id_ not in tokenizer.special_ids and text:
            assert own.decode_bytes([id_]) == text
            assert vocabulary.tokenizer.decode_bytes([id_]) == text


GRAMMARS = [
    {"json_schema": PERSON},
    {"json_schema": True},
    {"regex": "(ab|ba)+ (é|è)?[a-c]{3}"},
    {"regex": "abc+|ab?"},
    {"grammar": 'start: "a" inner "b"\ninner: ("(" inner ")")*'},
]


@pytest.mark.parametrize("options", GRAMMARS, ids=str)
@pytest.mark.parametrize("name", ["bytes", "gemma4-tiny"])
def test_it_depends_on_the_prefix_alone(name: str, options: dict[str, Any]) -> None:
    """Forward, back and aside, as drafts come and go: what a new one says in each place."""
    size = TOKENIZERS[name].size
    ends = TOKENIZERS[name].special_ids
    rng, moved = random.Random(3), constrain(name, **options)
    texts: list[list[int]] = [[]]
    for _ in range(60):
        text = rng.choice(texts)
        found = may_follow(moved, text, size)
        assert found == may_follow(constrain(name, **options), text, size)
        if going := sorted(found - ends):
            texts.append([*text, rng.choice(going)])
        if rng.random() < 0.3:
            moved.forced([0, 0, *text], 4)


def test_every_token_that_can_go_on_may() -> None:
    """The library's masks beside Python's own matcher, on all texts of two letters."""
    pattern, beginnings = "(ab|ba)+c?", "((ab|ba)*[ab]?)|(ab|ba)+c?"
    letters = "abc"
    constraint = constrain(regex=pattern)
    (end,) = ids(END)
    for length in range(5):
        for letters_ in itertools.product(letters, repeat=length):
            written = "".join(letters_)
            if not re.fullmatch(beginnings, written):
                continue
            found = may_follow(constraint, ids(*written), BYTES.size)
            wanted = {
                ids(name)[0]
                for name in ("a", "b", "c", "ab", "abc")
                if re.fullmatch(beginnings, written + name)
            }
            # Where one letter must come next, one way to write it is enough.
            assert found - {end} <= wanted and (found - {end} or not wanted)
            assert (end in found) == (re.fullmatch(pattern, written) is not None)


def test_ends() -> None:
    """Where the text is complete, and nowhere else; alone where nothing may follow."""
    (end,), two = ids(END), ids("Z")
    constraint = constrain(regex="a+b")
    assert end not in may_follow(constraint, ids("a"), BYTES.size)
    assert may_follow(constraint, ids("a", "b"), BYTES.size) == {end}
    optional = constrain(regex="a(b|c)?", eos_token_ids=(end, *two))
    assert may_follow(optional, ids("a"), BYTES.size) == {*ids("b", "c"), end}
    # The Z is an end id that has a text: it may come where that completes the text.
    written = constrain(regex="aZZ?", eos_token_ids=two)
    assert may_follow(written, ids("a"), BYTES.size) == set(two)
    dead = constrain(regex="aZb", eos_token_ids=two)
    with pytest.raises(UsageError, match="regex: no token can follow after 1 of the text"):
        may_follow(dead, ids("a"), BYTES.size)


def test_nothing_is_said_behind_an_end_or_a_mistake() -> None:
    """Such slots are never kept; and what comes before them is as it was."""
    everything = set(range(BYTES.size))
    constraint = constrain(regex="a+b")
    assert may_follow(constraint, [*ids("a", "b", END)], BYTES.size) == everything
    assert may_follow(constraint, ids("a", "c", "a"), BYTES.size) == everything
    assert may_follow(constraint, ids("a"), BYTES.size) == may_follow(
        constrain(regex="a+b"), ids("a"), BYTES.size
    )
    assert constraint.count_allowed([0, 0, *ids("a")], ids("a", "b", END, "a")) == 3
    assert constraint.count_allowed([0, 0], ids("a", "c", "a")) == 1


def test_no_end_id() -> None:
    for ends in ((), (10**6,)):
        with pytest.raises(UsageError, match="regex: needs an end id"):
            constrain(regex="a", eos_token_ids=ends)


def test_tables_larger_and_smaller_than_the_tokenizer() -> None:
    size = BYTES.size
    for table in (size + 40, size - 1):
        constraint = constrain(regex=".*", size=table)
        found = may_follow(constraint, [], table)
        assert found and max(found) < size
        # A drafter's row may be shorter or longer than the target's.
        assert may_follow(constraint, [], size + 80) == found
        assert may_follow(constraint, [], 100) == {id_ for id_ in found if id_ < 100}


def test_special_tokens_never_come_and_added_text_may() -> None:
    assert ids(END)[0] not in may_follow(constrain(regex=".+"), [], BYTES.size)
    assert may_follow(constrain(regex="<call>"), [], BYTES.size) == set(ids("<call>"))


def test_a_blank_that_the_decoder_drops() -> None:
    """At the beginning of a text such tokens show as something else: they do not come there."""
    size = TOKENIZERS["pieces"].size
    constraint = constrain("pieces", regex=" ?(a|b| a)+")
    first = may_follow(constraint, [], size)
    assert set(ids("a", "b", vocabulary="pieces")) <= first
    assert not first & set(ids("▁a", "▁b", "▁", vocabulary="pieces"))
    text = ids("b", vocabulary="pieces")
    assert set(ids("▁a", vocabulary="pieces")) <= may_follow(constraint, text, size)
    with pytest.raises(UsageError, match="regex: no token can follow after 0 of the text"):
        constrain("pieces", regex=" a")
    assert not VOCABULARIES["gemma4-tiny"].trimmed


def test_text_that_must_come() -> None:
    constraint = constrain(json_schema=PERSON)
    start = constraint.forced([0, 0], 20)
    assert BYTES.decode(start) == '{"name":"'
    assert constraint.forced([0, 0], 2) == start[:2]
    assert constraint.forced([0, 0, *start], 5) == []
    spelled = [*start, *ids("a", '"')]
    assert BYTES.decode(constraint.forced([0, 0, *spelled], 20)) == ',"age":'
    whole = [*BYTES.encode('{"name":"a","age":3}', add_special_tokens=False)]
    assert constraint.forced([0, 0, *whole], 5) == ids(END)
    assert constraint.forced([0, 0, *whole, *ids(END)], 5) == []
    several = constrain(regex="a", eos_token_ids=(*ids(END), BYTES.size - 1))
    assert several.forced([0, 0], 5) == ids("a")


def test_half_a_character_that_must_come() -> None:
    """é and è begin with the same byte."""
    constraint = constrain(regex="(é|è)a")
    forced = constraint.forced([0, 0], 5)
    assert [VOCABULARIES["bytes"].texts[id_] for id_ in forced] in ([b"\xc3"], [])
    text = [0, 0, *ids("Ã")]
    assert constraint.count_allowed([0, 0], ids("Ã", "©", "a")) == 3
    assert may_follow(constraint, text[2:], BYTES.size) == set(ids("©", "¨"))


def test_json_is_compact() -> None:
    constraint = constrain(json_schema=PERSON)
    text = BYTES.encode('{"name":"a b",', add_special_tokens=False)
    assert constraint.count_allowed([0, 0], text) == len(text)
    assert constraint.count_allowed([0, 0, *text], ids("Ġ")) == 0
    assert constraint.count_allowed([0, 0], ids("Ġ")) == 0


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.grammar.PACKAGE", "llguidance_that_is_not_there")
    with pytest.raises(UsageError, match="needs llguidance_that_is_not_there, not") as caught:
        Vocabulary(BYTES)
    installs = "pip install 'specrun[structured]', or '.[structured]' in a checkout"
    assert caught.value.hint == installs


def test_long_texts_keep_few_masks() -> None:
    constraint = constrain(regex="a*")
    text: NDArray[np.int64] = np.array([0, 0, *ids("a") * 1000], dtype=np.int64)
    for length in (500, 1002, 950):
        constraint(text[:length], np.zeros(BYTES.size, dtype=np.float32))
    assert len(constraint._masks) <= 66
