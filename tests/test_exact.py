"""Exact mode: bits depend on the tokens alone, so that drafting changes nothing but the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import exported
import numpy as np
import onnxruntime
import pytest
import tiny_models
from drafting import Noisy, Oracle, Wrong
from exported import Exported, Pair, pair_params, prompt_of
from numpy.typing import NDArray
from onnx import TensorProto, helper
from toys import Toy, write_folder

import specrun
from specexport.options import ExportOptions
from specrun import tune
from specrun.errors import ContextFull, EngineError, UsageError
from specrun.exact import ExactTarget
from specrun.loop import Round
from specrun.opening import open_target
from specrun.options import EngineOptions
from specrun.target import Verifier

OpenToy = Callable[..., specrun.Engine]
WIDTH = 8
SHAPED = Toy(shaped=True, history_weight=3, drafter=True, draft=Toy(history_weight=3))
PROMPT = [1, 2, 3, 1, 2]
METHODS = ("prompt-lookup", "mtp-drafter", "draft")
LONG = 40  # tokens: several blocks

MTP = tuple((name, None) for name in tiny_models.MTP_LAYERS)
QUICK: tuple[Pair, ...] = (("llama", None), ("gemma4-e2b", "assistant-plain"))
SLOW: tuple[Pair, ...] = tuple(pair for pair in (*tiny_models.PAIRS, *MTP) if pair not in QUICK)
EVERY = [
    *pair_params(*QUICK),
    *(
        pytest.param(*param.values, id=param.id, marks=pytest.mark.slow)
        for param in pair_params(*SLOW)
    ),
]


class Mixed:
    """Drafts what ``text`` has, every so often wrongly; on another text anything."""

    max_drafts: int | None = None
    needs_prompt_rows = False

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self._text = list(text)
        self._random = random.Random(seed)
        self._length = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)

    def observe(self, tokens: Sequence[int], hidden: NDArray[Any]) -> None:
        self._length += len(tokens)

    def propose(self, count: int, sampler: Any) -> list[int]:
        right = self._text[self._length : self._length + count]
        return [token if self._random.random() < 0.7 else 0 for token in right]

    def truncate(self, length: int) -> None:
        pass


def run_shapes(engine: specrun.Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(past length, rows) of every run of the target from now on."""
    target = engine.target
    inner: Any = target.target if isinstance(target, ExactTarget) else target
    inner = inner._target  # the engine behind its guard
    shapes: list[tuple[int, int]] = []
    step = inner._step

    def spy(tokens: NDArray[np.int64], *rest: Any) -> Any:
        shapes.append((inner.length, tokens.shape[1]))
        return step(tokens, *rest)

    monkeypatch.setattr(inner, "_step", spy)
    return shapes


# Shapes, on an engine whose tokens depend on them.


def test_without_it_the_shape_of_a_run_shows(open_toy: OpenToy) -> None:
    """The control: what the tests below find equal is not so by itself."""
    engine = open_toy(SHAPED)
    plain = engine.generate(PROMPT, method="plain", max_new_tokens=LONG).tokens
    for method in METHODS:
        result = engine.generate(PROMPT, method=method, max_new_tokens=LONG)
        assert result.tokens != plain


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [2, 3, WIDTH, 16])
def test_every_number_of_drafts_gives_plain_tokens(
    open_toy: OpenToy, method: Any, width: int
) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=width)
    for prompt in ([4], PROMPT, PROMPT * 7):
        plain = engine.generate(prompt, method="plain", max_new_tokens=LONG, logprobs=2)
        for k in range(width):
            result = engine.generate(
                prompt, method=method, num_assistant_tokens=k, max_new_tokens=LONG, logprobs=2
            )
            assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)
            engine.check_integrity()


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient", "auto"])
def test_every_schedule_stays_within_the_block(open_toy: OpenToy, schedule: Any) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    plain = engine.generate(PROMPT, method="plain", max_new_tokens=200).tokens
    rounds: list[Round] = []
    result = engine.generate(
        PROMPT,
        drafter=Mixed([*PROMPT, *plain]),
        num_assistant_tokens=5,
        num_assistant_tokens_schedule=schedule,
        max_new_tokens=200,
        on_round=rounds.append,
        strict=True,
    )
    assert result.tokens == plain
    assert max(result.stats.num_draft_by_round) <= WIDTH - 1
    for done in rounds:
        first = done.committed_length - len(done.emitted) - 1  # position of the round's row 0
        assert first % WIDTH + len(done.proposal) < WIDTH


def test_runs_are_whole_blocks(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(history_weight=3)
    for exact in (False, True):
        engine = open_toy(toy, exact=exact)
        shapes = run_shapes(engine, monkeypatch)
        result = engine.generate(PROMPT * 7, drafter=Noisy(toy), max_new_tokens=LONG)
        assert result.tokens == toy.plain(PROMPT * 7, LONG)
        aligned = all(past % 16 == 0 and rows == 16 for past, rows in shapes)
        assert aligned == exact


def test_the_exact_pattern(open_toy: OpenToy) -> None:
    """Rounds end with the block: 3 rows of the prompt, so that 5 rows, 4 drafts fit at first."""
    toy = Toy()
    engine = open_toy(toy, exact=True, exact_width=WIDTH)
    rounds: list[Round] = []
    result = engine.generate(
        [1, 2, 3],
        drafter=Oracle(toy),
        num_assistant_tokens=5,
        max_new_tokens=20,
        on_round=rounds.append,
        strict=True,
    )
    assert result.tokens == toy.plain([1, 2, 3], 20)
    # Row 0 is at 3: rows 3 to 7; then 8 to 13, and 14 and 15; then 16 to 21, the 20th token.
    assert [len(done.proposal) for done in rounds] == [4, 5, 1, 5]
    assert result.stats.acceptance == 1
    assert result.stats.num_draft_by_round == (5, 5, 5, 5)


def test_wrong_drafts_and_a_full_block(open_toy: OpenToy) -> None:
    toy = Toy(history_weight=3)
    engine = open_toy(toy, exact=True, exact_width=2)
    result = engine.generate([1], drafter=Wrong(toy), num_assistant_tokens=1, max_new_tokens=30)
    assert result.tokens == toy.plain([1], 30)
    assert result.stats.accepted == 0
    assert result.stats.drafted == 14  # in every other round, the others end a block


@pytest.mark.parametrize("context", [24, 25, 29, 31, 32])
@pytest.mark.parametrize("method", ["plain", *METHODS])
def test_the_context_is_used_up(open_toy: OpenToy, context: int, method: Any) -> None:
    """Its last block is whole, in buffers that reach behind it."""
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH, max_context=context)
    plain = engine.generate(PROMPT, method="plain").tokens
    result = engine.generate(PROMPT, method=method)
    assert len(PROMPT) + len(result.tokens) == context
    assert (result.tokens, result.finish_reason) == (plain, "length")
    with pytest.raises(ContextFull):
        engine.generate([1] * context)


def test_buffers_that_grow(open_toy: OpenToy) -> None:
    toy = Toy(history_weight=3, modulus=7, max_context=700)
    engine = open_toy(toy, exact=True)
    result = engine.generate([1], drafter=Noisy(toy), max_new_tokens=999)
    assert result.tokens == toy.plain([1], 699)
    assert engine.target.kv.capacity == 704


# Sessions and batches.


@pytest.mark.parametrize("method", ["plain", *METHODS])
def test_a_session_is_a_cold_run(open_toy: OpenToy, method: Any) -> None:
    """Turns, rewinds into a block and to its edges, and a whole text in place of another."""
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    session = engine.session()

    def turn(count: int) -> None:
        want = engine.generate(session.tokens, method="plain", max_new_tokens=count).tokens
        assert session.generate(method=method, max_new_tokens=count).tokens == want
        session.check_integrity()

    session.append(PROMPT)
    turn(13)
    session.append([7, 8])
    turn(9)
    for length in (19, 16, 15, 1, 0):
        session.rewind(length)
        session.append([3])
        turn(11)
    session.replace([1, 2, 3, 4] * 6)
    turn(5)


def test_a_batch_is_its_prompts(open_toy: OpenToy) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    prompts = [PROMPT, [4], PROMPT * 4]
    alone = [engine.generate(p, method="plain", max_new_tokens=LONG).tokens for p in prompts]
    rows = engine.generate(prompts, method="mtp-drafter", max_new_tokens=LONG)
    assert [row.tokens for row in rows] == alone


def test_sampled_text_is_reproduced(open_toy: OpenToy) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    options: dict[str, Any] = {"temperature": 4.0, "seed": 5, "max_new_tokens": LONG}
    for method in METHODS:
        texts = [engine.generate(PROMPT, method=method, **options).tokens for _ in range(2)]
        assert texts[0] == texts[1]


def test_a_stream_that_was_closed(open_toy: OpenToy) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    session = engine.session()
    session.append(PROMPT)
    with session.stream(method="mtp-drafter", max_new_tokens=LONG) as stream:
        next(stream)
        next(stream)
    want = engine.generate(session.tokens, method="plain", max_new_tokens=9).tokens
    assert session.generate(max_new_tokens=9).tokens == want


# Options.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exact": 1}, "exact: must be true or false, got 1"),
        ({"exact": True, "exact_width": 1}, "exact_width: must be a whole number of at least 2"),
        ({"exact": True, "exact_width": 2000}, "exact_width: must be at most 1024, got 2000"),
        ({"exact_width": 8}, "exact_width: has no effect without exact, got 8"),
        ({"exact": True, "tuning": "x"}, "tuning: costs are measured without exact, got 'x'"),
    ],
)
def test_bad_engine_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        EngineOptions(**options)
    assert caught.value.hint


def test_what_exact_mode_refuses(open_toy: OpenToy, tmp_path: Path) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    with pytest.raises(UsageError, match="num_assistant_tokens: in exact mode at most 7 fit") as no:
        engine.generate(PROMPT, num_assistant_tokens=8)
    assert "7 or less" in str(no.value.hint)
    with pytest.raises(UsageError, match="ensemble_weight: below 1 the text is not") as caught:
        engine.generate(PROMPT, method="draft", ensemble_weight=0.7)
    assert caught.value.hint
    with pytest.raises(UsageError, match="exact: costs are measured without it"):
        tune.tune(write_folder(tmp_path / "engines", Toy()), options=EngineOptions(exact=True))


def test_what_is_drafted_by_default_fits(open_toy: OpenToy) -> None:
    toy = Toy(drafter=True, num_assistant_tokens=9)
    for width, count in ((4, 3), (16, 9)):
        engine = open_toy(toy, exact=True, exact_width=width)
        assert engine.generate(PROMPT).options.num_assistant_tokens == count
    engine = open_toy(toy, exact=True, exact_width=4)
    assert engine.generate(PROMPT, method="prompt-lookup").options.num_assistant_tokens == 3


def test_it_is_said(open_toy: OpenToy) -> None:
    stats = open_toy(Toy(), exact=True, exact_width=4).generate(PROMPT).stats
    assert (stats.exact, stats.exact_width) == (True, 4)
    assert {"exact": True, "exact_width": 4}.items() <= stats.as_dict().items()
    stats = open_toy(Toy()).generate(PROMPT).stats
    assert (stats.exact, stats.exact_width) == (False, None)


def test_auto_learns_costs(open_toy: OpenToy) -> None:
    engine = open_toy(Toy(drafter=True), exact=True)
    tune.tune(engine.folder, options=EngineOptions(threads=1))
    assert engine.not_tuned == "in exact mode they are learned: specrun tune measures without it"


# The target alone.


def test_rows_must_fit(open_toy: OpenToy) -> None:
    target = open_toy(Toy(max_context=30), exact=True, exact_width=WIDTH).target
    assert target.room == WIDTH
    target.prefill(np.array([[1] * 11]))
    target.check_integrity()
    assert (target.length, target.room) == (11, 5)
    with pytest.raises(ValueError, match="6 rows in a block that has room for 5"):
        target.verify(np.array([[1] * 6]))
    target.verify(np.array([[1] * 5]))
    target.prefill(np.array([[1] * 12]))
    assert (target.length, target.room) == (28, 2)
    for feed in (target.prefill, target.verify):
        with pytest.raises(ContextFull, match="31 tokens do not fit into the context of 30"):
            feed(np.array([[1] * 3]))
    with pytest.raises(ValueError, match="cannot truncate"):
        target.truncate(29)
    assert target.length == 28


def test_a_run_that_failed(open_toy: OpenToy, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_toy(SHAPED, exact=True, exact_width=WIDTH)
    session = engine.session()
    session.append(PROMPT * 3)
    session.generate(max_new_tokens=4)
    target: Any = session._open()[1].target
    with monkeypatch.context() as broken:
        broken.setattr(target.target, "verify", _fail)
        with pytest.raises(EngineError, match="broken"):
            session.generate(max_new_tokens=4)
    want = engine.generate(session.tokens, method="plain", max_new_tokens=9).tokens
    assert session.generate(max_new_tokens=9).tokens == want
    session.check_integrity()


def _fail(*arguments: Any, **named: Any) -> None:
    raise EngineError("broken")


# Real engines, bit by bit.


def open_exact(made: Exported, width: int, **options: Any) -> Verifier:
    """The target of a folder; buffers of 16 rows at first, so that they grow on the way."""
    context = {"max_context": tiny_models.CONTEXT, "initial_capacity": 16} | options
    return open_target(made.manifest, made.session, exact_width=width, **context)


def logits_of(rows: Any) -> NDArray[np.float32]:
    """A copy ``[rows, vocabulary]``."""
    copied: NDArray[np.float32] = rows.logits[0].copy()
    return copied


def one_by_one(target: Verifier, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits ``[len(tokens), vocabulary]`` as plain decoding has them."""
    target.truncate(0)
    return np.concatenate(
        [logits_of(target.verify(np.array([[token]]), want_logits=True)) for token in tokens]
    )


def drafted(target: Verifier, tokens: Sequence[int], seed: int) -> NDArray[np.float32]:
    """The same, in blocks of any size that fits, with wrong drafts behind, and steps back."""
    generator = random.Random(seed)
    target.truncate(0)
    found: list[NDArray[np.float32]] = []
    while len(found) < len(tokens):
        at = len(found)
        rows = generator.randint(1, target.room)
        right = min(generator.randint(1, rows), len(tokens) - at)
        block = [*tokens[at : at + right], *(generator.randrange(256) for _ in range(rows - right))]
        found += list(logits_of(target.verify(np.array([block]), want_logits=True))[:right])
        if generator.random() < 0.1:
            found = found[: max(0, len(found) - generator.randint(1, 12))]
        target.truncate(len(found))
    return np.stack(found)


def kv_rows(target: Verifier, length: int) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in target.kv.arrays.items():
        yield name, array[:, :, :length].copy()


def check_bits(made: Exported, width: int) -> None:
    """Logits and KV of every position, windows and capacities crossed, however they are fed."""
    tokens = prompt_of(tiny_models.CONTEXT - 5)
    plain = open_exact(made, width)
    want = one_by_one(plain, tokens)
    want_kv = dict(kv_rows(plain, len(tokens)))
    for seed in range(2):
        target = open_exact(made, width)
        got = drafted(target, tokens, seed)
        differ = np.flatnonzero((got != want).any(axis=1))
        assert not differ.size, f"positions {differ.tolist()}"
        for name, rows in kv_rows(target, len(tokens)):
            assert np.array_equal(rows, want_kv[name]), name
    for length in (1, 7, 8, 9, 31, 64, 65, len(tokens)):
        target.truncate(0)
        got = logits_of(target.prefill(np.array([tokens[:length]]), want_logits=True))
        assert np.array_equal(got[0], want[length - 1])


@pytest.mark.parametrize("pair", EVERY)
@pytest.mark.parametrize(("precision", "width"), [("fp32", WIDTH), ("fp16", 16)])
def test_bits(
    exported_pair: Callable[..., Exported], pair: Pair, precision: str, width: int
) -> None:
    # In half precision two experts may be as good as each other, and transformers takes another.
    check_bits(exported_pair(pair, precision, check=precision == "fp32"), width)


def test_hidden_rows_of_the_prompt(exported_pair: Callable[..., Exported]) -> None:
    """Each once, in order and the same, whatever was read before."""
    target = open_exact(exported_pair(("llama", None)), 4)
    tokens = prompt_of(11)
    want: list[NDArray[Any]] = []
    for before in range(len(tokens)):
        target.truncate(0)
        if before:
            target.prefill(np.array([tokens[:before]]))
        seen: list[NDArray[Any]] = []
        ends: list[int] = []

        def on_rows(
            start: int, hidden: NDArray[Any], seen: list[Any] = seen, ends: list[int] = ends
        ) -> None:
            seen += list(hidden.copy())
            ends.append(start + len(hidden))

        target.prefill(np.array([tokens[before:]]), on_rows=on_rows)
        want = want or seen
        assert ends == [end for end in (4, 8, 11) if end > before]
        assert np.array_equal(np.stack(seen), np.stack(want[before:]))


@pytest.mark.parametrize("pair", EVERY)
def test_tokens_and_logprobs(exported_pair: Callable[..., Exported], pair: Pair) -> None:
    made = exported_pair(pair)
    with made.open(exact=True, exact_width=WIDTH) as engine:
        check_methods(engine, [*made.manifest.drafters, "prompt-lookup"])


def check_methods(engine: specrun.Engine, methods: Sequence[str]) -> None:
    """Tokens and log-probabilities of plain decoding, every method, cold and in a session."""
    common: dict[str, Any] = {"max_new_tokens": 30, "eos_token_ids": (), "logprobs": 3}
    common["strict"] = True
    for prompt in (prompt_of(1), prompt_of(6) * 5):
        plain = engine.generate(prompt, method="plain", **common)
        texts = [*prompt, *plain.tokens]

        def same(result: specrun.Result, plain: specrun.Result = plain) -> None:
            assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)

        for k in (1, 3, 7):
            same(engine.generate(prompt, drafter=Mixed(texts, k), num_assistant_tokens=k, **common))
            for method in methods:
                made = engine.generate(prompt, method=method, num_assistant_tokens=k, **common)
                same(made)
        for method in methods:
            session = engine.session()
            session.append(prompt)
            session.generate(method="plain", **common | {"max_new_tokens": 12})
            session.rewind(len(prompt) + 9)
            rest = session.generate(method=method, **common | {"max_new_tokens": 21})
            assert rest.tokens == plain.tokens[9:]
            assert rest.logprobs == (plain.logprobs or [])[9:]


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("llama", 1),
        pytest.param("gemma4-e2b", 2, marks=pytest.mark.slow),
        pytest.param("gemma4-e2b", 5, marks=pytest.mark.slow),
    ],
)
def test_early_exit(once: Callable[..., Path], name: str, cut: int) -> None:
    """The front feeds drafts row by row; what it found for them is not used again."""
    options = ExportOptions(num_draft=8, early_exit=cut)
    pair = (name, None)
    folder = once(
        f"exact-{name}-{cut}", lambda folder: exported.make(pair, folder, options=options)
    )
    made = exported.read(pair, folder)
    check_bits(made, WIDTH)
    with made.open(exact=True, exact_width=WIDTH) as engine:
        check_methods(engine, ["early-exit", "prompt-lookup"])
        result = engine.generate(prompt_of(9), method="early-exit", num_assistant_tokens=4)
        assert result.stats.drafted > 0


# Attention in heads that no tiny model has.


def attention(head_size: int, window: int) -> Any:
    """A session of GroupQueryAttention alone: 2 heads on 1, as the graphs call it."""
    float_, int32 = TensorProto.FLOAT, TensorProto.INT32
    info = helper.make_tensor_value_info
    kv = ["batch", 1, "capacity", head_size]
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past.k", "past.v", "last", "total"],
        ["out", "present.k", "present.v"],
        domain="com.microsoft",
        num_heads=2,
        kv_num_heads=1,
        local_window_size=window,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [
            info("q", float_, ["batch", "rows", 2 * head_size]),
            *(info(name, float_, ["batch", "rows", head_size]) for name in ("k", "v")),
            *(info(name, float_, kv) for name in ("past.k", "past.v")),
            info("last", int32, ["batch"]),
            info("total", int32, []),
        ],
        [
            info("out", float_, ["batch", "rows", 2 * head_size]),
            *(info(name, float_, kv) for name in ("present.k", "present.v")),
        ],
    )
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("head_size", [64, 256, 512])
@pytest.mark.parametrize("window", [-1, 24])
def test_attention_looks_back_only(head_size: int, window: int) -> None:
    """A row has the same bits whatever stands behind it in its block. That two rows at different
    places of two blocks have the same is not so: at 57 + 8 rows, for example, in heads of 256."""
    session = attention(head_size, window)
    generator = np.random.default_rng(0)
    total = 40 * WIDTH

    def random_rows(rows: int, heads: int) -> NDArray[np.float32]:
        return generator.standard_normal((1, rows, heads * head_size)).astype(np.float32)

    k, v = random_rows(total, 1), random_rows(total, 1)
    past = {"past.k": k[:, None], "past.v": v[:, None]}
    for start in range(0, total, WIDTH):
        block = slice(start, start + WIDTH)
        rows = {"q": random_rows(WIDTH, 2), "k": k[:, block], "v": v[:, block]}
        lengths = {
            "last": np.array([start + WIDTH - 1], np.int32),
            "total": np.array(start + WIDTH, np.int32),
        }
        want = session.run(["out"], rows | past | lengths)[0]
        for right in range(1, WIDTH):
            other = {name: array.copy() for name, array in rows.items()}
            for name, heads in (("q", 2), ("k", 1), ("v", 1)):
                other[name][:, right:] = random_rows(WIDTH - right, heads)
            got = session.run(["out"], other | past | lengths)[0]
            assert np.array_equal(got[:, :right], want[:, :right])
