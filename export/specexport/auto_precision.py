"""Picks a precision for this machine: measures the target's linear layers in each, and says why."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from specexport import naming
from specexport.sources import Source
from specrun.manifest import Precision
from specrun.options import available_threads

CANDIDATES: tuple[Precision, ...] = ("fp32", "int8", "w8a8", "int4")
ROWS = (1, 8)  # of a plain step, and of one that verifies 7 drafts
TOKENS_OF_A_BLOCK = 4  # that such a block is taken to give
COARSE_GAIN = 1.3  # int4 loses several percent of perplexity, so it must be that much faster
SAMPLE_BYTES = 96 << 20  # of float weights that a measurement reads, so that they are in no cache
RUNS = 7


@dataclass(frozen=True)
class Measured:
    """Milliseconds of the target's linear layers in one precision, by ROWS."""

    precision: Precision
    ms: tuple[float, ...]

    @property
    def per_token(self) -> float:
        """Milliseconds per token, half of the tokens generated one by one, half in blocks."""
        single, block = self.ms
        return (single + block / TOKENS_OF_A_BLOCK) / 2


@dataclass(frozen=True)
class Choice:
    """The precision that was picked, and the reason in one line."""

    precision: Precision
    reason: str


def choose(target: Source, report: Callable[[str, int, int], None]) -> Choice:
    """Measure every precision that this machine can run and pick the fastest per token."""
    from specrun.ort import lacks_integer_products

    shapes = linear_shapes(target)
    found: list[Measured] = []
    left_out = ""
    for index, precision in enumerate(CANDIDATES):
        report("measure", index, len(CANDIDATES))
        if precision == "w8a8" and lacks_integer_products():
            left_out = "; w8a8 left out, this processor has no 8-bit products that do not overflow"
            continue
        found.append(Measured(precision, measure(shapes, precision)))
    report("measure", len(CANDIDATES), len(CANDIDATES))
    picked = pick(found)
    table = ", ".join(f"{m.precision} {m.ms[0]:.1f} / {m.ms[1]:.1f}" for m in found)
    return Choice(
        picked,
        f"{picked} picked by measuring: linear layers take, at {ROWS[0]} / {ROWS[1]} rows, in ms:"
        f" {table}{left_out}; int4 would have to be {COARSE_GAIN:g} times as fast as the others",
    )


def pick(found: list[Measured]) -> Precision:
    """The fastest per token; int4 only where it is so by COARSE_GAIN."""
    fine = min((m for m in found if m.precision != "int4"), key=lambda m: m.per_token)
    coarse = next((m for m in found if m.precision == "int4"), None)
    if coarse is not None and coarse.per_token * COARSE_GAIN < fine.per_token:
        return coarse.precision
    return fine.precision


def linear_shapes(target: Source) -> Counter[tuple[int, int]]:
    """``(outputs, inputs)`` of the linear layers, and how many have it."""
    import torch

    cls, config = target.class_and_config()
    model: Any = naming.meta_model(cls, config)
    return Counter(
        (module.out_features, module.in_features)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    )


def measure(shapes: Mapping[tuple[int, int], int], precision: Precision) -> tuple[float, ...]:
    """Milliseconds of all layers of ``shapes`` in ``precision``, by ROWS; random weights."""
    total = sum(count * rows * columns for (rows, columns), count in shapes.items())
    share = min(1.0, SAMPLE_BYTES / (4 * total))
    taken = {shape: max(1, round(count * share)) for shape, count in shapes.items()}
    covered = sum(count * rows * columns for (rows, columns), count in taken.items())
    session, widths = _session(taken, precision)
    scale = total / covered
    return tuple(_time(session, widths, rows) * scale for rows in ROWS)


def _time(session: Any, widths: list[int], rows: int) -> float:
    rng = np.random.default_rng(0)
    feeds = {f"x{w}": rng.standard_normal((1, rows, w), dtype=np.float32) for w in widths}
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def _session(shapes: Mapping[tuple[int, int], int], precision: Precision) -> tuple[Any, list[int]]:
    """The layers side by side in one graph, in the form that an engine has."""
    from specgraphs import apply_formats, ops
    from specgraphs.engine_graph import EngineGraph
    from specgraphs.formats import Formats
    from specgraphs.recipes import WeightRef
    from specrun import ort

    dtype = ir.TensorType(ir.DataType.FLOAT)
    widths = sorted({columns for _, columns in shapes})
    inputs = {w: ir.Value(name=f"x{w}", shape=ir.Shape([1, "rows", w]), type=dtype) for w in widths}
    nodes, weights, refs, outputs = [], [], {}, []
    for (rows, columns), count in shapes.items():
        for index in range(count):
            name = f"w{rows}.{columns}.{index}"
            weight = ir.Value(name=name, shape=ir.Shape([rows, columns]), type=dtype)
            # Layers must not be joined: every one reads a value of its own.
            own = ir.node("Identity", [inputs[columns]])
            own.outputs[0].name = f"{name}.in"
            own.outputs[0].shape, own.outputs[0].type = inputs[columns].shape, dtype
            node = ir.node(
                "FusedMatMul", [own.outputs[0], weight], {"transB": 1}, domain="com.microsoft"
            )
            node.outputs[0].name = f"{name}.out"
            node.outputs[0].shape = ir.Shape([1, "rows", rows])
            node.outputs[0].type = dtype
            nodes += [own, node]
            weights.append(weight)
            refs[name] = WeightRef("target", name)
            outputs.append(node.outputs[0])
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=nodes,
        initializers=weights,
        opset_imports={"": ops.OPSET, "com.microsoft": 1},
        name="layers",
    )
    engine = EngineGraph(ir.Model(graph, ir_version=ops.IR_VERSION), refs, {})
    apply_formats.apply(engine, {"target": Formats(precision, precision, precision)}, {})
    rng = np.random.default_rng(0)
    for name in (*engine.weights, *engine.made):
        value = graph.initializers[name]
        value.const_value = ir.Tensor(_random(value, rng), name=name)
    # Only small results leave the graph, else allocating them would be measured too.
    for index, output in enumerate(list(graph.outputs)):
        largest = ir.node("ReduceMax", [output], {"keepdims": 0})
        largest.outputs[0].name = f"max{index}"
        largest.outputs[0].type, largest.outputs[0].shape = dtype, ir.Shape([])
        graph.append(largest)
        graph.outputs[index] = largest.outputs[0]
    proto: onnx.ModelProto = ir.to_proto(engine.model)
    session = ort.session_of_bytes(proto.SerializeToString(), threads=available_threads())
    return session, widths


def _random(value: ir.Value, rng: np.random.Generator) -> Any:
    assert value.shape is not None and value.dtype is not None
    shape, dtype = value.shape.numpy(), value.dtype.numpy()
    if dtype == np.float32:
        return rng.uniform(0.5e-2, 1e-2, shape).astype(dtype)
    low, high = (-127, 128) if dtype == np.int8 else (0, 256)
    return rng.integers(low, high, shape, dtype=np.int16).astype(dtype)
