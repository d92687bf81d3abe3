"""Writes a traced graph as an engine file whose tensors stand in the folder's data file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specexport.datafile import CHUNK_BYTES, DATA_FILE, DataFile
from specexport.errors import ExportError
from specexport.weights import Weights
from specgraphs.engine_graph import EngineGraph
from specrun.contract import DType, TensorSpec

INLINE_BELOW = 1024  # bytes; smaller values stand in the graph file itself


def bytes_to_write(graphs: Iterable[EngineGraph], weights: Mapping[str, Weights]) -> int:
    """Bytes that the data file will hold, without alignment."""
    seen: dict[tuple[str, str, str], int] = {}
    for graph in graphs:
        for name, ref in graph.weights.items():
            value = graph.model.graph.initializers[name]
            key = (ref.origin, weights[ref.origin].canonical(ref.name), str(value.dtype))
            seen[key] = _size(value)
    return sum(seen.values())


def write_engine(
    graph: EngineGraph,
    path: Path,
    data: DataFile,
    weights: Mapping[str, Weights],
    *,
    inline_below: int = INLINE_BELOW,
) -> None:
    """Write ``graph`` to ``path``, its large tensors to ``data`` in the same folder.

    ``weights``: per origin. The tensors stream through in pieces; no checkpoint is held.
    """
    initializers = graph.model.graph.initializers
    for name in list(graph.weights):
        ref = graph.weights[name]
        source = weights[ref.origin]
        canonical = source.canonical(ref.name)
        _store(
            initializers[name],
            (ref.origin, canonical),
            data,
            source.chunks(canonical, CHUNK_BYTES),
            inline_below,
        )
    for name, array in graph.constants.items():
        # The same module attribute may differ between engines, so the file name is in the key.
        _store(initializers[name], (path.name, name), data, iter([array]), inline_below)
    for value in initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) and tensor is not None:
            _store(value, (path.name, f"{value.name}"), data, iter([tensor.numpy()]), inline_below)
    ir.save(graph.model, path)


def _store(
    value: ir.Value,
    key: tuple[str, str],
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
    place = data.add(key, dtype, _size(value), chunks)
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
    graph = ir.load(path).graph
    return (
        tuple(_spec(value, path) for value in graph.inputs),
        tuple(_spec(value, path) for value in graph.outputs),
    )


def _spec(value: ir.Value, path: Path) -> TensorSpec:
    if value.shape is None or value.dtype is None:
        raise ExportError(f"{path.name}: {value.name} has no declared shape")
    dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    names = {"FLOAT": DType.FLOAT32, "FLOAT16": DType.FLOAT16, "INT64": DType.INT64}
    dtype = {**names, "INT32": DType.INT32}.get(value.dtype.name)
    if dtype is None:
        raise ExportError(f"{path.name}: {value.name} has dtype {value.dtype.name}")
    return TensorSpec(value.name or "", dtype, dims)
