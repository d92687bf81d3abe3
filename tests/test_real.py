"""Real weights: exported with parity, and greedy texts that are transformers' own.

transformers looks at a whole text in one forward pass: every token must be the argmax of what is
before it, which is greedy decoding by induction, and takes a tenth of the time of ``generate``.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import fetch_models

import specrun
from specexport import exporter
from specexport.sources import Source, resolve
from specrun.contract import Role

pytestmark = [pytest.mark.real, pytest.mark.slow]

NEW = 64
TIE = 1e-4
WINDOW = 512  # of Gemma 3's sliding layers
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Ingredients: flour, butter, sugar, eggs.\n\n1.",
    "A, B, C, A, B, C, A, B, C,",
    "Die Hauptstadt von Deutschland ist",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name":',
    "The theory of relativity says that",
    # Longer than the window: documentation, with text and code that comes back.
    f"{json.__doc__}\n\n",
    f"{argparse.__doc__}\n\n",
)


@dataclass(frozen=True)
class Real:
    """A model as engines, and in transformers. ``path``: its file."""

    name: str
    path: Path
    engine: specrun.Engine
    reference: Any


@pytest.fixture(params=list(fetch_models.MODELS))
def real(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Real]:
    name: str = request.param
    try:
        path = fetch_models.fetch(name)
    except fetch_models.FetchError as error:
        pytest.skip(str(error))
    source = resolve(path)
    reference = source.load_reference()
    # The export compares with transformers too; a second copy would take its time.
    monkeypatch.setattr(Source, "load_reference", lambda self, dtype=None: reference)
    exporter.export(source, None, tmp_path / "engines")
    with specrun.load(tmp_path / "engines") as engine:
        yield Real(name, path, engine, reference)


def check_greedy(real: Real, prompt: list[int], tokens: list[int]) -> None:
    """Every one of ``tokens`` is what transformers finds most probable; a tie is shown."""
    ids = torch.tensor([prompt + tokens[:-1]])
    with torch.no_grad():
        logits = real.reference(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    gaps = logits.max(dim=1).values - chosen
    assert float(gaps.max()) <= TIE, f"token {int(gaps.argmax())} of {real.name}"
    if float(gaps.max()) > 0:
        warnings.warn(f"{real.name}: {int((gaps > 0).sum())} ties", stacklevel=2)


def check_manifest(real: Real) -> None:
    """Compared with the whole model, its whole context, its windows."""
    made = real.engine.manifest
    assert made.parity is not None
    assert made.parity.scope == "whole model"
    assert made.parity.worst_error <= 1e-4
    assert made.generation.max_context == real.reference.config.max_position_embeddings
    windows = {kv.window for kv in made.engines[Role.TARGET].kv}
    assert windows == ({None, WINDOW} if "gemma" in real.name else {None})


def test_real_model(real: Real) -> None:
    """Plain decoding is transformers', and prompt lookup is plain decoding."""
    check_manifest(real)
    longer, accepted = 0, 0
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": [], "raw": True}
    for prompt in PROMPTS:
        ids = real.engine.encode(prompt, specrun.GenerateOptions(raw=True))
        longer += len(ids) > WINDOW
        plain = real.engine.generate(prompt, method="plain", **options)
        assert len(plain.tokens) == NEW
        check_greedy(real, ids, plain.tokens)
        looked = real.engine.generate(prompt, method="prompt-lookup", strict=True, **options)
        accepted += looked.stats.accepted
        if looked.tokens != plain.tokens:
            check_greedy(real, ids, looked.tokens)
    assert longer >= 2
    assert accepted > NEW
    check_pytorch(real, options)


def check_pytorch(real: Real, options: dict[str, Any]) -> None:
    """With PyTorch in place of the engine the tokens are the same."""
    folder, checkpoint = real.engine.folder, str(real.path)
    with specrun.load(folder, verify="torch", target=checkpoint) as by_torch:
        for prompt in PROMPTS[:3]:
            for method in ("plain", "prompt-lookup"):
                want = real.engine.generate(prompt, method=method, **options)
                got = by_torch.generate(prompt, method=method, strict=True, **options)
                assert got.stats.torch_steps == got.stats.target_steps > 0
                if got.tokens != want.tokens:  # at a tie
                    ids = real.engine.encode(prompt, specrun.GenerateOptions(raw=True))
                    check_greedy(real, ids, got.tokens)
