"""Whether a plan is what the manifest says of it: validity, tensors, aliases and profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specrun.contract import Dim, Part, TensorSpec, past, present
from specrun.errors import EngineError
from specrun.manifest import EngineSpec
from specrun.plans import PRODUCTS, PlanSpec, ShapeRange
from specrun.trt_library import Messages

if TYPE_CHECKING:
    import tensorrt_rtx as trt

# Names in TensorRT's DataType.
TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
}


def check_valid(
    library: Any, runtime: trt.Runtime, blob: Any, messages: Messages, name: str, hint: str
) -> None:
    """Let TensorRT look at the head of a plan, where it can do that. Raises EngineError."""
    if not hasattr(runtime, "get_engine_validity"):
        return  # of TensorRT-RTX only
    validity, flags = messages.attempt(name, lambda: runtime.get_engine_validity(blob))
    if validity != library.EngineValidity.INVALID:
        return
    members: Mapping[str, Any] = library.EngineInvalidityDiagnostics.__members__
    found = [text for text, flag in members.items() if int(flags) & int(flag)]
    if found:
        messages.add(f"TensorRT says {', '.join(found)}")
    messages.fail(f"{name}: does not run here", hint)


def check_io(library: Any, engine: trt.ICudaEngine, spec: EngineSpec, plan: PlanSpec) -> None:
    """Compare the inputs and outputs of a plan with the manifest's. Raises EngineError."""
    found = {engine.get_tensor_name(i): i for i in range(engine.num_io_tensors)}
    for what, mode, declared in (
        ("input", library.TensorIOMode.INPUT, spec.inputs),
        ("output", library.TensorIOMode.OUTPUT, spec.outputs),
    ):
        names = {name for name in found if engine.get_tensor_mode(name) == mode}
        if extra := sorted(names - {tensor.name for tensor in declared}):
            raise EngineError(f"{plan.file}: {what} {extra[0]!r} is not in the manifest")
        for tensor in declared:
            if tensor.name not in names:
                raise EngineError(f"{plan.file}: has no {what} {tensor.name!r}")
            _check_tensor(library, engine, tensor, f"{plan.file}: {what} {tensor.name!r}")


def _check_tensor(library: Any, engine: trt.ICudaEngine, tensor: TensorSpec, where: str) -> None:
    dtype = engine.get_tensor_dtype(tensor.name)
    want = TYPES[tensor.dtype.value]
    if dtype != getattr(library.DataType, want):
        raise EngineError(f"{where}: must be {want}, is {dtype.name}")
    if engine.get_tensor_location(tensor.name) != library.TensorLocation.DEVICE:
        raise EngineError(f"{where}: must be on the device, the plan reads it on the host")
    shape = tuple(engine.get_tensor_shape(tensor.name))
    if len(shape) != len(tensor.shape) or not all(map(_agrees, shape, tensor.shape)):
        raise EngineError(
            f"{where}: must have shape {list(tensor.shape)}, has {list(shape)} (-1: any)"
        )


def _agrees(size: int, declared: Dim) -> bool:
    """A plan may fix what the contract leaves open, such as the capacity, not the reverse."""
    return size == declared or not isinstance(declared, int)


def check_aliases(engine: trt.ICudaEngine, spec: EngineSpec, plan: PlanSpec) -> None:
    """KV buffers must be written in place. Raises EngineError."""
    if not hasattr(engine, "get_aliased_input_tensor"):
        raise EngineError(
            f"{plan.file}: this {PRODUCTS[plan.flavour]} cannot update KV buffers in place",
            hint="install TensorRT 10.15 or newer and build the plan with it",
        )
    outputs = {tensor.name for tensor in spec.outputs}
    for output, source in aliases(spec).items():
        if output not in outputs:
            continue
        found = engine.get_aliased_input_tensor(output)
        if found != source:
            raise EngineError(
                f"{plan.file}: output {output!r} must be written over {source!r},"
                f" the plan writes it over {found or 'nothing'}"
            )


def aliases(spec: EngineSpec) -> dict[str, str]:
    """Name of each KV output and of the input that it is written over."""
    written = {tensor.name for tensor in spec.outputs}
    pairs = ((kv.layer, part) for kv in spec.kv for part in Part)
    return {present(*pair): past(*pair) for pair in pairs if present(*pair) in written}


def check_profiles(engine: trt.ICudaEngine, plan: PlanSpec) -> None:
    """The profiles must be those of the manifest, in its order. Raises EngineError."""
    count = engine.num_optimization_profiles
    if count != len(plan.profiles):
        raise EngineError(f"{plan.file}: must have {len(plan.profiles)} profiles, has {count}")
    for number, profile in enumerate(plan.profiles):
        for name, want in profile.inputs.items():
            shapes = engine.get_tensor_profile_shape(name, number)
            got = ShapeRange(*(tuple(shape) for shape in shapes))
            if got != want:
                raise EngineError(
                    f"{plan.file}: profile {profile.name} of {name!r} must be {want}, is {got}"
                )
