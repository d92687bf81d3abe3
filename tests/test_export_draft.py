"""Draft models in an engine folder: which method they are for, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizers
import transformers
from test_universal import byte_level

import specrun
from specexport import exporter
from specexport.errors import ParityError
from specexport.parts.draft_model import TOKENIZER, DraftModel, DraftRun, same_tokenizer
from specexport.sources import resolve


def other_tokenizer(checkpoint: Path) -> Path:
    """Give a checkpoint a tokenizer of its own."""
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    inner = tokenizers.Tokenizer.from_str(byte_level()._tokenizer.to_str())
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    own.save_pretrained(checkpoint)
    return checkpoint


def check_text(folder: Path, method: specrun.options.Method) -> specrun.Stats:
    """Greedy drafting changes nothing. Returns its statistics."""
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_ids": [], "raw": True}
    with specrun.load(folder, threads=1) as engine:
        plain = engine.generate("Some words, ", method="plain", **options)
        drafted = engine.generate("Some words, ", method=method, strict=True, **options)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.method == method
        stats: specrun.Stats = drafted.stats
        return stats


def test_same_tokenizer(tmp_path: Path) -> None:
    """Padding and added tokens make no other tokenizer; other words do."""
    one, two = (tiny_models.save(name, tmp_path) for name in ("llama", "gemma3"))
    assert same_tokenizer(one, two)
    padded = transformers.AutoTokenizer.from_pretrained(two)
    padded.add_tokens(["<more>", "<padding>"])
    padded.save_pretrained(two)
    assert same_tokenizer(one, two) and same_tokenizer(two, one)
    other_tokenizer(two)
    assert not same_tokenizer(one, two) and not same_tokenizer(two, one)


def test_the_same_model_drafts(tmp_path: Path) -> None:
    """Every draft is right, so the weights, the KV and the positions are."""
    paths = [tiny_models.save("llama", tmp_path / part) for part in ("target", "draft")]
    target, draft = (resolve(path) for path in paths)
    made = exporter.export(target, [draft], tmp_path / "engines")
    assert list(made.drafters) == ["draft"]
    drafter = made.drafters["draft"]
    assert (drafter.engines, drafter.tokenizer) == (("draft",), None)
    assert drafter.max_context == tiny_models.CONTEXT
    assert made.parity is not None
    assert {case.tensor for case in made.parity.cases} >= {"logits", "draft_model_logits"}
    assert check_text(tmp_path / "engines", "draft").acceptance == 1.0


def test_another_tokenizer(tmp_path: Path) -> None:
    target = resolve(tiny_models.save("llama", tmp_path))
    draft = resolve(other_tokenizer(tiny_models.save("gemma3", tmp_path)))
    made = exporter.export(target, [draft], tmp_path / "engines")
    drafter = made.drafters["universal"]
    assert drafter.tokenizer is not None
    assert (drafter.tokenizer.file, drafter.tokenizer.chat_template) == (TOKENIZER, None)
    assert drafter.tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert not drafter.tokenizer.add_bos
    assert made.parity is not None
    own = [case for case in made.parity.cases if case.engine == "universal"]
    # Its own sliding window is crossed, which the target does not have.
    assert max(case.past_length for case in own) > tiny_models.WINDOW + 8
    assert check_text(tmp_path / "engines", "universal").drafted > 0
    report = exporter.recheck(tmp_path / "engines", target, [draft])
    assert report.worst_error == pytest.approx(made.parity.worst_error, rel=0.5)


def test_wrong_results_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = DraftModel.reference

    def wrong(self: DraftModel, run: Any) -> DraftRun:
        seen = right(self, run)
        seen.logits[max(seen.logits)][:] += 0.1
        return seen

    monkeypatch.setattr(DraftModel, "reference", wrong)
    paths = [tiny_models.save("llama", tmp_path / part) for part in ("target", "draft")]
    target, draft = (resolve(path) for path in paths)
    with pytest.raises(ParityError, match=r"draft\.draft_model_logits differs from transformers"):
        exporter.export(target, [draft], tmp_path / "engines")
    assert not (tmp_path / "engines").exists()
