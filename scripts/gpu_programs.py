"""Graphs of an engine folder as JSON, for a machine that has PyTorch but no package ``onnx``.

``write(folder, path)`` puts what the .onnx files of a folder compute into one file: operators with
their attributes, and where in the folder's data file each weight lies. Needs ``onnx``; what reads
it is gpu_torch_graphs.py.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def write(folder: Path, path: Path) -> None:
    """Write the programs of all engines of ``folder``, by the names of their files."""
    programs = {file.name: program(file) for file in sorted(folder.glob("*.onnx"))}
    path.write_text(json.dumps(programs), encoding="utf-8")


def program(path: Path) -> Json:
    """One graph: names of inputs and outputs, weights, and nodes in an order in which they run."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    return {
        "outputs": [value.name for value in graph.output],
        "weights": {tensor.name: _tensor(tensor) for tensor in graph.initializer},
        "nodes": [_node(node) for node in graph.node],
    }


def weights(path: Path) -> dict[str, Json]:
    """Type, shape and place of every weight of a graph."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    return {tensor.name: _tensor(tensor) for tensor in graph.initializer}


def _node(node: Any) -> Json:
    import onnx

    if node.domain not in ("", "ai.onnx"):
        raise ValueError(f"{node.op_type} of {node.domain} is no operator of the dialect")
    attributes: Json = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, onnx.TensorProto):
            value = _tensor(value)
        elif isinstance(value, bytes):
            value = value.decode()
        elif not isinstance(value, (int, float)):
            value = list(value)
        attributes[attribute.name] = value
    return {
        "op": node.op_type,
        "inputs": list(node.input),
        "outputs": list(node.output),
        "attributes": attributes,
    }


def _tensor(tensor: Any) -> Json:
    """Type (a number of ONNX), shape, and the bytes or where they lie."""
    import onnx

    said: Json = {"type": tensor.data_type, "shape": list(tensor.dims)}
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        where = {entry.key: entry.value for entry in tensor.external_data}
        place = {"file": where["location"], "offset": int(where.get("offset", 0))}
        return said | place | {"length": int(where["length"])}
    raw = tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()
    return said | {"bytes": base64.b64encode(raw).decode()}
