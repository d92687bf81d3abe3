"""Structured output on engines: every method gives what plain constrained decoding gives.

Vocabulary of eight letters, whose texts are so few that the grammar can be written out: what may
follow a text is asked of all texts that match, not of the library.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import check_structured
import check_tiny
import small_vocabulary
from exact_law import Sampling, Tally, exact_law, fit
from small_vocabulary import FOLDERS, LETTERS, METHODS, PROMPT

import specrun
from specexport.sources import resolve
from specrun.drafters.base import Proposal

OpenSmall = Callable[..., specrun.Engine]

# The end id is the h, which the text ends with.
PATTERN = "[a-d]([e-g][a-f])?[a-g]?h"
LENGTH, END = 5, 7
RUNS = 200
LEAST_P = 1e-4
# What a text that matches may begin with, written out.
WORD = "[a-g]{3}(bad|deaf)"
BEGINNINGS = {
    PATTERN: "[a-d]([e-g]|([e-g][a-f])?[a-g]?h?)",
    f"({WORD})+h": f"({WORD})*([a-g]{{0,3}}|[a-g]{{3}}(ba?|d|dea?))?|({WORD})+h?",
    "[ab]*c?[d-g]{2,30}h": "[ab]*c?[d-g]{0,30}|[ab]*c?[d-g]{2,30}h",
}
CASES = [(method, k) for method in METHODS for k in ((0,) if method == "plain" else (1, 2, 4))]


@functools.cache
def matching() -> frozenset[tuple[int, ...]]:
    """All texts of the pattern."""
    texts = (t for n in range(1, LENGTH + 1) for t in itertools.product(range(8), repeat=n))
    return frozenset(t for t in texts if re.fullmatch(PATTERN, "".join(LETTERS[i] for i in t)))


@functools.cache
def allowed(text: tuple[int, ...]) -> NDArray[np.bool_]:
    """What may follow, as the texts of the pattern say; after the end, or no text, anything."""
    follows = {match[len(text)] for match in matching() if match[: len(text)] == text != match}
    return np.array([token in follows or not follows for token in range(8)])


@functools.cache
def law(checkpoint: Path, sampling: Sampling) -> Any:
    """The law of plain constrained sampling, from transformers and the texts of the pattern."""
    model = resolve(checkpoint).load_reference()
    return exact_law(model, PROMPT, LENGTH, sampling, allowed)


def generate(engine: specrun.Engine, method: str, k: int, **options: Any) -> specrun.Result:
    given = {"eos_token_ids": (END,), "max_new_tokens": 40, "strict": True, **options}
    if method != "plain":
        given["num_assistant_tokens"] = k
    return engine.generate(PROMPT, method=method, **given)


@pytest.mark.parametrize(("method", "k"), CASES)
def test_greedy_is_plain_constrained_decoding(open_small: OpenSmall, method: str, k: int) -> None:
    engine = open_small(METHODS[method])
    for pattern in BEGINNINGS:
        plain = step_by_step(engine, pattern, 20)
        result = generate(engine, method, k, regex=pattern, max_new_tokens=20)
        assert result.tokens == plain
        assert (result.finish_reason == "eos") == (re.fullmatch(pattern, result.text) is not None)


def step_by_step(engine: specrun.Engine, pattern: str, most: int) -> list[int]:
    """The obviously correct twin: of every run without a grammar, the most probable token with
    which the text may begin."""
    found: list[int] = []
    while len(found) < most and END not in found:
        step = engine.generate(
            [*PROMPT, *found], method="plain", max_new_tokens=1, logprobs=8, eos_token_ids=()
        )
        assert step.logprobs is not None
        best = [token for token, _ in step.logprobs[0].top]
        found.append(next(token for token in best if begins(pattern, [*found, token])))
    return found


def begins(pattern: str, text: Sequence[int]) -> bool:
    """Whether a text that matches begins so."""
    return re.fullmatch(BEGINNINGS[pattern], "".join(LETTERS[i] for i in text)) is not None


def test_the_next_turn_reads_what_is_new(open_small: OpenSmall) -> None:
    """With a grammar too: MTP layers keep the rows that they have."""
    session = open_small(METHODS["mtp"]).session()
    session.append([*PROMPT, *PROMPT, *PROMPT])
    options: dict[str, Any] = {"method": "mtp", "eos_token_ids": (END,), "regex": PATTERN}
    first = session.generate(**options)
    assert first.stats.prefilled == len(session.tokens) - len(first.tokens)
    before = len(session.tokens)
    session.append(PROMPT)
    second = session.generate(**options)
    assert second.stats.prefilled < 2 * len(PROMPT) + LENGTH < before
    assert re.fullmatch(PATTERN, second.text)


@pytest.mark.parametrize("method", METHODS)
def test_the_law_is_that_of_plain_constrained_sampling(
    open_small: OpenSmall, small_folder: Callable[[str], Path], method: str
) -> None:
    name, sampling = METHODS[method], Sampling(temperature=0.9, top_p=0.97, end=END)
    engine = open_small(name)
    tally = Tally(small_vocabulary.SIZE, LENGTH, END)
    drafted = accepted = 0
    for seed in range(RUNS):
        options = sampling.options() | {"max_new_tokens": LENGTH, "seed": seed}
        result = generate(engine, method, 3, regex=PATTERN, **options)
        tally.add(result.tokens)
        drafted += result.stats.drafted
        accepted += result.stats.accepted
    found = fit(tally.counts, law(small_folder(name) / FOLDERS[name].target, sampling))
    assert found.good and found.p_value > LEAST_P, f"not the law: {found}"
    assert method == "plain" or 0.03 < accepted / drafted < 0.97


class Wrong:
    """Drafts the same tokens always, drawn or certain."""

    max_drafts = None
    needs_prompt_rows = False

    def __init__(self, tokens: Sequence[int], *, drawn: bool) -> None:
        self.tokens, self.drawn = list(tokens), drawn

    def begin(self, tokens: Sequence[int]) -> None: ...

    def observe(self, tokens: Sequence[int], hidden: Any) -> None: ...

    def truncate(self, length: int) -> None: ...

    def propose(self, count: int, sampler: Any) -> Proposal:
        uniform = specrun.sampling.Distribution.normalised(np.ones(8))
        tokens = self.tokens[:count]
        return Proposal(tokens, [uniform] * len(tokens) if self.drawn else None)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_where_a_proposal_is_cut(open_small: OpenSmall, drawn: bool, options: Any) -> None:
    """Certain drafts before the first that is forbidden, drawn ones behind it."""
    proposals: list[tuple[int, ...]] = []
    result = open_small("llama").generate(
        PROMPT,
        drafter=Wrong([0, 1, 7, 2], drawn=drawn),
        regex="[ab]{6}h",
        eos_token_ids=(END,),
        num_assistant_tokens=4,
        on_round=lambda done: proposals.append(done.proposal),
        **options,
    )
    assert re.fullmatch("[ab]{6}h", result.text)
    assert set(proposals[:1]) <= {(0, 1, 7) if drawn else (0, 1)}
    assert all(len(p) <= (3 if drawn else 2) or p == (7,) for p in proposals)


def matches(result: specrun.Result, pattern: str) -> bool:
    return re.fullmatch(pattern, result.text) is not None


WORDS = f"({WORD})+h"


@pytest.mark.parametrize("method", ["draft", "mtp-drafter", "mtp", "early-exit"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_ensemble_keeps_to_it(open_small: OpenSmall, method: str, temperature: float) -> None:
    """Also where the drafter knows no grammar and its word counts most."""
    engine = open_small(METHODS[method])
    for seed in range(15 if temperature else 1):
        given = {"temperature": temperature, "seed": seed if temperature else None}
        result = generate(
            engine, method, 4, regex=PATTERN, ensemble_weight=0.05, max_new_tokens=LENGTH, **given
        )
        assert matches(result, PATTERN)


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient", "auto"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 5}])
def test_schedules_and_batches(open_small: OpenSmall, schedule: str, options: Any) -> None:
    """Every row has the text that it has alone."""
    engine = open_small("llama")
    given = {"regex": WORDS, "num_assistant_tokens_schedule": schedule, **options}
    given |= {"eos_token_ids": (END,), "max_new_tokens": 24, "method": "draft"}
    prompts = [PROMPT, PROMPT[:3], [5]]
    rows = engine.generate(prompts, **given)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        seeded = {"seed": 5 + index} if options else {}
        alone = engine.generate(prompt, **{**given, **seeded})
        # The others go on from what earlier texts taught them, and draw with that.
        if schedule in ("constant", "heuristic_transient") or not options:
            assert row.tokens == alone.tokens
        assert re.fullmatch(BEGINNINGS[WORDS], row.text)


def test_sessions_start_anew(open_small: OpenSmall) -> None:
    """The grammar is that of the new text of each generation."""
    engine = open_small("llama")
    session = engine.session()
    session.append(PROMPT)
    for pattern in ("[ab]{3}h", "[cd]{2}e?h", "[ab]{3}h"):
        before = session.tokens
        result = session.generate(regex=pattern, eos_token_ids=(END,), method="draft")
        assert matches(result, pattern)
        cold = engine.generate(before, regex=pattern, eos_token_ids=(END,), method="draft")
        assert result.tokens == cold.tokens
    session.rewind(len(PROMPT) + 2)
    assert matches(session.generate(regex="f{5}h", eos_token_ids=(END,)), "f{5}h")


@pytest.mark.parametrize("options", [{"exact": True, "exact_width": 5}, {"verify": "torch"}])
def test_other_verifiers(open_small: OpenSmall, options: Any) -> None:
    plain = generate(open_small("gemma4"), "plain", 0, regex=WORDS, max_new_tokens=24)
    other = generate(open_small("gemma4", **options), "mtp-drafter", 4, regex=WORDS,
                     max_new_tokens=24)  # fmt: skip
    assert other.tokens == plain.tokens
    assert other.stats.accepted > 0


def test_where_a_text_ends(open_small: OpenSmall) -> None:
    """A limit or a stop string cuts it: then it is not complete, and the reason says so."""
    engine = open_small("llama")
    whole = generate(engine, "draft", 4, regex="abcdefg{9}h")
    assert (whole.text, whole.finish_reason) == ("abcdefgggggggggh", "eos")
    cut = generate(engine, "draft", 4, regex="abcdefg{9}h", max_new_tokens=6)
    assert (cut.text, cut.finish_reason) == ("abcdef", "length")
    stopped = generate(engine, "draft", 4, regex="abcdefg{9}h", stop="de")
    assert (stopped.text, stopped.finish_reason) == ("abc", "stop")
    assert whole.stats.accepted == whole.stats.drafted > 0


def test_logprobs_are_the_targets_own(open_small: OpenSmall) -> None:
    """Those of the law without a grammar, as with every processor."""
    engine = open_small("llama")
    result = generate(engine, "draft", 4, regex="abc{3}h", logprobs=8)
    free = engine.generate(PROMPT, method="plain", max_new_tokens=1, logprobs=8, eos_token_ids=())
    assert result.logprobs is not None and free.logprobs is not None
    assert len(result.logprobs) == len(result.tokens)
    assert dict(result.logprobs[0].top) == pytest.approx(dict(free.logprobs[0].top), abs=1e-4)


def test_options_that_leave_nothing(open_small: OpenSmall) -> None:
    engine = open_small("llama")
    with pytest.raises(specrun.UsageError, match="no token is left to choose") as caught:
        generate(engine, "draft", 4, regex="abch", bad_words_ids=((2,),))
    assert "json_schema" in str(caught.value.hint)
    assert generate(engine, "draft", 4, regex="ab[cd]h", bad_words_ids=((2,),)).text == "abdh"


def test_a_vocabulary_that_cannot_write_it(open_small: OpenSmall) -> None:
    engine = open_small("llama")
    with pytest.raises(specrun.UsageError, match="json_schema: "):
        generate(engine, "draft", 4, json_schema={"type": "object"})
    with pytest.raises(specrun.UsageError, match="regex: needs an end id"):
        generate(engine, "draft", 4, regex="a", eos_token_ids=())


@pytest.mark.slow
def test_json_of_the_bundled_pair(once: Callable[..., Path]) -> None:
    """Some of what ``scripts/check_structured.py`` does: each schema, temperature and method."""
    made = once("gemma4-tiny", lambda folder: check_tiny.export(folder / "engines"))
    report = check_structured.check(made / "engines", count=20)
    assert report.faults == []
    assert (report.valid, report.equal) == (20, 10)
    assert all(tokens > 2 * steps for tokens, steps in report.steps.values())
