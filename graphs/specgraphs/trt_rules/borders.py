"""Inputs and outputs: names and types of the contract, and no dynamic size but three."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from specgraphs.trt_rules.caches import BUFFER
from specgraphs.trt_rules.view import FLOATS, View, Violation, dtype_name, sizes
from specrun import contract

DYNAMIC = {contract.BATCH, contract.ROWS, contract.WANTED}
Types = set[int]
INT64: Types = {TensorProto.INT64}
INT32: Types = {TensorProto.INT32}
FLOAT: Types = {TensorProto.FLOAT}
ACTIVATIONS = FLOATS - {TensorProto.DOUBLE}
STATES: dict[str, Types] = dict.fromkeys(
    (
        contract.HIDDEN,
        contract.NEXT_HIDDEN,
        contract.EXIT_ROWS,
        contract.LAST_ROWS,
        contract.HEAD_ROWS,
        contract.PER_LAYER,
    ),
    ACTIVATIONS,
)
INPUTS: dict[str, Types] = STATES | {
    contract.TOKENS: INT64,
    contract.TOKEN: INT64,
    contract.PAST_LENGTH: INT32,
    contract.WANTED_ROWS: INT64,
    contract.NOISE: FLOAT,
}
OUTPUTS: dict[str, Types] = STATES | {
    contract.LOGITS: FLOAT,
    contract.ARGMAX: INT64,
    contract.MARGIN: FLOAT,
    contract.DRAFT_TOKENS: INT64,
    contract.DRAFT_LOGITS: FLOAT,
    contract.DRAFT_CANDIDATES: INT64,
}


def borders(view: View) -> Iterator[Violation]:
    """Every input and output of the graph."""
    for value in view.graph.input:
        if value.name not in view.initializers:
            yield from _value(value, INPUTS, "past")
    for value in view.graph.output:
        yield from _value(value, OUTPUTS, "present")


def _value(value: onnx.ValueInfoProto, known: dict[str, Types], kv: str) -> Iterator[Violation]:
    name = value.name
    found = BUFFER.fullmatch(name)
    dtypes = ACTIVATIONS if found and found[1] == kv else known.get(name)
    if dtypes is None:
        message = "is no name of the contract"
        hint = f"the contract has {', '.join(sorted(known))} and {kv}.N.key, {kv}.N.value"
        yield Violation(name, "border-name", message, hint)
    elif value.type.tensor_type.elem_type not in dtypes:
        told = " or ".join(sorted(map(dtype_name, dtypes)))
        message = f"is {dtype_name(value.type.tensor_type.elem_type)}, it must be {told}"
        yield Violation(name, "border-dtype", message, "declare it as the contract does")
    yield from _sizes(value)


def _sizes(value: onnx.ValueInfoProto) -> Iterator[Violation]:
    for axis, size in enumerate(sizes(value.type.tensor_type)):
        if not isinstance(size, int) and size not in DYNAMIC:
            message = f"axis {axis} has the dynamic size {size!r}"
            hint = f"only {', '.join(sorted(DYNAMIC))} may change from run to run"
            yield Violation(value.name, "dynamic-size", message, hint)
