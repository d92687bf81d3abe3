"""The file as a whole: versions, operators, names, external data, sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from onnx import TensorProto, external_data_helper

from specgraphs.trt_rules.view import View, Violation, called

OPSET, MAX_IR_VERSION = 24, 11
CONTROL_FLOW = ("Loop", "If", "Scan")
DATA_DEPENDENT = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit")
RANDOM = ("Multinomial", "Bernoulli", "Dropout")
RANDOM_PREFIX = "Random"  # RandomNormal, RandomUniformLike ...


def structure(view: View) -> Iterator[Violation]:
    """Versions, operators, names and external data."""
    yield from _versions(view)
    yield from _operators(view)
    yield from _names(view)
    for tensor in view.graph.initializer:
        if external_data_helper.uses_external_data(tensor):
            yield from _external(view, tensor)


def _versions(view: View) -> Iterator[Violation]:
    # The parser reads neither: an operator of another opset is taken for the one it knows.
    versions = {o.domain or "ai.onnx": o.version for o in view.model.opset_import}
    opset = versions.get("ai.onnx")
    if opset != OPSET:
        message = f"opset is {opset}, it must be {OPSET}"
        yield Violation("model", "opset", message, "export the graph again")
    if view.model.ir_version > MAX_IR_VERSION:
        message = f"IR version is {view.model.ir_version}, at most {MAX_IR_VERSION}"
        yield Violation("model", "ir-version", message, "write an older IR version")


def _operators(view: View) -> Iterator[Violation]:
    for node in view.nodes:
        name = called(node)
        if node.domain not in ("", "ai.onnx"):
            message = f"{node.domain}.{node.op_type} is no operator of ONNX"
            hint = "write it with operators of ONNX opset 24"
            yield Violation(name, "foreign-operator", message, hint)
        elif node.op_type in CONTROL_FLOW:
            message = f"{node.op_type} is built, and run without fused attention or caches"
            yield Violation(name, "control-flow", message, "unroll it")
        elif node.op_type in DATA_DEPENDENT:
            message = f"the size of what {node.op_type} returns depends on data"
            yield Violation(name, "data-dependent", message, "use a mask or TopK")
        elif node.op_type in RANDOM or node.op_type.startswith(RANDOM_PREFIX):
            message = f"{node.op_type} draws numbers inside the engine"
            yield Violation(name, "random", message, "make the noise an input")


def _names(view: View) -> Iterator[Violation]:
    for name, count in view.counted.items():
        if count > 1:
            message = f"{count} values have this name"
            yield Violation(name, "duplicate-value", message, "rename all but one")
    for name, count in Counter(node.name for node in view.nodes).items():
        if name and count > 1:
            message = f"{count} nodes have this name"
            yield Violation(name, "duplicate-node", message, "rename all but one")
    for name in view.inputs:
        if name not in view.readers and name not in view.initializers:
            message = "graph input that nothing reads"
            yield Violation(name, "unused-input", message, "leave it out of graph and manifest")


def _external(view: View, tensor: TensorProto) -> Iterator[Violation]:
    place = {entry.key: entry.value for entry in tensor.external_data}
    location = place.get("location", "")
    inside = PurePosixPath(location)
    if not location or inside.is_absolute() or ".." in inside.parts or "\\" in location:
        message = f"external data {location!r} is outside the folder"
        yield Violation(tensor.name, "external-outside", message, "write it beside the graph")
    elif view.folder is not None:
        yield from _external_file(tensor.name, view.folder / location, place)


def _external_file(name: str, path: Path, place: dict[str, str]) -> Iterator[Violation]:
    end = int(place.get("offset", 0)) + int(place.get("length", 0))
    if not path.is_file():
        message = f"external data {path.name!r} is not there"
        yield Violation(name, "external-missing", message, "copy the whole folder")
    elif path.stat().st_size < end:
        message = f"external data {path.name!r} has {path.stat().st_size} bytes, it needs {end}"
        yield Violation(name, "external-short", message, "copy the whole folder again")
