"""Streamed text: pieces that together are the whole, with no broken character and nothing taken
back (C70), for byte-level BPE and for byte fallback."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specrun import UsageError
from specrun.text import BROKEN, Detokenizer, Tokenizer

TEXTS = [
    "plain words, then more words",
    "family 👨‍👩‍👧‍👦 and 🇩🇪 flags 🎉🎉",
    "한국어 텍스트와 조합 각",
    "中文 字符 and 日本語 mixed",
    "  two leading spaces, a\ttab\nand a line  ",
    "naïve café — “quotes” … ½",
    "é" * 7 + " " + "🦊" * 5,
    "literal \ufffd stays",
]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["words and more words, the text"] * 3, trainer)
    return tokenizer


def byte_fallback(strip: bool) -> tokenizers.Tokenizer:
    """As Llama (strips the first space) or Gemma (does not) have it."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(set("▁abcdefghijklmnopqrstuvwxyz,中é"))
    pieces += ["▁w", "or", "ds", "▁wor", "▁words", "▁▁"]
    merges = [("▁", "w"), ("o", "r"), ("d", "s"), ("▁w", "or"), ("▁wor", "ds"), ("▁", "▁")]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """A decoder that trims the first token's leading space."""
    tokenizer = byte_fallback(strip=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-fallback, strip": byte_fallback(strip=True),
    "byte-fallback": byte_fallback(strip=False),
    "metaspace": metaspace(),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.wrap(TOKENIZERS[request.param])


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_tail_cut_anywhere(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for end in range(len(ids) + 1):
        pieces = stream(tokenizer, ids[:end])
        assert "".join(pieces) == tokenizer.decode(ids[:end])
        if BROKEN not in text:
            assert not any(BROKEN in piece for piece in pieces[:-1])


def test_random_ids(tokenizer: Tokenizer) -> None:
    """Bytes that make no character, specials in the middle: still the same as at once."""
    rng = random.Random(1)
    size = TOKENIZERS["byte-level"].get_vocab_size()
    for _ in range(300):
        ids = [rng.randrange(min(size, 280)) for _ in range(rng.randrange(1, 24))]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("words words", add_special_tokens=False)
    assert {0, 1} <= tokenizer.special_ids
    pieces = stream(tokenizer, [0, *words, 1])
    assert "".join(pieces) == tokenizer.decode(words)
    assert pieces[0] == "" and pieces[-2] == ""


def test_text_comes_as_early_as_it_is_final() -> None:
    tokenizer = Tokenizer.wrap(TOKENIZERS["byte-level"])
    ids = tokenizer.encode("a🦊b", add_special_tokens=False)
    assert stream(tokenizer, ids) == ["a", "", "", "", "🦊", "b", ""]


def test_a_byte_run_waits_for_its_end() -> None:
    """The decoder replaces the whole run when one byte of it is wrong."""
    tokenizer = Tokenizer.wrap(TOKENIZERS["byte-fallback"])
    fox = tokenizer.encode("🦊", add_special_tokens=False)
    word = tokenizer.encode("a", add_special_tokens=False)
    assert stream(tokenizer, fox + word)[:5] == ["", "", "", "", "🦊a"]
    assert stream(tokenizer, fox + fox[:1])[-1] == BROKEN * 5 == tokenizer.decode(fox + fox[:1])


def test_the_window_stays_short() -> None:
    tokenizer = Tokenizer.wrap(TOKENIZERS["byte-level"])
    detokenizer = Detokenizer(tokenizer)
    for id_ in tokenizer.encode("words and more words " * 50, add_special_tokens=False):
        detokenizer.push(id_)
        assert len(detokenizer._window) <= 3


# Special tokens that a text spells.

SPELLINGS = ["</s>", "<s>words</s>", "a </s> b", "words </s></s>words", "</S>", "<s> <s>"]


@pytest.mark.parametrize("text", SPELLINGS)
def test_spelled_special_tokens_are_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids & set(ids)
    # What the vocabulary can write stays; these two lack some of the letters.
    if tokenizer.byte_ids or tokenizer.id_of("Ġ") is not None:
        assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    assert tokenizer.special_spans(text)


@pytest.mark.parametrize("text", [*TEXTS, *SPELLINGS, "", "words<s>", "<s>", "<s>  words  </s> w"])
def test_parts_with_nothing_plain_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    """The way around is that of the library itself where nothing has to go around."""
    whole = tokenizer.encode(text, add_special_tokens=False)
    size = tokenizer.size
    assert tokenizer.encode_parts(text, []) == whole
    assert tokenizer.encode(text, add_special_tokens=False) == whole
    assert tokenizer.size == size


def test_parts_of_which_one_is_plain(tokenizer: Tokenizer) -> None:
    text = "<s>words</s>words</s>"
    ids = tokenizer.encode_parts(text, [(8, 12)])
    assert (ids[0], ids[-1], ids.count(1)) == (0, 1, 1)
    middle = tokenizer.encode("words</s>words", add_special_tokens=False, parse_special=False)
    assert tokenizer.decode(ids).strip() == tokenizer.decode(middle).strip()


def test_a_word_that_is_a_special_token_is_parted() -> None:
    """Some models have special tokens as words of their own, and find them in mere text."""
    vocabulary = {"<s>": 0, "a": 1, "<": 2, "s>": 3, "?": 4}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>"])
    tokenizer = Tokenizer.wrap(made)
    assert tokenizer.encode("a <s> a", add_special_tokens=False) == [1, 0, 1]
    assert tokenizer.encode("a <s> a", add_special_tokens=False, parse_special=False) == [
        *(1, 2, 3, 1)
    ]
    assert tokenizer.encode_parts("<s> a <s>", [(6, 9)]) == [0, 1, 2, 3]


def test_special_tokens_take_the_space_beside_them() -> None:
    made = byte_level()
    made.add_special_tokens([tokenizers.AddedToken("<m>", lstrip=True, rstrip=True)])
    tokenizer = Tokenizer.wrap(made)
    for text in ("words <m> words", "<m>  words", "words  <m>", "<m> <m>"):
        assert tokenizer.encode_parts(text, []) == tokenizer.encode(text, add_special_tokens=False)


def test_a_stand_in_cannot_be_written() -> None:
    """What stands in for a special token is made up anew in every process."""
    first, second = Tokenizer.wrap(byte_level()), Tokenizer.wrap(byte_level())
    assert first._stand_in(0) != second._stand_in(0)
    assert first._stand_in(0) == first._stand_in(0)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d"])
def test_halves_of_characters_are_refused(tokenizer: Tokenizer, text: str) -> None:
    for parse in (True, False):
        with pytest.raises(UsageError, match="not valid Unicode text") as caught:
            tokenizer.encode(text, add_special_tokens=False, parse_special=parse)
        assert caught.value.hint
