"""The engine of a Gemma 4 assistant, tiny: how it draws, and from what.

That its logits are those of transformers for greedy drafts is checked in test_architectures.py.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
from drafted import check_candidates, draft, reference_draft
from exported import NUM_DRAFT, Exported, Pair, pair_params, prompt_of, read, reference
from numpy.typing import NDArray

from specexport import exporter
from specexport.options import ExportOptions
from specexport.sources import resolve_pair
from specrun import contract
from specrun.contract import MTP_DRAFTER_ENGINE
from specrun.target import Target

pytestmark = pytest.mark.slow

ExportedPair = Callable[..., Exported]

PLAIN: Pair = ("gemma4-e2b", "assistant-plain")
CENTROID: Pair = ("gemma4-e2b", "assistant-centroid")
LENGTH = 12


def start(made: Exported, tokens: list[int]) -> tuple[Target, int, NDArray[Any]]:
    """A target that has read ``tokens[:LENGTH]``, the next token, and the hidden row before it."""
    target = made.open_target()
    hidden = target.prefill(np.array([tokens[:LENGTH]])).hidden[0, -1].copy()
    return target, tokens[LENGTH], hidden


@pytest.mark.parametrize("pair", pair_params(PLAIN, CENTROID))
def test_noise_decides(exported_pair: ExportedPair, pair: Pair) -> None:
    """Each step takes the largest of logits and its own noise, and goes on from there."""
    made = exported_pair(pair)
    tokens = prompt_of(25)
    run_from = start(made, tokens)
    silent = draft(made, *run_from, NUM_DRAFT)
    shape = silent[contract.DRAFT_LOGITS].shape
    for seed in range(5):
        noise = np.random.default_rng(seed).gumbel(size=shape).astype("f4")
        got = draft(made, *run_from, NUM_DRAFT, noise)
        logits, ids = got[contract.DRAFT_LOGITS], got[contract.DRAFT_CANDIDATES]
        best = (logits + noise).argmax(axis=2)
        drafts = got[contract.DRAFT_TOKENS]
        np.testing.assert_array_equal(drafts, np.take_along_axis(ids, best[..., None], 2)[..., 0])
        assert drafts.tolist() != silent[contract.DRAFT_TOKENS].tolist()
        forced: list[int] = drafts[0].tolist()
        check_candidates(made, got, reference_draft(pair, tokens, LENGTH, NUM_DRAFT, forced)[1])
        np.testing.assert_array_equal(logits[0, 0], silent[contract.DRAFT_LOGITS][0, 0])


@pytest.mark.parametrize("pair", pair_params(PLAIN, CENTROID))
def test_equal_candidates(exported_pair: ExportedPair, pair: Pair, tmp_path: Path) -> None:
    """Of equal logits the first counts, as for an argmax: the lowest id, or the first that the
    selected clusters list."""
    made = exported_pair(pair)
    folder = tmp_path / "engines"
    shutil.copytree(made.folder, folder)
    path = folder / made.manifest.engines[MTP_DRAFTER_ENGINE].file
    model = ir.load(path)
    loop = next(node for node in model.graph if node.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    top = next(n for n in reversed(list(body)) if n.op_type == "TopK")
    scored = top.inputs[0]
    assert scored is not None
    # All logits of a step rounded to whole numbers: plenty of ties.
    rounded = ir.node("Round", [scored])
    rounded.outputs[0].name = "rounded"
    body.insert_before(top, rounded)
    top.replace_input_with(0, rounded.outputs[0])
    ir.save(model, path)
    tokens = prompt_of(25)
    run_from = start(made, tokens)
    changed = dataclasses.replace(made, folder=folder)
    got = draft(changed, *run_from, 1)
    logits, ids = got[contract.DRAFT_LOGITS][0, 0], got[contract.DRAFT_CANDIDATES][0, 0]
    assert logits[0] == logits[1]
    assert got[contract.DRAFT_TOKENS][0, 0] == ids[0]
    # The order in which the ids stood before TopK.
    place = np.arange(384)
    if pair == CENTROID:
        place = np.argsort(selected_clusters(pair, tokens))
    for value in np.unique(logits):
        assert (np.diff(place[ids[logits == value]]) > 0).all()


def selected_clusters(pair: Pair, tokens: list[int]) -> NDArray[np.int64]:
    """All tokens, those of the clusters first that the reference selects in its first step."""
    import torch

    embedder = reference(str(pair[1])).masked_embedding
    seen: list[NDArray[np.int64]] = []

    def watch(_: Any, __: Any, scores: torch.Tensor) -> None:
        clusters = scores.topk(embedder.centroid_intermediate_top_k).indices.flatten()
        order = embedder.token_ordering.view(embedder.num_centroids, -1)
        seen.append(order[clusters].flatten().numpy())

    handle = embedder.centroids.register_forward_hook(watch)
    reference_draft(pair, tokens, LENGTH, 1)
    handle.remove()
    rest = np.setdiff1d(np.arange(384), seen[0])
    return np.concatenate([seen[0], rest])


@pytest.mark.parametrize("drafter", ["assistant-plain", "assistant-centroid"])
def test_tokens_that_the_tokenizer_does_not_have(tmp_path: Path, drafter: str) -> None:
    """A padded vocabulary: no such token is a candidate, so none is drafted, whatever the noise;
    the export compares with the reference among the others."""
    known = 300
    paths = [tiny_models.save(name, tmp_path) for name in ("gemma4-e2b", drafter)]
    for path in paths:
        tiny_models.tokenizer(known).save_pretrained(path)
    options = ExportOptions(num_draft=NUM_DRAFT)
    exporter.export(*resolve_pair(*paths), tmp_path / "engines", options)
    pair = ("gemma4-e2b", drafter)
    made = read(pair, tmp_path)
    assert made.manifest.tokenizer.vocab_size == known
    run_from = start(made, prompt_of(25))
    shape = draft(made, *run_from, NUM_DRAFT)[contract.DRAFT_LOGITS].shape
    unknown = 0
    for seed in range(20):
        noise = 5 * np.random.default_rng(seed).gumbel(size=shape).astype("f4")
        got = draft(made, *run_from, NUM_DRAFT, noise)
        logits, ids = got[contract.DRAFT_LOGITS], got[contract.DRAFT_CANDIDATES]
        assert (got[contract.DRAFT_TOKENS] < known).all()
        np.testing.assert_array_equal(np.isneginf(logits), ids >= known)
        assert (np.diff(logits, axis=2)[np.isfinite(logits[..., 1:])] <= 0).all()
        unknown += int((ids >= known).sum())
    # A plain head leaves them out; a cluster holds them, and they are marked.
    assert (unknown > 0) is (drafter == "assistant-centroid")
