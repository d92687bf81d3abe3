"""Tiny pairs as engine folders, and what transformers says about the same weights.

The reference is the model as built by code, never what was exported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from drafting import KnownText
from numpy.typing import NDArray

import specrun
from specexport import exporter
from specexport.options import ExportOptions
from specexport.sources import Source, resolve_pair
from specrun import manifest as manifests
from specrun.contract import Role
from specrun.manifest import EngineSpec, Manifest, Precision
from specrun.ort import OrtSession, open_session
from specrun.target import Target

TIE = 1e-4  # two tokens tie where transformers' own logits are this close
NUM_DRAFT = 8
ENGINES = "engines"  # folder beside the checkpoints
Pair = tuple[str, str | None]


@dataclass(frozen=True)
class Exported:
    """An engine folder with the checkpoints it came from."""

    pair: Pair
    folder: Path
    manifest: Manifest
    target_path: Path
    drafter_path: Path | None

    @property
    def sources(self) -> tuple[Source, Source | None]:
        """The checkpoints, resolved."""
        return resolve_pair(self.target_path, self.drafter_path)

    @property
    def spec(self) -> EngineSpec:
        """The target engine as the manifest has it."""
        return self.manifest.engines[Role.TARGET]

    @property
    def drafting_methods(self) -> tuple[str, ...]:
        """Every method but plain decoding that the folder offers."""
        return ("prompt-lookup",) if self.pair[1] is None else ("prompt-lookup", "mtp-drafter")

    def open(self, **options: Any) -> specrun.Engine:
        """The folder through the public API."""
        return specrun.load(self.folder, threads=1, **options)

    def session(self, name: str) -> OrtSession:
        """A session of one engine, checked against the manifest."""
        spec = self.manifest.engines[name]
        session = open_session(self.folder / spec.file, spec, threads=1)
        assert isinstance(session, OrtSession)
        return session

    def open_target(self, **options: Any) -> Target:
        """The target engine alone, for what the API does not show: logits and hidden rows."""
        context = {"max_context": self.manifest.generation.max_context} | options
        return Target(self.session(Role.TARGET), self.spec, **context)


def make(
    pair: Pair,
    folder: Path,
    precision: Precision = "fp32",
    options: ExportOptions | None = None,
    *,
    check: bool = True,
) -> Exported:
    """Save the checkpoints of ``pair`` under ``folder`` and export them to ``folder / engines``."""
    paths = [tiny_models.save(name, folder) for name in pair if name]
    options = options or ExportOptions(precision=precision, num_draft=NUM_DRAFT, check=check)
    exporter.export(*resolve_pair(*paths), folder / ENGINES, options)
    return read(pair, folder)


def read(pair: Pair, folder: Path) -> Exported:
    """What ``make`` made in ``folder``."""
    target, drafter = pair
    return Exported(
        pair=pair,
        folder=folder / ENGINES,
        manifest=manifests.read(folder / ENGINES),
        target_path=folder / target,
        drafter_path=None if drafter is None else folder / drafter,
    )


def name_of(pair: Pair) -> str:
    """A pair as a test id and a folder name."""
    return "-".join(part for part in pair if part)


def pair_params(*pairs: Pair) -> list[Any]:
    """Parameters for a test over ``pairs`` (default: all)."""
    return [pytest.param(pair, id=name_of(pair)) for pair in pairs or tiny_models.PAIRS]


@functools.cache
def reference(name: str) -> Any:
    """The transformers model ``name`` in fp32, with no end id."""
    model = tiny_models.build(name)
    model.generation_config.eos_token_id = None
    return model


@dataclass(frozen=True)
class Greedy:
    """transformers' greedy continuation: ``tokens``, and ``logits`` ``[count, vocabulary]``."""

    tokens: list[int]
    logits: NDArray[np.float32]


def greedy(model: Any, prompt: Sequence[int], count: int) -> Greedy:
    """``generate`` with its own cache."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    assert len(tokens) == count
    return Greedy(tokens, torch.cat(out.logits).numpy())


def forward(model: Any, tokens: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits and last hidden state of every position, in one pass without a cache."""
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


@functools.cache
def known_text(name: str, prompt: tuple[int, ...], count: int) -> KnownText:
    """What transformers says after ``prompt``, with its hidden rows, for scripted drafters."""
    model = reference(name)
    new = greedy(model, prompt, count).tokens
    hidden = forward(model, [*prompt, *new])[1]
    return KnownText([*prompt, *new], len(prompt), int(model.config.vocab_size), hidden)


def same_tokens(got: Sequence[int], want: Greedy) -> None:
    """Assert equality. A tie in the reference may fall either way; it is shown as a warning."""
    assert len(got) == len(want.tokens)
    for index, (ours, theirs) in enumerate(zip(got, want.tokens, strict=True)):
        if ours != theirs:
            row = want.logits[index]
            gap = float(row[theirs] - row[ours])
            message = f"token {index}: {ours} instead of {theirs}, reference logits differ by {gap}"
            assert gap <= TIE, message
            warnings.warn(f"a tie: {message}", stacklevel=2)
            return  # from here on the texts are different ones


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random byte tokens."""
    ids: list[int] = np.random.default_rng(1000 * seed + length).integers(0, 256, length).tolist()
    return ids
