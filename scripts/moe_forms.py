"""Three ways to compute a layer of routed experts, side by side: products, bytes and time.

    python scripts/moe_forms.py [--hidden 2816] [--width 704] [--experts 128] [--top 8]
                                [--precision int8] [--rows 1 5 16 64 256]

routed    what an export writes: a branch per expert (specgraphs.experts)
gathered  the matrices of every row's experts gathered, a batch of products (transformers'
          batched_mm), in floats; left out where the gathered matrices take more than 8 GB
dense     every expert over every row, weighted, as one product per matrix, in the same precision

The default sizes are those of Gemma 4 26B-A4B, weights are random. Results are compared first.
A table for people, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from specexport import engines
from specexport.datafile import DATA_FILE, DataFile
from specexport.made import Sources
from specexport.weights import Weights
from specgraphs import apply_formats, experts, ops
from specgraphs.engine_graph import EngineGraph
from specgraphs.formats import Formats
from specgraphs.recipes import WeightRef
from specrun.manifest import Precision
from specrun.options import available_threads

FORMS = ("routed", "gathered", "dense")
BOTH, DOWN = "gate_up_proj", "down_proj"
MOST_GATHERED = 8e9
RUNS = 7
FLOAT, INT64 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)


class InMemory:
    """A stored tensor that is an array."""

    stored = "F32"

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def rows(self, start: int, stop: int) -> Any:
        """Rows of the first axis."""
        return self.array[start:stop]


def layer(form: str, given: argparse.Namespace) -> EngineGraph:
    """The graph of one form, its weights named after the checkpoint's."""
    hidden, width, count, k = given.hidden, given.width, given.experts, given.top
    x = ir.Value(name="x", shape=ir.Shape([1, "n", hidden]), type=FLOAT)
    index = ir.Value(name="index", shape=ir.Shape(["n", k]), type=INT64)
    shares = ir.Value(name="shares", shape=ir.Shape(["n", k]), type=FLOAT)
    shapes: dict[str, tuple[int, ...]] = {
        BOTH: (count, 2 * width, hidden),
        DOWN: (count, hidden, width),
    }
    if form == "dense":
        shapes = {BOTH: (count * 2 * width, hidden), DOWN: (hidden, count * width)}
    weights = {
        name: ir.Value(name=name, shape=ir.Shape(shape), type=FLOAT)
        for name, shape in shapes.items()
    }
    make = {"routed": _routed, "gathered": _gathered, "dense": _dense}[form]
    nodes, out = make(x, index, shares, weights, given)
    out.name, out.shape, out.type = "out", ir.Shape([1, "n", hidden]), FLOAT
    graph = ir.Graph(
        [x, index, shares],
        [out],
        nodes=nodes,
        initializers=list(weights.values()),
        opset_imports={"": ops.OPSET, "com.microsoft": 1, ops.OWN_DOMAIN: 1},
        name=form,
    )
    refs = {name: WeightRef("target", name) for name in weights}
    engine = EngineGraph(ir.Model(graph, ir_version=ops.IR_VERSION), refs, {})
    # Gathered matrices are floats: a product takes no gathered integers.
    precision: Precision = "fp32" if form == "gathered" else given.precision
    formats = {"target": Formats(precision, precision, precision, 32)}
    experts.expand(engine, formats)
    apply_formats.apply(engine, formats, {})
    engine.model.opset_imports.pop(ops.OWN_DOMAIN, None)
    return engine


class Nodes:
    """Nodes in order, with names."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def add(self, op: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        """The output of a new node."""
        node = ir.node(op, list(inputs), attributes, domain=domain)
        node.outputs[0].name = f"v{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, *values: int) -> ir.Value:
        """A constant."""
        return self.add("Constant", value=ir.Tensor(np.array(values, np.int64)))


def _flat(nodes: Nodes, x: ir.Value, hidden: int) -> ir.Value:
    flat = nodes.add("Reshape", x, nodes.ints(-1, hidden))
    flat.shape, flat.type = ir.Shape(["n", hidden]), FLOAT
    return flat


def _routed(
    x: ir.Value, index: ir.Value, shares: ir.Value, weights: Any, given: Any
) -> tuple[list[ir.Node], ir.Value]:
    nodes = Nodes()
    flat = _flat(nodes, x, given.hidden)
    out = nodes.add(
        ops.ROUTED_EXPERTS,
        flat,
        index,
        shares,
        weights[BOTH],
        weights[DOWN],
        domain=ops.OWN_DOMAIN,
        activation="gelu_pytorch_tanh",
    )
    out.shape, out.type = flat.shape, FLOAT
    return nodes.nodes, nodes.add("Unsqueeze", out, nodes.ints(0))


def _gate(nodes: Nodes, both: ir.Value, width: int) -> ir.Value:
    zero, half, end, axis = (nodes.ints(n) for n in (0, width, 2 * width, -1))
    gate = nodes.add("Slice", both, zero, half, axis)
    up = nodes.add("Slice", both, half, end, axis)
    return nodes.add("Mul", nodes.add("Gelu", gate, approximate="tanh"), up)


def _gathered(
    x: ir.Value, index: ir.Value, shares: ir.Value, weights: Any, given: Any
) -> tuple[list[ir.Node], ir.Value]:
    nodes, hidden, width, k = Nodes(), given.hidden, given.width, given.top
    chosen = nodes.add("Reshape", index, nodes.ints(-1))
    rows = nodes.add("Reshape", x, nodes.ints(-1, 1, hidden))
    rows = nodes.add("Expand", rows, nodes.ints(1, k, 1))
    rows = nodes.add("Reshape", rows, nodes.ints(-1, hidden, 1))
    both = nodes.add("MatMul", nodes.add("Gather", weights[BOTH], chosen, axis=0), rows)
    inner = _gate(nodes, nodes.add("Reshape", both, nodes.ints(-1, 2 * width)), width)
    inner = nodes.add("Unsqueeze", inner, nodes.ints(-1))
    out = nodes.add("MatMul", nodes.add("Gather", weights[DOWN], chosen, axis=0), inner)
    out = nodes.add("Reshape", out, nodes.ints(-1, k, hidden))
    out = nodes.add("Mul", out, nodes.add("Unsqueeze", shares, nodes.ints(-1)))
    out = nodes.add("ReduceSum", out, nodes.ints(1), keepdims=0)
    return nodes.nodes, nodes.add("Unsqueeze", out, nodes.ints(0))


def _dense(
    x: ir.Value, index: ir.Value, shares: ir.Value, weights: Any, given: Any
) -> tuple[list[ir.Node], ir.Value]:
    nodes, width, count = Nodes(), given.width, given.experts
    both = nodes.add("FusedMatMul", x, weights[BOTH], domain="com.microsoft", transB=1)
    both.shape, both.type = ir.Shape([1, "n", count * 2 * width]), FLOAT
    both = nodes.add("Reshape", both, nodes.ints(-1, count, 2 * width))
    inner = _gate(nodes, both, width)
    rows = nodes.add("Slice", nodes.add("Shape", index), nodes.ints(0), nodes.ints(1))
    zeros = nodes.add(
        "Expand",
        nodes.add("Cast", nodes.ints(0), to=1),
        nodes.add("Concat", rows, nodes.ints(count), axis=0),
    )
    each = nodes.add("ScatterElements", zeros, index, shares, axis=1)
    inner = nodes.add("Mul", inner, nodes.add("Unsqueeze", each, nodes.ints(-1)))
    inner = nodes.add("Reshape", inner, nodes.ints(1, -1, count * width))
    inner.shape, inner.type = ir.Shape([1, "n", count * width]), FLOAT
    out = nodes.add("FusedMatMul", inner, weights[DOWN], domain="com.microsoft", transB=1)
    return nodes.nodes, out


def opened(form: str, given: argparse.Namespace, folder: Path, arrays: dict[str, Any]) -> Any:
    """A session of one form, written as an export writes it."""
    if form == "dense":
        count, _, width = arrays[DOWN].shape
        down = arrays[DOWN].transpose(1, 0, 2).reshape(-1, count * width)
        arrays = {BOTH: arrays[BOTH].reshape(-1, arrays[BOTH].shape[-1]), DOWN: down}
    place = folder / form
    place.mkdir()
    engine = layer(form, given)
    stored = {name: InMemory(array) for name, array in arrays.items()}
    with DataFile(place / DATA_FILE) as data:
        engines.write_engine(engine, place / "e.onnx", data, Sources({"target": Weights(stored)}))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_threads()
    options.log_severity_level = 3
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(
        str(place / "e.onnx"), options, providers=["CPUExecutionProvider"]
    )
    print(f"{form}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    return session


def fed(rows: int, given: argparse.Namespace) -> dict[str, Any]:
    """Random rows, each routed to its own experts."""
    draw = np.random.default_rng(rows)
    index = [draw.permutation(given.experts)[: given.top] for _ in range(rows)]
    return {
        "x": draw.standard_normal((1, rows, given.hidden), np.float32),
        "index": np.stack(index).astype(np.int64),
        "shares": np.full((rows, given.top), 1 / given.top, np.float32),
    }


def products(form: str, inputs: dict[str, Any], given: argparse.Namespace) -> float:
    """10^9 multiplications of weights that the form does for ``inputs``."""
    rows, one = len(inputs["index"]), 3 * int(given.width * given.hidden)
    used = len(np.unique(inputs["index"]))
    few = given.precision == "fp32" and rows <= experts.EXACT_ROWS
    pairs = {
        "routed": used * rows if few else rows * int(given.top),
        "gathered": rows * int(given.top),
        "dense": rows * int(given.experts),
    }
    return pairs[form] * one / 1e9


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    for name, value in (("hidden", 2816), ("width", 704), ("experts", 128), ("top", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="int8", choices=["fp32", "int8", "w8a8", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 16, 64, 256])
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    count, width, hidden = given.experts, given.width, given.hidden
    arrays = {
        BOTH: draw.standard_normal((count, 2 * width, hidden), np.float32) * np.float32(0.02),
        DOWN: draw.standard_normal((count, hidden, width), np.float32) * np.float32(0.02),
    }
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        sessions = {form: opened(form, given, Path(name), arrays) for form in FORMS}
        for rows in given.rows:
            inputs = fed(rows, given)
            forms = dict(sessions)
            if rows * given.top * 2 * width * hidden * 4 > MOST_GATHERED:
                del forms["gathered"]
            results = {form: session.run(None, inputs)[0] for form, session in forms.items()}
            largest = np.abs(results["dense"]).max()
            off = {
                form: np.abs(r - results["dense"]).max() / largest for form, r in results.items()
            }
            times: dict[str, list[float]] = {form: [] for form in forms}
            for _ in range(RUNS):
                for form, session in forms.items():
                    start = time.perf_counter()
                    session.run(None, inputs)
                    times[form].append(1e3 * (time.perf_counter() - start))
            for form in forms:
                line = {
                    "rows": rows,
                    "form": form,
                    "ms": round(statistics.median(times[form]), 2),
                    "products_e9": round(products(form, inputs, given), 3),
                    "difference": float(off[form]),
                }
                found.append(line)
                print(
                    f"{rows:4} rows  {form:9} {line['ms']:9.2f} ms"
                    f"  {line['products_e9']:8.3f}e9 products  differs by {off[form]:.1e}",
                    flush=True,
                )
    print(json.dumps({"precision": given.precision, "found": found}))


if __name__ == "__main__":
    main()
