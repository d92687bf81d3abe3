"""An ONNX file as a TensorRT network, whose borders are what the manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specexport.trt.bindings import trt
from specexport.trt.messages import Messages, cleaned
from specrun.contract import TensorSpec
from specrun.errors import EngineError

REWRITE = "specgraphs.static_rules says what TensorRT takes"


@dataclass(frozen=True)
class Parsed:
    """A network with everything that must outlive it, and the builder it belongs to."""

    builder: trt.Builder
    network: trt.INetworkDefinition
    parser: trt.OnnxParser  # holds the weights that the network points to


def parse(path: Path, log: trt.ILogger, messages: Messages) -> Parsed:
    """Read an ONNX file; external data is looked for beside it.

    Raises EngineError that names the node, for everything refused or left unused.
    """
    builder = trt.Builder(log)
    network = builder.create_network(_flags())
    parser = trt.OnnxParser(network, log)
    taken = parser.parse_from_file(str(path))
    reasons = list(_reasons(parser))
    if not taken or reasons or messages.errors:
        told = "; ".join(reasons) or messages.told()
        raise EngineError(f"TensorRT does not take {path.name}: {told}", hint=REWRITE)
    return Parsed(builder, network, parser)


def _flags() -> int:
    # From TensorRT 11 on there is no other kind of network, and no flag for it.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _reasons(parser: trt.OnnxParser) -> Iterator[str]:
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = error.node_name() or f"node {error.node()}"
        operator = error.node_operator()
        yield f"{where}{f' ({operator})' if operator else ''}: {cleaned(error.desc())}"


def dtype_name(dtype: trt.DataType) -> str:
    """The type as the contract calls it."""
    names = {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
        trt.DataType.BOOL: "bool",
    }
    return names.get(dtype, str(dtype))


def check_borders(
    network: trt.INetworkDefinition, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]
) -> None:
    """EngineError unless inputs and outputs are exactly these, in any order."""
    found = [network.get_input(index) for index in range(network.num_inputs)]
    for tensor in found:
        if tensor.is_shape_tensor:
            raise EngineError(
                f"a size is computed from the values of input {tensor.name!r}",
                hint="compute sizes from the shapes of inputs",
            )
    _check("input", found, inputs)
    made = [network.get_output(index) for index in range(network.num_outputs)]
    _check("output", made, outputs)


def _check(kind: str, found: list[trt.ITensor], wanted: Iterable[TensorSpec]) -> None:
    there = {tensor.name: tensor for tensor in found}
    specs = {spec.name: spec for spec in wanted}
    for name in sorted(there.keys() ^ specs.keys()):
        lacks = "the graph" if name in specs else "the manifest"
        raise EngineError(f"{kind} {name!r}: {lacks} does not have it", hint=REWRITE)
    for name, spec in specs.items():
        _check_tensor(f"{kind} {name!r}", there[name], spec)


def _check_tensor(what: str, tensor: trt.ITensor, spec: TensorSpec) -> None:
    dtype = dtype_name(tensor.dtype)
    if dtype != spec.dtype:
        raise EngineError(
            f"{what} is {dtype} in the graph and {spec.dtype} in the manifest", hint=REWRITE
        )
    shape = tuple(tensor.shape)
    wanted = tuple(-1 if isinstance(size, str) else size for size in spec.shape)
    if shape != wanted:
        raise EngineError(
            f"{what} has shape {list(shape)} in the graph and {list(spec.shape)} in the manifest",
            hint=REWRITE,
        )
    for axis, size in enumerate(spec.shape):
        name = tensor.get_dimension_name(axis)
        if isinstance(size, str) and name and name != size:
            raise EngineError(
                f"{what}: axis {axis} is {name!r} in the graph and {size!r} in the manifest",
                hint=REWRITE,
            )
