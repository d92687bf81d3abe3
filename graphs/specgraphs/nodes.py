"""Nodes made one after the other, to be put into a graph together."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


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

    def branch(self, output: ir.Value) -> ir.Graph:
        """The nodes as a branch that gives ``output``; it may read values of the graph around."""
        return ir.Graph([], [output], nodes=self.nodes, name=self.name)
