"""Nodes made one after the other, to be put into a graph together."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


class Nodes:
    """New nodes in order, named after what they stand for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[ir.Node] = []

    def add(
        self, op: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """The one output of a new node."""
        return self.add_many(op, 1, *inputs, domain=domain, **attributes)[0]

    def add_many(
        self, op: str, count: int, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        """The outputs of a new node that has ``count`` of them."""
        name = f"{self.name}.{len(self.nodes)}"
        node = ir.node(op, list(inputs), attributes, domain=domain, num_outputs=count, name=name)
        for index, output in enumerate(node.outputs):
            output.name = f"{name}.{index}"
        self.nodes.append(node)
        return list(node.outputs)

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """A value that is in the graph itself."""
        tensor = ir.Tensor(array)
        value = self.add("Constant", value=tensor)
        value.const_value = tensor
        value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        return value

    def ints(self, *values: int) -> ir.Value:
        """int64 ``[number of values]``."""
        return self.constant(np.array(values, dtype=np.int64))

    def branch(self, output: ir.Value) -> ir.Graph:
        """The nodes as a branch that gives ``output``; it may read values of the graph around."""
        return ir.Graph([], [output], nodes=self.nodes, name=self.name)


def replace(node: ir.Node, nodes: Nodes, results: dict[int, ir.Value]) -> None:
    """Put ``nodes`` in place of ``node``; ``results``: by the number of the output they are."""
    owner = node.graph
    assert isinstance(owner, ir.Graph)
    owner.insert_before(node, nodes.nodes)
    for index, new in results.items():
        old = node.outputs[index]
        new.shape, new.type = old.shape, old.type
        new.name, old.name = old.name or new.name, None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    owner.remove(node, safe=True)
