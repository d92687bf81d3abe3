"""The bundled pair, which has real acceptance: lossless in every setting, and faster.

All prompts with the preset's own setting and some with every setting; all with every setting is
``scripts/check_tiny.py``.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import check_tiny
from check_tiny import Setting, Text

import specrun
from specrun import manifest
from specrun.stats import Stats
from specrun.trace import Recorder

pytestmark = pytest.mark.slow

NEW = 128
SOME = (0, 12, 18)  # of the prompts: a text, a question, a repetition
PROMPTS: list[str] = json.loads(check_tiny.PROMPTS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(once: Callable[..., Path]) -> Path:
    return once("gemma4-tiny", lambda folder: check_tiny.export(folder / "engines")) / "engines"


@pytest.fixture(scope="module")
def texts(once: Callable[..., Path]) -> list[Text]:
    """What transformers says after every prompt."""
    folder = once("gemma4-tiny-texts", write_texts)
    with (folder / "texts.pickle").open("rb") as file:
        found: list[Text] = pickle.load(file)
    return found


def write_texts(folder: Path) -> None:
    model = check_tiny.load_reference()
    found = [check_tiny.greedy(model, prompt, NEW) for prompt in check_tiny.encode(PROMPTS)]
    with (folder / "texts.pickle").open("wb") as file:
        pickle.dump(found, file)


def check_result(result: specrun.Result, text: Text) -> None:
    """transformers' tokens, or from a tie on others (shown); statistics that add up."""
    verdict = text.compare(result.tokens)
    assert verdict != "different"
    if verdict == "tie":
        warnings.warn(f"a tie in {result.tokens}", stacklevel=2)
    stats = result.stats
    assert stats.accepted + stats.rejected == stats.drafted
    assert stats.emitted == len(result.tokens) == stats.accepted + stats.rounds + 1
    assert sum(stats.accepted_by_round) == sum(stats.accepted_by_position) == stats.accepted
    assert stats.mode == ("plain" if stats.method == "plain" else "speculative")


def test_exported_with_parity(folder: Path) -> None:
    made = manifest.read(folder, integrity="full")
    assert made.parity is not None
    assert made.parity.scope == "whole model"
    assert made.parity.worst_error <= 1e-4
    assert made.parity.argmax_agreement == 1
    assert made.target.id == "gemma4-tiny/target"
    source = made.drafters["mtp-drafter"].source
    assert source is not None and source.id == "gemma4-tiny/assistant"


def test_prompts_are_encoded_as_by_transformers(folder: Path) -> None:
    with specrun.load(folder) as engine:
        assert [engine.encode(prompt) for prompt in PROMPTS] == check_tiny.encode(PROMPTS)


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mtp-drafter"])
def test_every_prompt(folder: Path, texts: list[Text], method: str) -> None:
    setting = Setting(method, "constant", 0 if method == "plain" else 4)
    with specrun.load(folder) as engine:
        for text in texts:
            result = engine.generate(text.prompt, max_new_tokens=NEW, **setting.options())
            assert len(result.tokens) == NEW
            check_result(result, text)


def test_every_setting(folder: Path, texts: list[Text]) -> None:
    with specrun.load(folder) as engine:
        for setting in check_tiny.settings():
            for index in SOME:
                text = texts[index]
                result = engine.generate(text.prompt, max_new_tokens=NEW, **setting.options())
                assert len(result.tokens) == NEW
                check_result(result, text)


def test_as_it_comes(folder: Path, texts: list[Text]) -> None:
    """Defaults of the folder, own end ids: the texts of transformers, cut at an end id, with so
    many drafts accepted that it pays."""
    stats: list[Stats] = []
    with specrun.load(folder) as engine:
        ends = engine.manifest.generation.eos_token_ids
        assert len(ends) == 2
        for prompt, text in zip(PROMPTS, texts, strict=True):
            result = engine.generate(prompt, max_new_tokens=NEW)
            assert result.stats.method == "mtp-drafter"
            assert result.options.num_assistant_tokens == 4
            assert result.options.num_assistant_tokens_schedule == "constant"
            check_result(result, text)
            if text.compare(result.tokens) == "equal":
                assert result.tokens == text.until(ends)
            stats.append(result.stats)
    assert check_tiny.accepted_per_round(stats) >= 1.5


@pytest.mark.parametrize("exact", [False, True])
def test_a_trace_changes_nothing(folder: Path, exact: bool) -> None:
    """Its alternatives need logits where the argmax would do; its texts are the text."""
    with specrun.load(folder, exact=exact) as engine:
        for method in ("plain", "prompt-lookup", "mtp-drafter"):
            given: dict[str, Any] = {"max_new_tokens": 64, "method": method}
            want = engine.generate(PROMPTS[12], **given)
            recorder = Recorder()
            got = engine.generate(PROMPTS[12], logprobs=5, on_round=recorder, **given)
            assert got.tokens == want.tokens
            found = recorder.trace(engine, got)
            assert "".join(token.text for token in found.tokens) == want.text
            assert [token.top[0][0] for token in found.tokens] == want.tokens
            assert sum(len(done.rejected) for done in found.rounds) == want.stats.rejected


def test_the_dialect_of_tensorrt(
    folder: Path, texts: list[Text], once: Callable[..., Path]
) -> None:
    """The same tokens, and as many of the drafts accepted, round by round."""

    def export(path: Path) -> None:
        check_tiny.export(path / "engines", backend="tensorrt-rtx", check=False)

    fixed = once("gemma4-tiny-tensorrt", export) / "engines"
    with specrun.load(folder) as ours, specrun.load(fixed) as theirs:
        for index in SOME:
            for method in ("plain", "prompt-lookup", "mtp-drafter"):
                how = Setting(method, "constant", 0 if method == "plain" else 4).options()
                want = ours.generate(texts[index].prompt, max_new_tokens=NEW, **how)
                got = theirs.generate(texts[index].prompt, max_new_tokens=NEW, **how)
                check_result(got, texts[index])
                assert got.tokens == want.tokens
                assert got.stats.accepted_by_round == want.stats.accepted_by_round
