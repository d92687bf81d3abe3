"""A drafter with another tokenizer: bytes of tokens, text followed and turned back, what is drawn.

The drafting model is a twin in Python that knows the text: it says what comes next in its own
tokens, whatever tokens it was given for what came before.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_loop import watched
from test_text import TEXTS
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from toys import Toy, scripted

import specrun
from specrun.accept import accept_sampled
from specrun.drafters.retokenize import Follower, continuation, whole_characters
from specrun.drafters.universal import UniversalDrafter
from specrun.drafters.vocabulary import Surfaces, VocabularyPair
from specrun.sampling import Distribution, Sampler
from specrun.target import Rows, Target
from specrun.text import Tokenizer

OpenToy = Callable[..., specrun.Engine]
ROLES = {"bos_token": "<bos>", "eos_token": "<eos>"}
BYTE_ROLES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


@functools.cache
def corpus() -> list[str]:
    """English and Python, to learn merges from."""
    code = Path(__file__).read_text(encoding="utf-8")
    return [str(json.__doc__), str(itertools.__doc__), code[:6000]]


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2 and SmolLM have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return Tokenizer.wrap(tokenizer)


@functools.cache
def sentencepiece(prepend: str) -> Tokenizer:
    """Sentencepiece-like BPE with byte fallback; a space before the text, as Llama, or never."""
    learner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<bos>", "<eos>", "<unk>"], show_progress=False
    )
    learner.train_from_iterator(corpus(), trainer)
    learned = json.loads(learner.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for name in BYTES:
        vocabulary.setdefault(name, len(vocabulary))
    merges = [tuple(merge) for merge in learned["merges"]]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return _metaspace(tokenizers.Tokenizer(model), prepend)


@functools.cache
def unigram() -> Tokenizer:
    """A Unigram model with byte fallback, with the words of the BPE model, the first ones likelier.

    Not trained: its trainer's results differ from run to run.
    """
    words = json.loads(sentencepiece("never")._tokenizer.to_str())["model"]["vocab"]
    ordered = sorted(words, key=lambda name: int(words[name]))
    scores = [-20.0 if name in BYTES else -4.0 - 0.0137 * id_ for id_, name in enumerate(ordered)]
    pieces = list(zip(ordered, scores, strict=True))
    return _metaspace(tokenizers.Tokenizer(models.Unigram(pieces, 2, True)), "never")


def _metaspace(tokenizer: tokenizers.Tokenizer, prepend: str) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend != "never":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<unk>"])
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", bos)])
    return Tokenizer.wrap(tokenizer)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece("first"),
    "no prefix": lambda: sentencepiece("never"),
    "unigram": unigram,
}
PAIRS = [pair for pair in itertools.product(TOKENIZERS, repeat=2) if pair[0] != pair[1]]
NAMES = [f"{target} / {drafter}" for target, drafter in PAIRS]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


@functools.cache
def pair_of(target: str, drafter: str) -> VocabularyPair:
    ours, theirs = TOKENIZERS[target](), TOKENIZERS[drafter]()
    byte_target, byte_drafter = target == "byte-level", drafter == "byte-level"
    return VocabularyPair(
        ours,
        theirs,
        table_size=ours.size + 5,
        drafter_table_size=theirs.size + 3,
        target_names=BYTE_ROLES if byte_target else ROLES,
        drafter_names=BYTE_ROLES if byte_drafter else ROLES,
        target_adds_bos=not byte_target,
        drafter_adds_bos=not byte_drafter,
    )


# The bytes of a token.


@pytest.mark.parametrize("text", [*TEXTS, "a\r\n\tb \x00 <bos> <|im_end|>", "  "])
def test_bytes_of_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    surfaces = Surfaces(tokenizer)
    data = b"".join(surfaces.of(piece.id) or b"?" for piece in tokenizer.split(text))
    assert data in (text.encode(), b" " + text.encode())


def test_tokens_by_their_bytes(tokenizer: Tokenizer) -> None:
    surfaces = Surfaces(tokenizer)
    for id_, surface in enumerate(surfaces.of_all()):
        assert surfaces.of(id_) == surface
        assert (surface is None) == (id_ in tokenizer.special_ids)
        if surface is not None:
            found = surfaces.find(surface)
            assert found is not None and surfaces.of(found) == surface
            assert found == id_ or id_ in tokenizer.byte_ids
    assert surfaces.of(tokenizer.size) is None
    assert surfaces.find(b"no such token in any of them") is None


def test_special_tokens_that_a_text_spells_are_text(tokenizer: Tokenizer) -> None:
    text = "<bos><eos><|im_start|>"
    assert not tokenizer.special_ids & {piece.id for piece in tokenizer.split(text)}
    # The switch is back: a prompt's special tokens count as such.
    assert tokenizer.special_ids & set(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(("target", "drafter"), PAIRS, ids=NAMES)
def test_common_tokens(target: str, drafter: str) -> None:
    pair = pair_of(target, drafter)
    ours, theirs = pair.target.tokenizer, pair.drafter.tokenizer
    common = pair.common
    assert len(set(common.target.tolist())) == len(common.target) > 256
    assert len(set(common.drafter.tolist())) == len(common.drafter)
    for here, there in zip(common.target.tolist(), common.drafter.tolist(), strict=True):
        surface = pair.target.of(here)
        if surface is None:
            assert pair.specials[here] == there
        else:
            assert surface == pair.drafter.of(there)
            said = [
                t.decode([t.split("x")[-1].id, id_]) for t, id_ in ((ours, here), (theirs, there))
            ]
            assert said[0] == said[1]
    # Written differently, the same: a space, a newline and single bytes; an encoder's own tokens.
    for text in (" the", "\n", "self"):
        ids = [[p.id for p in t.split("x" + text)[1:]] for t in (ours, theirs)]
        if len(ids[0]) == len(ids[1]) == 1:
            assert pair.to_drafter[ids[0][0]] == ids[1][0]
    assert pair.to_drafter[pair.target.find(b"\xc3") or 0] == pair.drafter.find(b"\xc3")


def test_special_tokens_of_a_pair() -> None:
    pair = pair_of("byte-level", "no prefix")
    ours, theirs = pair.target.tokenizer, pair.drafter.tokenizer
    assert pair.bos == theirs.id_of("<bos>") and pair.target_bos is None
    assert pair.specials == {ours.id_of("<|im_end|>"): theirs.id_of("<eos>")}
    same = pair_of("unigram", "no prefix")
    ours, theirs = same.target.tokenizer, same.drafter.tokenizer
    names = ("<eos>", "<unk>")  # not the drafter's beginning, of which there is one
    assert same.specials == {ours.id_of(name): theirs.id_of(name) for name in names}


# Following a text.

PIECES = [
    " ",
    "  ",
    "\n",
    "the",
    " the",
    "def ",
    "self.",
    "a",
    "é",
    "한",
    "🎉",
    "👨‍👩‍👧",
    "1",
    "23",
    ",",
    "<bos>",
]
WORDS = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)
ANY = st.text(st.characters(codec="utf-8"), max_size=40)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return [piece.id for piece in tokenizer.split(text)]


@pytest.mark.parametrize("name", TOKENIZERS)
@EXAMPLES
@given(text=st.one_of(WORDS, ANY), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_followed_text_is_encoded_as_a_whole(name: str, text: str, cuts: list[int]) -> None:
    """Whatever pieces it comes in, cut inside characters too."""
    tokenizer = TOKENIZERS[name]()
    data = text.encode()
    follower = Follower(tokenizer, lookbehind=6)
    follower.begin([7])
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        follower.write(data[start:end])
        done = data[:end]
        characters = whole_characters(done)
        assert follower.pending == done[len(characters) :]
        assert follower.ids == [7, *whole(tokenizer, characters.decode())]


def test_a_long_text_is_followed_in_windows(tokenizer: Tokenizer) -> None:
    text = " ".join(corpus())[:6000]
    seen: list[int] = []
    split = tokenizer.split

    class Spy(Tokenizer):
        def split(self, text: str) -> list[Any]:
            seen.append(len(text))
            return split(text)

    spy = Spy.__new__(Spy)
    follower = Follower(spy)
    follower.begin([])
    for start in range(0, len(text), 7):
        follower.write(text[start : start + 7].encode())
    assert follower.ids == whole(tokenizer, text)
    assert np.median(seen) < 150


def test_special_tokens_part_the_text(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer)
    follower.begin([1])
    follower.write("words é".encode()[:-1])
    follower.special(5)
    follower.write(b"more words")
    assert follower.ids == [1, *whole(tokenizer, "words �"), 5, *whole(tokenizer, "more words")]
    follower.begin([])
    assert (follower.ids, follower.pending) == ([], b"")


# Turning a draft back.


@pytest.mark.parametrize("name", TOKENIZERS)
@EXAMPLES
@given(before=st.one_of(WORDS, ANY), new=st.one_of(WORDS, ANY))
def test_a_continuation_is_its_text(name: str, before: str, new: str) -> None:
    """Also where before and new would make one token together."""
    surfaces = Surfaces(TOKENIZERS[name]())
    tokens = continuation(surfaces, before.encode(), new.encode())
    assert b"".join(surfaces.of(id_) or b"?" for id_ in tokens) == new.encode()


@pytest.mark.parametrize("text", [text for text in TEXTS if text[0] != " "])
def test_a_continuation_is_what_the_encoder_gives(tokenizer: Tokenizer, text: str) -> None:
    """From every border between its tokens on, inside characters too."""
    surfaces = Surfaces(tokenizer)
    ids = whole(tokenizer, text)
    for border in range(1, len(ids) + 1):
        before = b"".join(surfaces.of(id_) or b"?" for id_ in ids[:border])
        new = b"".join(surfaces.of(id_) or b"?" for id_ in ids[border:])
        assert continuation(surfaces, before.removeprefix(b" "), new) == ids[border:]


def test_a_token_across_the_border_is_cut() -> None:
    """A prompt that ends in a space: its encoder would put that before the next word."""
    surfaces = Surfaces(sentencepiece("never"))
    the, and_ = (surfaces.tokenizer.id_of(name) for name in ("▁the", "▁and"))
    assert whole(surfaces.tokenizer, "is the and")[-2:] == [the, and_]
    tokens = continuation(surfaces, b"is ", b"the and")
    assert tokens[-1] == and_ and the not in tokens
    assert b"".join(surfaces.of(id_) or b"" for id_ in tokens[:-1]) == b"the"


def test_a_tokenizer_that_changes_the_text() -> None:
    """What it says is not what was drafted, so nothing is proposed."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.normalizer = cast(Any, tokenizers.normalizers.Lowercase())
    tokenizer.decoder = decoders.Fuse()
    surfaces = Surfaces(Tokenizer.wrap(tokenizer))
    assert continuation(surfaces, b"a", b"ba") == [2, 1]
    assert continuation(surfaces, b"a", b"bA") == []
    assert continuation(surfaces, b"a", b"xy") == []


# Drafting.


class KnowsTheText:
    """Stands for a draft model: after any tokens it says the next one of ``text`` in its own."""

    def __init__(self, tokenizer: Tokenizer, text: str, bos: int | None, context: int) -> None:
        self.tokenizer = tokenizer
        self.surfaces = Surfaces(tokenizer)
        self.text = text.encode()
        self.bos = bos
        self.ids: list[int] = []
        self.runs: list[list[int]] = []
        self.at_end = next(iter(tokenizer.special_ids))
        self.engine = SimpleNamespace(vocab_size=tokenizer.size + 3)
        self.kv = SimpleNamespace(max_context=context)
        ends = itertools.accumulate(len(self.surfaces.of(i) or b"") for i in self._whole())
        self.next_at = dict(zip([0, *ends], self._whole(), strict=False))

    def _whole(self) -> list[int]:
        return whole(self.tokenizer, self.text.decode())

    @property
    def length(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]

    def prefill(
        self, tokens: NDArray[np.int64], *, want_logits: bool = False, between_chunks: Any = None
    ) -> Rows:
        new: list[int] = tokens[0].tolist()
        assert new and len(self.ids) + len(new) <= self.kv.max_context
        self.ids += new
        self.runs.append(new)
        token = self.next()
        logits = np.full((1, 1, self.engine.vocab_size), -1.0, dtype=np.float32)
        logits[0, 0, token] = 15.0
        known = logits if want_logits else None
        return Rows(np.array([[token]]), np.empty((1, 1, 2)), known, np.ones((1, 1), np.float32))

    def next(self) -> int:
        """The next token of the text; the end of it; nothing useful where the ids are not of it."""
        ids = self.ids
        if self.bos is not None:
            assert ids[0] == self.bos and self.bos not in ids[1:]
            ids = ids[1:]
        read = b"".join(self.surfaces.of(id_) or b"\0" for id_ in ids)
        for said in (read, read.removeprefix(b" ")):
            if said in self.text and self.kv.max_context < 999:
                said = self.text[: self.text.rindex(said) + len(said)]
            if not self.text.startswith(said):
                continue
            rest = self.text[len(said) :]
            if len(said) in self.next_at and said != b"":
                ahead = self.next_at[len(said)]
                if rest.startswith(self.surfaces.of(ahead) or b"\0"):
                    return ahead
            for length in range(min(len(rest), 12), 0, -1):
                if (found := self.surfaces.find(rest[:length])) is not None:
                    return found
        return self.at_end


def drafter_of(
    names: tuple[str, str], text: str, context: int = 999
) -> tuple[UniversalDrafter, KnowsTheText]:
    pair = pair_of(*names)
    model = KnowsTheText(pair.drafter.tokenizer, text, pair.bos, context)
    return UniversalDrafter(cast(Target, model), pair), model


def text_target(pair: VocabularyPair, prompt: list[int], answer: str) -> Toy:
    """A target that says ``answer`` behind ``prompt``, then its end."""
    surfaces = pair.target
    before = b"".join(surfaces.of(id_) or b"" for id_ in prompt[-12:])
    tokens = continuation(surfaces, before, answer.encode())
    assert tokens
    inner = surfaces.tokenizer._tokenizer
    return scripted([*tokens, 1], prompt_length=len(prompt), tokenizer=inner, eos=(1,))


ANSWER = " the quick 🎉 answer,\n    def of(self) -> str:\n  naïve café 한국어 1234 <bos> is  text"
CASES = {
    "plain": "Some words",
    "leading space": " Some words",
    "double spaces": "  Some  words ",
    "newline": "Some words\n",
    "emoji": "Some 👨‍👩‍👧 words 🎉",
    "spelled": "Some <bos> words <|im_start|> <eos>",
    "inside a word": "Some wor",
    "one letter": "S",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("target", "drafter"), PAIRS, ids=NAMES)
def test_drafts_survive(open_toy: OpenToy, target: str, drafter: str, case: str) -> None:
    """The drafter knows the text: almost everything that is verified is accepted."""
    pair = pair_of(target, drafter)
    prompt = [] if pair.target_bos is None else [pair.target_bos]
    prompt += whole(pair.target.tokenizer, CASES[case])
    text = pair.target.tokenizer.decode(prompt)  # a space before the text may be lost
    assert text == CASES[case] or target == "sentencepiece"
    toy = text_target(pair, prompt, ANSWER)
    draft, model = drafter_of((target, drafter), text + ANSWER)
    result, _ = watched(
        open_toy(toy), prompt, drafter=draft, num_assistant_tokens=6, max_new_tokens=300
    )
    assert result.tokens == toy.plain(prompt, len(result.tokens))
    assert result.finish_reason == "eos"
    assert result.stats.tokens_per_target_step > 3
    assert result.stats.acceptance > 0.7
    assert model.ids[: len(draft._follower.ids)] == draft._follower.ids[: model.length]
    told = draft._follower._text
    assert told.encode() + draft._follower.pending == (text + ANSWER).encode()[: len(told.encode())]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_lossless_and_kept(open_toy: OpenToy, k: int) -> None:
    """After every round the KV is a prefix of the committed text's ids; drafts are read once."""
    names = ("unigram", "byte-level")
    pair = pair_of(*names)
    prompt = [pair.target_bos or 0, *whole(pair.target.tokenizer, "Some words")]
    toy = text_target(pair, prompt, ANSWER)
    draft, model = drafter_of(names, "Some words" + ANSWER)
    kept = []

    def check(round_: Any) -> None:
        ids = draft._follower.ids
        assert model.ids == ids[: model.length]
        assert model.length <= len(ids) - 1
        kept.append(len(ids) - model.length)

    result = open_toy(toy).generate(
        prompt, drafter=draft, num_assistant_tokens=k, strict=True, on_round=check
    )
    assert result.tokens == toy.plain(prompt, len(result.tokens))
    assert np.mean(kept) < 4 + k


def test_a_chat_with_special_tokens() -> None:
    """The end of a turn is the drafter's end; what only the target has becomes text."""
    pair = pair_of("byte-level", "no prefix")
    tokenizer, theirs = pair.target.tokenizer, pair.drafter.tokenizer
    text = "<|im_start|>user\nSome words<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False)
    draft, _ = drafter_of(("byte-level", "no prefix"), ANSWER)
    draft.begin(prompt)
    end = theirs.id_of("<eos>")
    assert draft._follower.ids == [
        theirs.id_of("<bos>"),
        *whole(theirs, "<|im_start|>user\nSome words"),
        end,
        *whole(theirs, "\n<|im_start|>assistant\n"),
    ]


def test_the_end_is_drafted() -> None:
    """The drafter's end of text stands for the target's; what only it has ends a draft."""
    names = ("byte-level", "no prefix")
    pair = pair_of(*names)
    ids = whole(pair.target.tokenizer, "Some words")
    for said, wanted in (("<eos>", pair.target.tokenizer.id_of("<|im_end|>")), ("<unk>", None)):
        draft, model = drafter_of(names, "Some words")
        special = model.tokenizer.id_of(said)
        assert special is not None
        model.at_end = special
        for known in range(1, len(ids) + 1):
            draft.begin(ids[:known])
            tokens = draft.propose(9, Sampler()).tokens
            assert tokens == [*ids[known:], *([] if wanted is None else [wanted])]


def test_inside_a_character() -> None:
    """The committed tokens end in the middle of an emoji; the draft finishes it, or is nothing."""
    names = ("byte-level", "no prefix")
    tokenizer = byte_level()
    ids = whole(tokenizer, "Some 🎉 words")
    surfaces = Surfaces(tokenizer)
    cut = next(i for i, id_ in enumerate(ids) if b"\x89" in (surfaces.of(id_) or b""))
    for text, right in (("Some 🎉 words", True), ("Some é words", False)):
        draft, _ = drafter_of(names, text)
        draft.begin(ids[:cut])
        assert draft._follower.pending
        for do_sample in (False, True):
            tokens, q = draft.propose(4, Sampler(do_sample=do_sample, seed=0))
            assert q is None
            assert tokens == (ids[cut : cut + 4] if right else [])


@pytest.mark.parametrize("context", [12, 40])
def test_a_drafter_with_a_short_context(open_toy: OpenToy, context: int) -> None:
    names = ("byte-level", "no prefix")
    pair = pair_of(*names)
    prompt = whole(pair.target.tokenizer, "Some words, and then some more of them")
    toy = text_target(pair, prompt, ANSWER)
    draft, _ = drafter_of(names, "Some words, and then some more of them" + ANSWER, context)
    result, _ = watched(open_toy(toy), prompt, drafter=draft, max_new_tokens=300)
    assert result.tokens == toy.plain(prompt, len(result.tokens))
    assert result.stats.accepted > 10


def test_nothing_to_begin_from() -> None:
    """A text that is only the target's beginning, and a drafter without one."""
    draft, model = drafter_of(("unigram", "byte-level"), "Some words")
    draft.begin([pair_of("unigram", "byte-level").target_bos or 0])
    assert draft.propose(3, Sampler()).tokens == []
    assert model.runs == []


def test_confidence() -> None:
    """The draft that is not confident is kept, and the last."""
    names = ("byte-level", "no prefix")
    prompt = whole(byte_level(), "Some words")
    for threshold, more in ((0.99999, False), (0.9, True)):
        draft, _ = drafter_of(names, "Some words" + ANSWER)
        draft.begin(prompt)
        sampler = Sampler(confidence_threshold=threshold)
        logits = draft.reader.read(draft._sequence, want_logits=True).logits
        assert logits is not None
        tokens = draft.propose(9, sampler).tokens
        assert (len(tokens) > 3) is more and tokens


# Sampling.

LETTERS = tuple("abcd")
TARGET = ((0.1, 0.5, 0.2, 0.2), (0.3, 0.3, 0.3, 0.1), (0.25, 0.25, 0.4, 0.1), (0.4, 0.1, 0.1, 0.4))
# The drafter has them in another order, lacks d and has z.
THEIRS = ("c", "z", "b", "a")
DRAFTER = ((0.3, 0.1, 0.4, 0.2), (0.2, 0.1, 0.3, 0.4), (0.1, 0.3, 0.5, 0.1), (0.6, 0.1, 0.1, 0.2))


@pytest.fixture
def letters(open_toy: OpenToy) -> tuple[specrun.Engine, Callable[..., UniversalDrafter]]:
    """A target over a, b, c, d and drafters with other letters."""
    engine = open_toy(Toy(vocabulary=LETTERS, table=TARGET))

    def make(words: tuple[str, ...], table: Any) -> UniversalDrafter:
        other = open_toy(Toy(vocabulary=words, table=table))
        pair = VocabularyPair(
            engine.tokenizer,
            other.tokenizer,
            table_size=4,
            drafter_table_size=len(words),
            target_names={},
            drafter_names={},
        )
        engine_behind: Any = other.target  # its guard
        return UniversalDrafter(engine_behind._target, pair)

    return engine, make


def test_what_was_drawn_from(letters: Any) -> None:
    _, make = letters
    draft = make(THEIRS, DRAFTER)
    for seed in range(10):
        draft.begin([0])
        tokens, q = draft.propose(5, Sampler(do_sample=True, seed=seed))
        assert q is not None and len(q) == len(tokens) == 5
        for before, token, drawn in zip(
            ["a", *(LETTERS[t] for t in tokens)], tokens, q, strict=False
        ):
            row = DRAFTER[THEIRS.index(before)]
            wanted = np.array([row[3], row[2], row[0], 0.0])  # a, b, c; d cannot be drafted
            np.testing.assert_allclose(drawn.dense(4), wanted / wanted.sum(), rtol=1e-5)
            assert drawn.of(token) > 0


def test_processors_see_the_targets_tokens(letters: Any) -> None:
    _, make = letters
    draft = make(THEIRS, DRAFTER)
    seen: list[tuple[list[int], int]] = []

    def spy(prefix: NDArray[np.int64], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        seen.append((prefix.tolist(), len(logits)))
        only = np.full_like(logits, -np.inf)
        only[(prefix[-1] + 1) % 3] = 0.0
        return only

    draft.begin([2, 0])
    tokens, _ = draft.propose(3, Sampler(do_sample=True, seed=0, processors=[spy]))
    assert tokens == [1, 2, 0]
    assert seen == [([2, 0], 4), ([2, 0, 1], 4), ([2, 0, 1, 2], 4)]


@pytest.mark.parametrize("words", [THEIRS, ("c", "b", "a", "d"), ("w", "x", "y", "b")])
def test_sampling_is_lossless(letters: Any, words: tuple[str, ...]) -> None:
    """The law of two tokens, for common tokens in part, all common, and hardly any."""
    _, make = letters
    draft, sampler, runs = make(words, DRAFTER), Sampler(do_sample=True, seed=5), 800
    found: Counter[tuple[int, ...]] = Counter()
    kinds = set()
    for _ in range(runs):
        tokens = [0]
        while len(tokens) < 3:
            draft.begin(tokens)
            drafts, q = draft.propose(2, sampler)
            kinds.add(q is None)
            text = [tokens[-1], *drafts]
            verdict = accept_sampled(
                drafts,
                q,
                lambda slot, text=text: Distribution(np.array(TARGET[text[slot]])),  # type: ignore[misc]
                sampler.uniform,
                sampler.draw_from,
            )
            tokens += [*drafts[: verdict.count], verdict.token]
        found[tuple(tokens[1:3])] += 1
    assert kinds == {"w" in words}
    chi_square = 0.0
    for path in itertools.product(range(4), repeat=2):
        law = math.prod(TARGET[a][b] for a, b in itertools.pairwise((0, *path)))
        chi_square += (found[path] - runs * law) ** 2 / (runs * law)
    assert chi_square < 37.7  # 15 degrees of freedom: 99.9 %


def test_without_common_tokens_the_text_is_certain(letters: Any) -> None:
    """Most of the drafter's mass is on tokens that the target spells with several."""
    _, make = letters
    row = (0.05, 0.05, 0.1, 0.8)
    draft = make(("a", "b", "c", "ddb"), (row, row, row, row))
    draft.begin([0])
    tokens, q = draft.propose(5, Sampler(do_sample=True, seed=0))
    assert q is None
    assert tokens == [3, 3, 1, 3, 3]


def test_options_that_leave_no_common_token(letters: Any) -> None:
    _, make = letters
    draft = make(THEIRS, DRAFTER)

    def only_d(prefix: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(np.arange(4) == 3, logits, -np.inf).astype(np.float32)

    draft.begin([0])
    sampler = Sampler(do_sample=True, seed=0, processors=[cast(Any, only_d)])
    assert draft.propose(3, sampler).q is None
