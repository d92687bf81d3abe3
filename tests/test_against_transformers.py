"""Assisted generation of transformers and ours, method by method, on the same tiny weights.

Greedy tokens are equal. Drafts are compared behind every prefix that both drafted from:
transformers drafts behind the prompt, ours behind the first token, so rounds need not coincide. MTP
layers and early exit are compared in test_mtp_layers and test_early_exit, the drafts of prompt
lookup in test_ngram. Universal drafts are cut to whole tokens in different ways.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from exported import Exported, Pair, greedy, pair_params, prompt_of, reference, same_tokens
from test_export_draft import other_tokenizer
from transformers import AutoTokenizer
from transformers.generation import candidate_generator as theirs

import specrun
from specexport import exporter
from specexport.options import ExportOptions
from specexport.sources import resolve_pair
from specrun.loop import Round

ExportedPair = Callable[..., Exported]
Drafts = dict[int, list[int]]  # length of the prefix -> what was drafted behind it
COUNT, DRAFT = 40, 4


@pytest.fixture
def drafted_by_transformers(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """What transformers' candidate generators propose from now on."""
    seen: Drafts = {}

    def watch(kind: Any) -> None:
        original = kind.get_candidates

        def get_candidates(self: Any, input_ids: Any, **options: Any) -> Any:
            found = original(self, input_ids, **options)
            length = input_ids.shape[1]
            seen[length] = found[0][0, length:].tolist()
            return found

        monkeypatch.setattr(kind, "get_candidates", get_candidates)

    watch(theirs.AssistedCandidateGenerator)
    watch(theirs.PromptLookupCandidateGenerator)
    return seen


def ours(engine: specrun.Engine, prompt: list[int], **options: Any) -> tuple[list[int], Drafts]:
    """Tokens, and what was drafted behind which prefix."""
    rounds: list[Round] = []
    result = engine.generate(
        prompt,
        max_new_tokens=COUNT,
        eos_token_ids=(),
        strict=True,
        on_round=rounds.append,
        **options,
    )
    before = [len(prompt) + 1, *(done.committed_length for done in rounds[:-1])]
    pairs = zip(before, rounds, strict=True)
    return result.tokens, {length: list(done.proposal) for length, done in pairs}


def same_drafts(got: Drafts, want: Drafts) -> None:
    """Equal behind every prefix that both drafted from, as far as both go; there are such."""
    common = [length for length in got if want.get(length) and got[length]]
    assert len(common) >= 3
    for length in common:
        shorter = min(len(got[length]), len(want[length]))
        assert got[length][:shorter] == want[length][:shorter]


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(("llama", "qwen3"), ("gemma3", "llama")))
def test_assistant_model(
    exported_pair: ExportedPair, pair: Pair, drafted_by_transformers: Drafts
) -> None:
    target, assistant = reference(pair[0]), tiny_models.build(pair[1] or "")
    assistant.generation_config.num_assistant_tokens = DRAFT
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    prompt = prompt_of(12)
    ids = torch.tensor([prompt])
    found = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        max_new_tokens=COUNT,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    with exported_pair(pair).open() as engine:
        tokens, drafts = ours(engine, prompt, method="draft", num_assistant_tokens=DRAFT)
        for k in range(9):
            assert ours(engine, prompt, method="draft", num_assistant_tokens=k)[0] == tokens
    same_tokens(tokens, greedy(target, prompt, COUNT))
    assert tokens == found
    same_drafts(drafts, drafted_by_transformers)


@pytest.mark.slow
def test_assistant_tokenizer(tmp_path: Path) -> None:
    paths = [tiny_models.save(name, tmp_path) for name in ("llama", "qwen3")]
    other_tokenizer(paths[1])
    # transformers takes tables of one size for one tokenizer.
    torch.manual_seed(0)
    assistant = tiny_models.build("qwen3")
    assistant.resize_token_embeddings(tiny_models.VOCAB + 16)
    assistant.save_pretrained(paths[1])
    exporter.export(*resolve_pair(*paths), tmp_path / "engines", ExportOptions(check=False))
    target = reference("llama")
    prompt = list(b"Some words, and some more of them.")
    ids = torch.tensor([prompt])
    found = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        tokenizer=AutoTokenizer.from_pretrained(paths[0]),
        assistant_tokenizer=AutoTokenizer.from_pretrained(paths[1]),
        max_new_tokens=COUNT,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    with specrun.load(tmp_path / "engines", threads=1) as engine:
        for k in range(9):
            tokens, _ = ours(engine, prompt, method="universal", num_assistant_tokens=k)
            assert tokens == found


@pytest.mark.slow
@pytest.mark.parametrize("pair", pair_params(("llama", None)))
def test_prompt_lookup(
    exported_pair: ExportedPair, pair: Pair, drafted_by_transformers: Drafts
) -> None:
    """Ours takes the last match where transformers takes the first; a text whose n-grams follow
    each other always the same way has only one answer."""
    target = reference(pair[0])
    prompt = prompt_of(6) * 3
    ids = torch.tensor([prompt])
    found = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        prompt_lookup_num_tokens=DRAFT,
        max_matching_ngram_size=2,
        max_new_tokens=COUNT,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    with exported_pair(pair).open() as engine:
        options: dict[str, Any] = {"method": "prompt-lookup", "num_assistant_tokens": DRAFT}
        tokens, _ = ours(engine, prompt, **options)
    assert tokens == found
    assert any(drafted_by_transformers.values())
