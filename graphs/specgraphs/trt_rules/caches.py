"""KV buffers: TensorScatter writes into a graph input, whose graph output is the same memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx
from onnx import TensorProto

from specgraphs.trt_rules.view import View, Violation, attributes, called, dtype_name, given
from specrun.contract import KV_AXIS, Part, past, present

CACHE, WRITE_INDICES = 0, 2
BUFFER = re.compile(r"(past|present)\.(\d+)\.(key|value)")


def caches(view: View) -> Iterator[Violation]:
    """Every TensorScatter, and every KV buffer by its name."""
    for node in view.nodes:
        if node.op_type == "TensorScatter" and not node.domain:
            yield from _form(view, node)
            yield from _cache(view, node)
            yield from _pair(view, node)
    yield from _written(view)
    yield from _read(view)


def pair_of(name: str) -> str | None:
    """The output that holds the buffer of a ``past`` input."""
    found = BUFFER.fullmatch(name)
    if found is None or found[1] != "past":
        return None
    return present(int(found[2]), Part(found[3]))


def _form(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    name, values = called(node), attributes(node)
    mode = values.get("mode", b"linear")
    if mode != b"linear":
        message = f"mode is {mode.decode()!r}, only 'linear' is supported"
        yield Violation(name, "cache-mode", message, "write linear, wrap around in the runtime")
    axis = values.get("axis", -2)
    if axis not in (KV_AXIS, KV_AXIS - 4):
        message = f"axis is {axis}, it must be {KV_AXIS}"
        yield Violation(name, "cache-axis", message, "transpose the rows before")
    indices = given(node, WRITE_INDICES)
    if not indices:
        message = "has no write_indices, so that it always writes at row 0"
        yield Violation(name, "cache-no-index", message, "give it past_length as int64")
    elif view.dtype(indices) != TensorProto.INT64:
        message = f"write_indices is {dtype_name(view.dtype(indices))}, it must be INT64"
        yield Violation(name, "cache-index-dtype", message, "cast it to int64")


def _cache(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    name, cache = called(node), given(node, CACHE)
    shape = view.shape(cache)
    if shape is None or len(shape) != 4:
        message = f"cache {cache!r} has shape {shape}, it must have four axes"
        yield Violation(name, "cache-rank", message, "[batch, heads, capacity, head size]")
    elif not isinstance(shape[KV_AXIS], int):
        message = f"cache {cache!r} has a dynamic capacity {shape[KV_AXIS]!r}"
        yield Violation(name, "cache-capacity", message, "export one engine per capacity")
    if cache not in view.inputs:
        message = f"cache {cache!r} is no graph input"
        yield Violation(name, "cache-input", message, "let it read the input itself")


def _pair(view: View, node: onnx.NodeProto) -> Iterator[Violation]:
    name, result = called(node), node.output[0]
    if result not in view.outputs:
        message = f"result {result!r} is no graph output"
        yield Violation(name, "cache-output", message, "make it one, at the address of the cache")
    wanted = pair_of(given(node, CACHE))
    if given(node, CACHE) in view.inputs and result != wanted:
        message = f"writes {given(node, CACHE)!r} into {result!r}, it must be {wanted!r}"
        yield Violation(name, "cache-pair", message, "past.N.PART goes to present.N.PART")


def _written(view: View) -> Iterator[Violation]:
    """A buffer that goes out is one that was written."""
    for name in view.outputs:
        found = BUFFER.fullmatch(name)
        maker = view.makers.get(name)
        if found and found[1] == "present" and (not maker or maker.op_type != "TensorScatter"):
            source = past(int(found[2]), Part(found[3]))
            hint = f"TensorScatter into {source!r}, or leave the output out"
            yield Violation(name, "cache-not-written", "is not the result of TensorScatter", hint)


def _read(view: View) -> Iterator[Violation]:
    """Input and output are the same memory, so whoever reads the input may see either."""
    for name in view.inputs:
        wanted = pair_of(name)
        if wanted not in view.outputs:
            continue
        for node in view.readers.get(name, []):
            if node.op_type != "TensorScatter":
                message = f"reads {name!r}, which is written in this run"
                yield Violation(called(node), "cache-read", message, f"read {wanted!r}")
