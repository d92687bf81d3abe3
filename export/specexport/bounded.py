"""An engine opened in little memory: on its weights as they are mapped, products in pieces.

Without ONNX Runtime's own packed copy of the weights (``session.disable_prepacking``), MatMulNBits
unpacks a whole matrix to float32 for every run: 5.6 GB for the head of Gemma 4 31B. So that only a
piece is unpacked at a time, such products are cut along the rows of their matrix::

    x @ W^T = [x @ W[:n]^T, x @ W[n:2n]^T, ...]

The pieces are ranges of the same data file. Activations stay float32 then, so results are a little
better than those of the engine as it is meant to run.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

PIECE_BYTES = 64 << 20  # of a matrix in float32
PRODUCT = "MatMulNBits"


@contextlib.contextmanager
def engine_in_pieces(path: Path) -> Iterator[Path]:
    """A copy of the graph file beside ``path`` with large products in pieces, for opening.

    ``path`` itself where there is nothing to cut, or its folder cannot be written to.
    """
    model = ir.load(path)
    if not cut(model):
        yield path
        return
    try:
        number, name = tempfile.mkstemp(suffix=".onnx", prefix=".", dir=path.parent)
    except OSError:
        yield path
        return
    os.close(number)
    try:
        ir.save(model, name)
        yield Path(name)
    finally:
        Path(name).unlink()


def cut(model: ir.Model, piece_bytes: int = PIECE_BYTES) -> bool:
    """Cut the products of ``model`` whose matrix takes more than ``piece_bytes`` as float32.

    In place; returns whether there were any. Requires: matrices in an external file.
    """
    nodes = [node for node in model.graph.all_nodes() if node.op_type == PRODUCT]
    large = [node for node in nodes if _rows(node) * _columns(node) * 4 > piece_bytes]
    for node in large:
        _cut(model, node, max(1, piece_bytes // (4 * _columns(node))))
    return bool(large)


def _cut(model: ir.Model, node: ir.Node, step: int) -> None:
    owner = node.graph
    assert isinstance(owner, ir.Graph)
    rows, pieces, outputs = _rows(node), [], []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        parts = [_part(model, value, start, stop) for value in node.inputs[1:]]
        attributes: dict[str, Any] = {a.name: a.value for a in node.attributes.values()}
        piece = ir.node(
            PRODUCT, [node.inputs[0], *parts], attributes | {"N": stop - start}, domain=node.domain
        )
        piece.outputs[0].name = f"{node.outputs[0].name}.{start}"
        pieces.append(piece)
        outputs.append(piece.outputs[0])
    whole = ir.node("Concat", outputs, {"axis": -1})
    old, new = node.outputs[0], whole.outputs[0]
    new.shape, new.type, new.name = old.shape, old.type, old.name
    old.name = None
    owner.insert_before(node, [*pieces, whole])
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    owner.remove(node, safe=True)


def _part(model: ir.Model, value: ir.Value | None, start: int, stop: int) -> ir.Value | None:
    """Rows ``start:stop`` of an initializer, a range of the file that it stands in."""
    if value is None:
        return None
    tensor = value.const_value
    name = f"{value.name}.{start}"
    if isinstance(tensor, ir.ExternalTensor) and name not in model.graph.initializers:
        assert tensor.offset is not None and tensor.length is not None
        rows, *rest = tensor.shape.numpy()
        row_bytes = tensor.length // rows
        part = ir.ExternalTensor(
            tensor.location,
            tensor.offset + start * row_bytes,
            (stop - start) * row_bytes,
            tensor.dtype,
            shape=ir.Shape([stop - start, *rest]),
            name=name,
            base_dir=tensor.base_dir,
        )
        model.graph.initializers[name] = ir.Value(
            name=name, shape=part.shape, type=ir.TensorType(tensor.dtype), const_value=part
        )
    return model.graph.initializers[name]


def _rows(node: ir.Node) -> int:
    return node.attributes["N"].as_int()


def _columns(node: ir.Node) -> int:
    return node.attributes["K"].as_int()
