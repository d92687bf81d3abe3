"""Integer weights: symmetric, in blocks that TensorRT has, with scales of the activations' type."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto

from specgraphs.trt_rules.view import FLOATS, View, Violation, attributes, called, dtype_name, given

BLOCKS = (16, 32, 64, 128)
QUANTIZED = {TensorProto.INT4, TensorProto.INT8}
VIEWS = ("Transpose", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Expand")
SAME_TYPE = {
    **dict.fromkeys(("MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min"), (0, 1)),
    "Where": (1, 2),
    "Attention": (0, 1, 2),
    "TensorScatter": (0, 1),
}


def quantized(view: View) -> Iterator[Violation]:
    """Every DequantizeLinear, whoever else reads integers, and operands of two types."""
    for node in view.nodes:
        if node.op_type == "DequantizeLinear":
            yield from _zero_point(view, node)
            yield from _blocks(view, node)
        yield from _reads_integers(view, node)
        yield from _operands(view, node)


def _zero_point(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    zero = given(node, 2)
    if not zero:
        return
    values = view.constant(zero)
    if values is None or np.any(values.astype(np.int64)):
        message = f"zero point {zero!r} is not zero everywhere"
        yield Violation(called(node), "zero-point", message, "quantize symmetrically")


def _blocks(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    values, name = attributes(node), called(node)
    block, axis = values.get("block_size", 0), values.get("axis", 1)
    if not block:
        return
    shape, scales = view.shape(node.input[0]), view.shape(node.input[1])
    if block not in BLOCKS:
        message = f"block size is {block}, it must be one of {', '.join(map(str, BLOCKS))}"
        yield Violation(name, "block-size", message, "quantize again with another block size")
    if shape is None or len(shape) != 2:
        message = f"weight {node.input[0]!r} has shape {shape}, blocks need two axes"
        yield Violation(name, "block-rank", message, "reshape it when it is written")
    elif scales is None or scales != _scales_of(shape, axis, block):
        message = f"scales have shape {scales} for a weight {shape} in blocks of {block}"
        hint = "pad the weight to whole blocks, one scale each"
        yield Violation(name, "block-scales", message, hint)


def _scales_of(shape: tuple[int | str | None, ...], axis: int, block: int) -> tuple[object, ...]:
    """Shape of the scales of whole blocks; a size that is none of whole blocks matches nothing."""
    size = shape[axis]
    whole = size // block if isinstance(size, int) and size % block == 0 else None
    cut = axis % len(shape)
    return tuple(whole if index == cut else s for index, s in enumerate(shape))


def _reads_integers(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    if node.op_type == "DequantizeLinear":
        return
    for port in filter(None, node.input):
        if view.dtype(port) in QUANTIZED and node.op_type != "QuantizeLinear":
            message = f"reads {port!r} of {dtype_name(view.dtype(port))}"
            hint = "only DequantizeLinear may; gather from its result"
            yield Violation(called(node), "quantized-reader", message, hint)


def _operands(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    ports = [given(node, index) for index in SAME_TYPE.get(node.op_type, ())]
    types = {port: view.dtype(port) for port in ports if port and view.dtype(port)}
    if len(set(types.values())) < 2:
        return
    told = " and ".join(f"{port!r} {dtype_name(dtype)}" for port, dtype in types.items())
    weights = (view.origin(port, VIEWS) for port in ports)
    from_scale = any(w is not None and w.op_type == "DequantizeLinear" for w in weights)
    if from_scale and set(types.values()) <= FLOATS:
        hint = "give the scales the type of the activations"
        yield Violation(called(node), "scale-dtype", f"reads {told}", hint)
    else:
        yield Violation(called(node), "mixed-types", f"reads {told}", "cast one of them")
