"""C76: engines in fp16 hold no number that fp16 does not have, and large activations stay finite.

That a first answer which is not finite makes PyTorch stand in is shown in ``test_verification``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

pytest.importorskip("torch")

import tiny_models
import torch
from exported import Exported, Pair, forward, pair_params, prompt_of
from transformers import PreTrainedModel

from specexport import exporter
from specexport.numbers import relative_error
from specexport.options import ExportOptions
from specexport.sources import resolve
from specrun.contract import TARGET_ENGINE
from specrun.manifest import read
from specrun.ort import open_session
from specrun.target import Target

LARGEST = float(np.finfo(np.float16).max)
PAIRS = pair_params(("llama", None), ("gemma4-e2b", "assistant-plain"))
IN_FLOAT32 = {"RMSNormalization", "LayerNormalization"}  # say so in an attribute
# ONNX Runtime's own: softmax and norm are computed in float32 inside.
INSIDE = {"GroupQueryAttention", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization"}


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those of its loops and branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def constants(graph: onnx.GraphProto) -> Iterator[tuple[str, Any]]:
    """Weights and constants by name."""
    for part in graphs(graph):
        for tensor in part.initializer:
            yield tensor.name, numpy_helper.to_array(tensor)
        for node in part.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield node.output[0], numpy_helper.to_array(attribute.t)


@pytest.mark.parametrize("pair", PAIRS)
def test_no_number_that_half_has_not(exported_pair: Callable[..., Exported], pair: Pair) -> None:
    made = exported_pair(pair, "fp16")
    for engine in made.manifest.engines.values():
        graph = onnx.load(made.folder / engine.file).graph
        halves = [(n, a) for n, a in constants(graph) if a.dtype == np.float16 and a.size]
        assert halves
        for name, array in halves:
            assert np.abs(array.astype(np.float32)).max() < LARGEST, name
            assert array.min() > -1e4, f"{name} looks like a mask"


@pytest.mark.parametrize("pair", PAIRS)
def test_norms_and_softmax_in_float32(exported_pair: Callable[..., Exported], pair: Pair) -> None:
    made = exported_pair(pair, "fp16")
    for engine in made.manifest.engines.values():
        nodes = [
            node
            for part in graphs(onnx.load(made.folder / engine.file).graph)
            for node in part.node
            if node.op_type == "Softmax" or "Normalization" in node.op_type
        ]
        assert nodes
        for node in nodes:
            if node.op_type in INSIDE:
                continue
            assert node.op_type in IN_FLOAT32, node.op_type
            stash = [a.i for a in node.attribute if a.name == "stash_type"]
            assert stash in ([], [onnx.TensorProto.FLOAT]), node.name


def test_large_activations_are_finite(tmp_path: Path) -> None:
    """Embeddings a hundred times as large: so are all that norms read."""
    checkpoint = tiny_models.save("qwen3", tmp_path)
    model: PreTrainedModel = resolve(checkpoint).load_reference()
    with torch.no_grad():
        model.get_input_embeddings().weight *= 100
    model.save_pretrained(checkpoint)
    options = ExportOptions(precision="fp16", check=False)
    exporter.export(resolve(checkpoint), None, tmp_path / "engines", options)
    spec = read(tmp_path / "engines").engines[TARGET_ENGINE]
    session = open_session(tmp_path / "engines" / spec.file, spec, threads=1)
    tokens = prompt_of(40)
    rows = Target(session, spec, max_context=64).verify(np.array([tokens]), want_logits=True)
    assert rows.logits is not None and np.isfinite(rows.logits).all()
    assert np.isfinite(rows.hidden).all() and np.isfinite(rows.margin).all()
    assert relative_error(rows.logits[0], forward(model, tokens)[0]) < 2e-2
