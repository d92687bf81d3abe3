"""Numbers and types: what overflows, what TensorRT does not have, what it narrows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, numpy_helper

from specgraphs.trt_rules.view import (
    HALVES,
    Array,
    View,
    Violation,
    attributes,
    called,
    dtype_name,
    given,
)

LARGEST_HALF = 65504.0
LARGEST_INDEX = 2**31 - 1
LARGEST_K = 3840
CHUNK = 1 << 24  # elements of a weight that are looked at at once
# All ones: infinite, or no number.
EXPONENT: dict[int, int] = {TensorProto.FLOAT16: 0x7C00, TensorProto.BFLOAT16: 0x7F80}
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "ReduceLogSumExp")
NORMS = ("RMSNormalization", "LayerNormalization")
TYPES = {
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.BOOL,
    TensorProto.INT8,
    TensorProto.INT4,
}


def numbers(view: View) -> Iterator[Violation]:
    """Types of all values, constants in range, sums and norms in float32, the k of TopK."""
    yield from _types(view)
    yield from _constants(view)
    for node in view.nodes:
        yield from _precision(view, node)
        yield from _top_k(view, node)
        yield from _narrowed(view, node)


def _types(view: View) -> Iterator[Violation]:
    for name in {*view.types, *view.initializers}:
        dtype = view.dtype(name)
        if dtype and dtype not in TYPES:
            # float64 is taken and computed in float32.
            maker = view.makers.get(name)
            where = called(maker) if maker is not None else name
            message = f"{name!r} is {dtype_name(dtype)}"
            hint = f"use one of {', '.join(sorted(map(dtype_name, TYPES)))}"
            yield Violation(where, "dtype", message, hint)


def _constants(view: View) -> Iterator[Violation]:
    for tensor in view.graph.initializer:
        if tensor.data_type in HALVES and not _finite(view, tensor):
            message = f"{dtype_name(tensor.data_type)} constant that is not finite"
            hint = f"keep it within {LARGEST_HALF:g}; masks are boolean, or float32"
            yield Violation(tensor.name, "half-range", message, hint)
        elif tensor.data_type == TensorProto.INT64:
            yield from _index_range(view, tensor)


def _finite(view: View, tensor: onnx.TensorProto) -> bool:
    ones = EXPONENT[tensor.data_type]
    bits = _bits(view, tensor)
    pieces = (bits[start : start + CHUNK] for start in range(0, bits.size, CHUNK))
    return not any(np.any((piece & ones) == ones) for piece in pieces)


def _bits(view: View, tensor: onnx.TensorProto) -> Array:
    """The tensor as uint16; empty where its data cannot be read, which is another rule's business.

    Large weights are mapped, not read.
    """
    if not external_data_helper.uses_external_data(tensor):
        values: Array = numpy_helper.to_array(tensor)
        return values.view(np.uint16).ravel()
    place = {entry.key: entry.value for entry in tensor.external_data}
    path = (view.folder or Path()) / place["location"]
    count, offset = int(np.prod(tensor.dims)), int(place.get("offset", 0))
    if not count or not path.is_file() or path.stat().st_size < offset + 2 * count:
        return np.zeros(0, np.uint16)
    return np.memmap(path, np.uint16, "r", offset, (count,))


def _index_range(view: View, tensor: onnx.TensorProto) -> Iterator[Violation]:
    values = view.constant(tensor.name)
    if values is None or not values.size or np.abs(values.astype(float)).max() <= LARGEST_INDEX:
        return
    for node in view.readers.get(tensor.name, []):
        # The end of a Slice that means "to the end" is clamped to the size.
        if not (node.op_type == "Slice" and tensor.name in node.input[1:3]):
            message = f"constant {tensor.name!r} is beyond int32"
            yield Violation(called(node), "int64-range", message, "keep indices within int32")


def _precision(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    stash = attributes(node).get("stash_type", TensorProto.FLOAT)
    if node.op_type in NORMS and stash != TensorProto.FLOAT:
        message = f"stash_type is {dtype_name(stash)}, so that the mean is taken in it"
        yield Violation(called(node), "norm-precision", message, "leave stash_type at float32")
    if node.op_type in (*REDUCTIONS, "Softmax") and view.dtype(given(node, 0)) in HALVES:
        message = f"{node.op_type} in {dtype_name(view.dtype(given(node, 0)))}"
        yield Violation(called(node), "sum-precision", message, "cast to float32 and back")


def _top_k(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    if node.op_type != "TopK":
        return
    k = view.constant(given(node, 1))
    if k is None:
        message = "k is no constant"
        yield Violation(called(node), "topk-dynamic", message, "make k an initializer")
    elif int(k.ravel()[0]) > LARGEST_K:
        message = f"k is {int(k.ravel()[0])}, at most {LARGEST_K} are supported"
        yield Violation(called(node), "topk-large", message, "take the best in blocks")


def _narrowed(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    """A constant of float32 that a Cast makes infinite."""
    if node.op_type != "Cast" or attributes(node)["to"] != TensorProto.FLOAT16:
        return
    values = view.constant(node.input[0])
    if values is not None and values.size and not np.abs(values).max() <= LARGEST_HALF:
        message = f"casts {node.input[0]!r} to fp16, where it is not finite"
        yield Violation(called(node), "half-range", message, f"keep it within {LARGEST_HALF:g}")
