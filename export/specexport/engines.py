"""Writes a traced graph as an engine file whose tensors stand in the folder's data file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specexport import heap
from specexport.datafile import DATA_FILE, DataFile, Range, alignment
from specexport.errors import ExportError
from specexport.made import Sources, key, write
from specgraphs import experts
from specgraphs.engine_graph import EngineGraph
from specrun.contract import DType, TensorSpec
from specrun.manifest import REEXPORT

_DTYPES = {
    "FLOAT": DType.FLOAT32,
    "FLOAT16": DType.FLOAT16,
    "BFLOAT16": DType.BFLOAT16,
    "INT64": DType.INT64,
    "INT32": DType.INT32,
}
INLINE_BELOW = 1024  # bytes; smaller values stand in the graph file itself


def bytes_to_write(graphs: Iterable[EngineGraph], sources: Sources) -> int:
    """Bytes that the data file will hold, without alignment."""
    return sum(_sizes(graphs, sources))


def room_to_write(graphs: Iterable[EngineGraph], sources: Sources) -> int:
    """Bytes that the data file will have at most, with alignment."""
    return sum(size + alignment(size) for size in _sizes(graphs, sources))


def _sizes(graphs: Iterable[EngineGraph], sources: Sources) -> list[int]:
    """Of everything that :func:`write_engine` writes to the data file, once each."""
    seen: dict[tuple[str, ...], int] = {}
    for graph in graphs:
        for name, value in graph.model.graph.initializers.items():
            if name in graph.made:
                stored = key(graph.made[name], sources)
            elif _size(value) < INLINE_BELOW:
                continue
            elif name in graph.weights:
                same = sources.canonical(graph.weights[name])
                stored = (same.origin, same.label)
            else:
                stored = _content(_constant(graph, name, value))
            seen[(*stored, str(value.dtype))] = _size(value)
    return list(seen.values())


def _constant(graph: EngineGraph, name: str, value: ir.Value) -> NDArray[Any]:
    """A value that is in the graph already, or with it."""
    if name in graph.constants:
        return graph.constants[name]
    assert value.const_value is not None, name
    return value.const_value.numpy()


def step_bytes(graph: EngineGraph) -> int:
    """Bytes of weights that a run of one row reads: all but tables, of which it reads a few rows,
    and of experts those that the row is routed to.
    """
    total = 0.0
    for value in graph.model.graph.initializers.values():
        users = [use.node for use in value.uses()]
        if any(node.op_type not in ("Gather", "GatherBlockQuantized") for node in users):
            total += _size(value) * max(map(experts.share_of_steps, users))
    return round(total)


def write_engine(
    graph: EngineGraph,
    path: Path,
    data: DataFile,
    sources: Sources,
    *,
    inline_below: int = INLINE_BELOW,
) -> None:
    """Write ``graph`` to ``path``, its large tensors to ``data`` in the same folder.

    The tensors stream through in pieces; no checkpoint is held.
    """
    initializers = graph.model.graph.initializers
    for name, ref in graph.weights.items():
        same = sources.canonical(ref)
        _store(
            initializers[name], (same.origin, same.label), data, sources.rows(same), inline_below
        )
    for name, made in graph.made.items():
        value = initializers[name]
        assert value.dtype is not None
        _refer(value, write(made, value.dtype.numpy(), data, sources), data)
        heap.give_back()
    for name, array in graph.constants.items():
        # The same name may stand for other values in another engine, so its bytes are the key.
        _store(initializers[name], _content(array), data, iter([array]), inline_below)
    for value in initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) and tensor is not None:
            array = tensor.numpy()
            _store(value, _content(array), data, iter([array]), inline_below)
    ir.save(graph.model, path)


def _content(array: NDArray[Any]) -> tuple[str, str]:
    return ("constant", hashlib.sha256(np.ascontiguousarray(array).data).hexdigest())


def _store(
    value: ir.Value,
    name: tuple[str, str],
    data: DataFile,
    chunks: Iterator[NDArray[Any]],
    inline_below: int,
) -> None:
    assert value.dtype is not None and value.shape is not None, value
    dtype = value.dtype.numpy()
    if _size(value) < inline_below:
        whole = np.concatenate([np.atleast_1d(chunk) for chunk in chunks])
        array = whole.astype(dtype).reshape(value.shape.numpy())
        value.const_value = ir.Tensor(array, name=value.name)
        return
    _refer(value, data.add(name, dtype, _size(value), chunks), data)


def _refer(value: ir.Value, place: Range, data: DataFile) -> None:
    assert value.dtype is not None and value.shape is not None
    value.const_value = ir.ExternalTensor(
        DATA_FILE,
        place.offset,
        place.length,
        value.dtype,
        shape=value.shape,
        name=value.name or "",
        base_dir=data.path.parent,
    )


def _size(value: ir.Value) -> int:
    assert value.dtype is not None and value.shape is not None, value
    return math.prod(value.shape.numpy()) * value.dtype.bitwidth // 8


def declared_io(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a written engine, read back from its file, in file order."""
    try:
        graph = ir.load(path).graph
    except Exception as error:  # the library raises what it likes
        raise ExportError(
            f"{path}: no ONNX graph: {type(error).__name__}: {error}", hint=REEXPORT
        ) from error
    return (
        tuple(_spec(value, path) for value in graph.inputs),
        tuple(_spec(value, path) for value in graph.outputs),
    )


def _spec(value: ir.Value, path: Path) -> TensorSpec:
    if value.shape is None or value.dtype is None:
        raise ExportError(f"{path.name}: {value.name} has no declared shape")
    dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    dtype = _DTYPES.get(value.dtype.name)
    if dtype is None:
        raise ExportError(f"{path.name}: {value.name} has dtype {value.dtype.name}")
    return TensorSpec(value.name or "", dtype, dims)
