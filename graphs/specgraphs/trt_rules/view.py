"""A graph as the rules read it: who makes and who reads each value, its type, its constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper, shape_inference

Shape = tuple[int | str | None, ...]
Array = np.ndarray[Any, np.dtype[Any]]

FLOATS: set[int] = {
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.DOUBLE,
}
HALVES: set[int] = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
SMALL = 1 << 16  # elements; a larger initializer is a weight, whose values no rule needs at once


@dataclass(frozen=True)
class Violation:
    """What TensorRT would refuse late, or take and compute otherwise.

    ``node``: name of the node, or of the value where no node is at fault. ``rule``: id of the rule.
    ``hint``: the way out.
    """

    node: str
    rule: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.node}: {self.message} [{self.rule}]"


def dtype_name(dtype: int) -> str:
    """``FLOAT16`` and the like; ``unknown`` for 0."""
    return TensorProto.DataType.Name(dtype) if dtype else "unknown"


def called(node: onnx.NodeProto) -> str:
    """The node's name, or what it is and makes where it has none."""
    return node.name or f"{node.op_type} of {next(iter(node.output), '?')}"


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes by name, as Python values."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def given(node: onnx.NodeProto, index: int) -> str:
    """Name of an input, empty where it is left out."""
    return node.input[index] if index < len(node.input) else ""


class View:
    """One model. ``folder``: where its external data lies, None if it was not read from a file."""

    def __init__(self, model: onnx.ModelProto, folder: Path | None) -> None:
        self.model = model
        self.graph = model.graph
        self.folder = folder
        self.inputs = {value.name: value for value in self.graph.input}
        self.outputs = {value.name: value for value in self.graph.output}
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}

    @cached_property
    def nodes(self) -> list[onnx.NodeProto]:
        """All nodes, those of sub-graphs too."""
        return list(_walk(self.graph))

    @cached_property
    def makers(self) -> dict[str, onnx.NodeProto]:
        """Value -> the node that makes it."""
        return {name: node for node in self.nodes for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        """Value -> the nodes that read it."""
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, node.input)):
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def counted(self) -> Counter[str]:
        """How often each value name is defined."""
        names = [value.name for value in self.graph.input]
        names += [tensor.name for tensor in self.graph.initializer]
        names += [name for node in self.graph.node for name in node.output if name]
        return Counter(names)

    @cached_property
    def types(self) -> dict[str, onnx.TypeProto.Tensor]:
        """Element type and shape of every value that is known."""
        try:
            graph = shape_inference.infer_shapes(self.model, data_prop=True).graph
        except (shape_inference.InferenceError, ValueError):
            graph = self.graph  # a graph that is wrong in itself: other rules name the node
        values = (*graph.value_info, *graph.output, *graph.input)
        return {value.name: value.type.tensor_type for value in values}

    def dtype(self, name: str) -> int:
        """Element type of a value, 0 if it is not known."""
        if name in self.initializers:
            return int(self.initializers[name].data_type)
        return int(self.types[name].elem_type) if name in self.types else 0

    def shape(self, name: str) -> Shape | None:
        """Sizes of a value, symbols by name, None for a size or a rank that is not known."""
        if name in self.initializers:
            return tuple(self.initializers[name].dims)
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        return sizes(self.types[name])

    def constant(self, name: str) -> Array | None:
        """Values of a small constant that stands in the graph; None for everything else."""
        tensor = self.initializers.get(name)
        maker = self.makers.get(name)
        if tensor is None and maker is not None and maker.op_type == "Constant":
            tensor = next((a.t for a in maker.attribute if a.name == "value"), None)
        if tensor is None or external_data_helper.uses_external_data(tensor):
            return None
        return numpy_helper.to_array(tensor) if int(np.prod(tensor.dims)) <= SMALL else None

    def origin(self, name: str, through: tuple[str, ...]) -> onnx.NodeProto | None:
        """The node that makes a value, looking back through the first input of some operators."""
        node = self.makers.get(name)
        while node is not None and node.op_type in through:
            node = self.makers.get(given(node, 0))
        return node


def sizes(tensor: onnx.TypeProto.Tensor) -> Shape:
    """The shape of a declared type."""
    return tuple(
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim
    )


def _walk(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _walk(attribute.g)
