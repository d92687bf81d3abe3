"""Routed experts (mixture of experts): a step computes those that its rows are routed to, no other.

While tracing, transformers' expert modules emit one node (:func:`specgraphs.ops.routed_experts`);
:func:`expand` turns it into an ``If`` per expert around the expert's own linear layers::

    rows of expert e = rows r with e among experts[r]
    y_e    = down[e] @ (activation(gate) * up),  gate, up = gate_up[e] @ x[rows of e]
    out[r] = sum_j shares[r, j] * y of experts[r, j] and r

So every expert's matrices are initializers of their own: any format of :mod:`specgraphs.formats`
suits them, ONNX Runtime packs them as it does others, and those of experts that are not used are
not touched. A gathered form copies the matrices of the routed experts first, in floats.

Measured on a layer of Gemma 4 26B-A4B (128 experts of 3 x 704 x 2816, 8 per row), 2 threads:
deciding for 128 experts takes 0.57 ms; scripts/moe_forms.py, int8, 1 / 5 / 16 / 64 rows::

    this                 8.6 /  49 /  75 / 115 ms
    all, over all rows    64 / 121 / 231 / 594 ms
    gathered, in floats   61 / 140 / 393 ms

In floats the sums of a product depend on the number of its rows, and the rows of an expert on what
other rows are routed to. So that the exact mode holds, a run of at most ``EXACT_ROWS`` rows puts
all of them through every expert that one of them needs; reading the matrices is what takes time
there. Integer products do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specgraphs import ops
from specgraphs.engine_graph import EngineGraph
from specgraphs.formats import Formats
from specgraphs.nodes import Nodes, replace
from specgraphs.recipes import WeightRef

IMPLEMENTATION = "specgraphs_experts"  # under which our function is registered
EXACT_ROWS = 32
# Name in a configuration -> operator, its domain and its attributes.
ACTIVATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "silu": ("QuickGelu", "com.microsoft", {"alpha": 1.0}),
    "gelu_pytorch_tanh": ("Gelu", "", {"approximate": "tanh"}),
}
IN_FLOATS = "specgraphs.exact_rows"  # with a graph that has experts in floats
SHARE = "specgraphs.share"  # with a branch: share of the rows that need it


def register() -> None:
    """Register the experts' function with transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def _experts(
    module: Any, hidden: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    return ops.routed_experts(
        hidden,
        experts.to(torch.int64),
        shares,
        module.gate_up_proj,
        module.down_proj,
        activation=activation(module),
    )


def activation(module: Any) -> str:
    """Name of the activation of an expert module. Raises ValueError for a form not known."""
    config = module.config
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    plain = module.has_gate and module.is_concatenated
    odd = module.is_transposed or module.has_bias or module.has_post_expert_norm
    if name not in ACTIVATIONS or not plain or odd:
        raise ValueError(f"experts of the form {type(module).__name__} with {name} do not export")
    return str(name)


def expand(graph: EngineGraph, formats: Mapping[str, Formats], *, everywhere: bool = False) -> None:
    """Replace the routed experts of a bound ``graph``, in place; ``formats``: by origin.

    ``everywhere``: every expert computes every row, and those that a row is not routed to count
    nothing: for TensorRT, which cannot choose rows at run time.
    Ensures: an expert's matrices are initializers ``NAME.INDEX``, read by one FusedMatMul each.
    """
    found = [n for n in graph.model.graph.all_nodes() if n.op_type == ops.ROUTED_EXPERTS]
    for node in found:
        _Expansion(node, graph, formats).apply(everywhere)
    if found:
        graph.model.opset_imports["com.microsoft"] = 1
        graph.model.opset_imports.pop(ops.OWN_DOMAIN, None)


def exact_rows(graph: EngineGraph) -> int | None:
    """Most rows of a run whose bits do not depend on where others are routed; None for any."""
    found: int | None = graph.model.graph.meta.get(IN_FLOATS)
    return found


def share_of_steps(node: ir.Node) -> float:
    """The share of one-row runs in which ``node`` runs: 1, unless it belongs to an expert."""
    share: float = 1.0 if node.graph is None else node.graph.meta.get(SHARE, 1.0)
    return share


class _Expansion:
    """The nodes that stand for one layer's experts, in order."""

    def __init__(self, node: ir.Node, graph: EngineGraph, formats: Mapping[str, Formats]) -> None:
        self.node = node
        self.engine = graph
        x, index, shares, gate_up, down = node.inputs
        assert x is not None and index is not None and shares is not None
        assert gate_up is not None and gate_up.shape is not None and x.dtype is not None
        assert down is not None
        self.x, self.index, self.shares, self.dtype = x, index, shares, x.dtype
        self.matrices = (gate_up, down)
        self.count = int(gate_up.shape[0])  # type: ignore[arg-type]
        self.width = int(gate_up.shape[1]) // 2  # type: ignore[arg-type]
        self.hidden = int(gate_up.shape[2])  # type: ignore[arg-type]
        refs = [graph.weights[value.name or ""] for value in self.matrices]
        self.in_floats = any(formats[r.origin].linear(r.name).kind == "float" for r in refs)
        self.nodes = Nodes(node.name or node.outputs[0].name or "experts")

    def apply(self, everywhere: bool) -> None:
        out = self._everywhere() if everywhere else self._combined()
        replace(self.node, self.nodes, {0: out})
        for value in self.matrices:
            if not value.uses():
                del self.engine.model.graph.initializers[value.name or ""]
                del self.engine.weights[value.name or ""]

    def _everywhere(self) -> ir.Value:
        """``out``, from the results of all experts for all rows."""
        numbers = self.nodes.constant(np.arange(self.count, dtype=np.int64))
        routed = self.nodes.add(
            "Equal", self.nodes.add("Unsqueeze", self.index, self.nodes.ints(-1)), numbers
        )
        shares = self.nodes.add("Cast", self.shares, to=ir.DataType.FLOAT)
        each = self.nodes.add(
            "Mul",
            self.nodes.add("Cast", routed, to=ir.DataType.FLOAT),
            self.nodes.add("Unsqueeze", shares, self.nodes.ints(-1)),
        )
        total = self.nodes.add("ReduceSum", each, self.nodes.ints(1), keepdims=0)  # [n, count]
        parts = self.nodes.add_many("Split", self.count, total, axis=1, num_outputs=self.count)
        scaled = []
        for number, share in enumerate(parts):
            out = self.nodes.add(
                "Cast", self._computed(self.nodes, self.x, number), to=ir.DataType.FLOAT
            )
            scaled.append(self.nodes.add("Mul", out, share))
        return self.nodes.add("Cast", self.nodes.add("Sum", *scaled), to=self.dtype)

    def _combined(self) -> ir.Value:
        """``out``, from the results of all experts one below the other."""
        if self.in_floats:
            self.engine.model.graph.meta[IN_FLOATS] = EXACT_ROWS
        used = self._by_expert()  # int64 [count, n]
        needed = self.nodes.add("ReduceMax", used, self.nodes.ints(1), keepdims=0)
        numbers = self.nodes.add("ReduceSum", used, self.nodes.ints(1), keepdims=0)
        pairs = self.nodes.add("NonZero", used)
        rows = self.nodes.add("Gather", pairs, self.nodes.constant(np.array(1, np.int64)), axis=0)
        of_expert = self.nodes.add_many("Split", self.count, rows, numbers, axis=0)
        runs = self.nodes.add_many(
            "Split",
            self.count,
            self.nodes.add("Cast", needed, to=ir.DataType.BOOL),
            axis=0,
            num_outputs=self.count,
        )
        nothing = self.nodes.add(
            "Slice", self.x, self.nodes.ints(0), self.nodes.ints(0), self.nodes.ints(0)
        )
        top = self.index.shape
        assert top is not None
        share = int(top[-1]) / self.count  # type: ignore[arg-type]
        results = [
            self._expert(number, run, mine, nothing, share)
            for number, (run, mine) in enumerate(zip(runs, of_expert, strict=True))
        ]
        together = self.nodes.add("Concat", *results, axis=0)
        # Where the result of a row's j-th expert stands: results lie as ``used`` does.
        flat = self.nodes.add("Reshape", used, self.nodes.ints(-1))
        place = self.nodes.add(
            "CumSum", flat, self.nodes.constant(np.array(0, np.int64)), exclusive=1
        )
        place = self.nodes.add("Reshape", place, self.nodes.add("Shape", used))
        place = self.nodes.add("Transpose", place, perm=[1, 0])
        place = self.nodes.add("GatherElements", place, self.index, axis=1)  # [n, k]
        found = self.nodes.add("Gather", together, place, axis=0)  # [n, k, hidden]
        found = self.nodes.add("Cast", found, to=ir.DataType.FLOAT)
        shares = self.nodes.add("Cast", self.shares, to=ir.DataType.FLOAT)
        scaled = self.nodes.add(
            "Mul", found, self.nodes.add("Unsqueeze", shares, self.nodes.ints(-1))
        )
        total = self.nodes.add("ReduceSum", scaled, self.nodes.ints(1), keepdims=0)
        return self.nodes.add("Cast", total, to=self.dtype)

    def _by_expert(self) -> ir.Value:
        """1 where an expert is to compute a row, int64 ``[count, n]``."""
        depth = self.nodes.constant(np.array(self.count, np.int64))
        used = self.nodes.add("OneHot", self.index, depth, self.nodes.ints(0, 1), axis=-1)
        used = self.nodes.add("ReduceMax", used, self.nodes.ints(1), keepdims=0)  # [n, count]
        if self.in_floats:
            needed = self.nodes.add("ReduceMax", used, self.nodes.ints(0), keepdims=1)
            rows = self.nodes.add("Shape", self.x, start=0, end=1)
            few = self.nodes.add("LessOrEqual", rows, self.nodes.ints(EXACT_ROWS))
            few = self.nodes.add("Cast", few, to=ir.DataType.INT64)
            used = self.nodes.add("Max", used, self.nodes.add("Mul", needed, few))
        return self.nodes.add("Transpose", used, perm=[1, 0])

    def _expert(
        self, number: int, run: ir.Value, rows: ir.Value, nothing: ir.Value, share: float
    ) -> ir.Value:
        """Results of one expert for ``rows`` int64 ``[m]``: ``[m, hidden]``, none if it is idle."""
        name = f"{self.nodes.name}.expert.{number}"
        then = Nodes(f"{name}.then")
        x = then.add("Gather", self.x, rows, axis=0)
        self._typed(x, self.hidden)
        out = self._computed(then, x, number)
        idle = Nodes(f"{name}.idle")
        none = idle.add("Identity", nothing)
        self._typed(none, self.hidden)
        branch = then.branch(out)
        branch.meta[SHARE] = share
        chosen = self.nodes.add("If", run, then_branch=branch, else_branch=idle.branch(none))
        self._typed(chosen, self.hidden)
        return chosen

    def _computed(self, nodes: Nodes, x: ir.Value, number: int) -> ir.Value:
        """Results ``[m, hidden]`` of one expert for ``x`` ``[m, hidden]``."""
        both = nodes.add(*self._product(x, 0, number), transB=1, domain="com.microsoft")
        self._typed(both, 2 * self.width)
        gate, up = nodes.add_many("Split", 2, both, axis=-1, num_outputs=2)
        op, domain, attributes = ACTIVATIONS[self.node.attributes["activation"].as_string()]
        gate = nodes.add(op, gate, domain=domain, **attributes)
        inner = nodes.add("Mul", gate, up)
        self._typed(inner, self.width)
        out = nodes.add(*self._product(inner, 1, number), transB=1, domain="com.microsoft")
        self._typed(out, self.hidden)
        return out

    def _product(self, x: ir.Value, which: int, number: int) -> tuple[str, ir.Value, ir.Value]:
        return "FusedMatMul", x, self._matrix(which, number)

    def _matrix(self, which: int, number: int) -> ir.Value:
        """Matrix ``number`` of gate_up (0) or down (1) as an initializer of its own."""
        whole = self.matrices[which]
        assert whole.shape is not None
        ref = self.engine.weights[whole.name or ""]
        name = f"{whole.name}.{number}"
        graph = self.engine.model.graph
        if name not in graph.initializers:
            graph.initializers[name] = ir.Value(
                name=name, shape=ir.Shape(whole.shape[1:]), type=whole.type
            )
            self.engine.weights[name] = WeightRef(ref.origin, ref.name, number)
        return graph.initializers[name]

    def _typed(self, value: ir.Value, columns: int) -> None:
        value.type, value.shape = ir.TensorType(self.dtype), ir.Shape([None, columns])
