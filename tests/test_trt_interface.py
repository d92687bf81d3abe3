"""The fakes of CUDA and TensorRT have the interface of the real packages, as far as they go.

The runner's tests run on the fakes, which have nothing more than what is compared here: so whatever
the runner calls is there in the real packages, under that name and with those parameters.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import fake_cuda
import fake_trt
import needs
import pytest

trt: Any = needs.tensorrt_rtx()
cudart: Any = needs.cuda_runtime()

RUNTIME = Path(__file__).parents[1] / "runtime" / "specrun"
CLASSES = (
    "Runtime",
    "ICudaEngine",
    "IExecutionContext",
    "IRuntimeConfig",
    "IRuntimeCache",
)
# What the fakes need for themselves, or hold as plain attributes.
OWN = {"logger", "library", "plan", "tensors", "strategy", "cache", "kernels"}


def public(owner: type) -> dict[str, Any]:
    """Methods and properties that a fake offers."""
    return {
        name: value
        for base in reversed(owner.__mro__[:-1])
        for name, value in vars(base).items()
        if not name.startswith("_")
    }


def signatures(method: Any) -> Iterator[list[tuple[str, bool]]]:
    """Parameters of every overload in what pybind11 wrote, and which of them have defaults."""
    name, text = method.__name__, inspect.getdoc(method) or ""
    for line in re.findall(rf"^(?:\d+\. )?{name}\(self: .*$", text, re.M):
        inside = line[line.index("(") + 1 : line.rindex(") ->")]
        parts = re.findall(r"(\w+): (?:[^,\[=]|\[[^\]]*\])+?( = .*?)?(?:, (?=\w+: )|$)", inside)
        yield [(part, bool(default)) for part, default in parts if part != "self"]


def agree(fake: list[tuple[str, bool]], real: list[tuple[str, bool]]) -> bool:
    """The same names, and nothing may be left out that the real one needs."""
    same = [name for name, _ in fake] == [name for name, _ in real]
    return same and all(r or not f for (_, f), (_, r) in zip(fake, real, strict=True))


def own_signature(method: Any) -> list[tuple[str, bool]]:
    """The same of a method of a fake."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [(p.name, p.default is not inspect.Parameter.empty) for p in parameters]


def test_overloads_are_read() -> None:
    context = trt.IExecutionContext
    assert list(signatures(context.set_input_shape)) == [[("name", False), ("shape", False)]] * 3
    assert list(signatures(context.execute_async_v3)) == [[("stream_handle", False)]]
    assert [("runtime_config", True)] in signatures(trt.ICudaEngine.create_execution_context)
    assert list(signatures(context.infer_shapes)) == [[]]
    one, optional = [("a", False)], [("a", True)]
    assert agree(one, one) and agree(one, optional) and not agree(optional, one)
    assert not agree(one, [("b", False)]) and not agree(one, [*one, *one])


@pytest.mark.parametrize("name", CLASSES)
def test_methods_of_tensorrt(name: str) -> None:
    fake, there = getattr(fake_trt, name), getattr(trt, name)
    methods = {n: m for n, m in public(fake).items() if isinstance(m, FunctionType)}
    assert methods
    for method_name, method in methods.items():
        assert hasattr(there, method_name), f"{name}.{method_name}"
        overloads = list(signatures(getattr(there, method_name)))
        own = own_signature(method)
        assert any(agree(own, real) for real in overloads), (method_name, own, overloads)


@pytest.mark.parametrize("name", CLASSES)
def test_attributes_of_tensorrt(name: str) -> None:
    """What the fakes set in ``__init__`` and the runner reads or sets."""
    source = inspect.getsource(getattr(fake_trt, name))
    for attribute in set(re.findall(r"self\.([a-z]\w*)(?:: [^=\n]+)? = ", source)) - OWN:
        assert isinstance(getattr(trt, name).__dict__.get(attribute), property), attribute


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, kind in vars(fake_trt).items()
        if inspect.isclass(kind) and issubclass(kind, enum.Enum) and kind.__module__ == "fake_trt"
    ],
)
def test_enumerations_of_tensorrt(name: str) -> None:
    for member in getattr(fake_trt, name):
        assert int(getattr(trt, name).__members__[member.name]) == member.value, member


def test_severities() -> None:
    for severity in fake_trt.ILogger.Severity:
        assert int(trt.ILogger.Severity.__members__[severity.name]) == severity.value
    parameters = [("severity", False), ("msg", False)]
    assert own_signature(fake_trt.ILogger.log) == parameters
    assert parameters in signatures(trt.ILogger.log)


def test_the_module_has_what_the_fake_has() -> None:
    for name in public(fake_trt.Library).keys() - {"track", "says", "failing"}:
        assert hasattr(trt, name), name
    assert isinstance(trt.__version__, str)


def test_calls_of_cuda() -> None:
    calls = {n: m for n, m in public(fake_cuda.FakeCuda).items() if n.startswith("cuda")}
    functions = {n: m for n, m in calls.items() if isinstance(m, FunctionType)}
    assert len(functions) > 20
    for name, method in functions.items():
        real = inspect.signature(getattr(cudart, name))
        assert [n for n, _ in own_signature(method)] == list(real.parameters), name


@pytest.mark.parametrize(
    ("fake", "name"),
    [
        (fake_cuda.Error, "cudaError_t"),
        (fake_cuda.MemcpyKind, "cudaMemcpyKind"),
        (fake_cuda.DeviceAttr, "cudaDeviceAttr"),
        (fake_cuda.CaptureMode, "cudaStreamCaptureMode"),
    ],
)
def test_enumerations_of_cuda(fake: type[enum.IntEnum], name: str) -> None:
    for member in fake:
        assert int(getattr(getattr(cudart, name), member.name)) == member.value
    assert cudart.cudaStreamNonBlocking == fake_cuda.FakeCuda.cudaStreamNonBlocking


def test_errors_come_as_the_fake_gives_them() -> None:
    """A tuple that begins with the error, which has a name and a number; its text is bytes."""
    error = cudart.cudaError_t.cudaErrorMemoryAllocation
    assert (error.name, int(error)) == ("cudaErrorMemoryAllocation", 2)
    assert cudart.cudaGetErrorString(error)[1] == b"out of memory"
    assert isinstance(cudart.cudaGetDeviceCount(), tuple)
    assert int(cudart.cudaStream_t(0x50)) == 0x50


def test_real_calls_take_what_the_runner_gives() -> None:
    """Addresses and streams as integers. Without a GPU each call says so, and takes nothing."""
    if not int(cudart.cudaGetDeviceCount()[0]):
        pytest.skip("there is a GPU, which would use these addresses")
    copy = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
    mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    address, stream = 0x1000, 0x50
    for result in (
        cudart.cudaSetDevice(0),
        cudart.cudaDeviceGetAttribute(cudart.cudaDeviceAttr(75), 0),
        cudart.cudaMemGetInfo(),
        cudart.cudaMalloc(16),
        cudart.cudaMallocHost(16),
        cudart.cudaFree(address),
        cudart.cudaFreeHost(address),
        cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking),
        cudart.cudaMemcpyAsync(address, address, 16, copy, stream),
        cudart.cudaMemcpy2DAsync(address, 8, address, 8, 8, 2, copy, stream),
        cudart.cudaMemsetAsync(address, 0, 16, stream),
        cudart.cudaStreamSynchronize(stream),
        cudart.cudaStreamBeginCapture(stream, mode),
        cudart.cudaStreamEndCapture(stream),
        cudart.cudaStreamDestroy(stream),
    ):
        assert isinstance(result, tuple) and int(result[0])


def used_of(names: set[str]) -> Iterator[tuple[str, int, str]]:
    """Every attribute of variables called so in the runner's files."""
    for file in sorted(RUNTIME.glob("trt_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                value = node.value
                last = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
                if last in names:
                    yield file.name, node.lineno, node.attr


@pytest.mark.parametrize(
    ("variables", "owners"),
    [
        ({"_api", "api"}, lambda: [cudart]),
        ({"library", "_library"}, lambda: [trt]),
        ({"engine"}, lambda: [trt.ICudaEngine]),
        ({"context"}, lambda: [trt.IExecutionContext]),
        ({"runtime"}, lambda: [trt.Runtime]),
        ({"config"}, lambda: [trt.IRuntimeConfig]),
        ({"_cache"}, lambda: [trt.IRuntimeCache]),
    ],
)
def test_whatever_the_runner_names_is_there(variables: set[str], owners: Any) -> None:
    """Also what no test runs; ``_cache`` is the runner's own in one file."""
    own = {"use", "save"}
    found = [use for use in used_of(variables) if use[2] not in own]
    assert found
    for file, line, name in found:
        assert any(hasattr(owner, name) for owner in owners()), f"{file}:{line} {name}"


def test_a_logger_of_the_runner_is_one_of_tensorrt() -> None:
    """The real TensorRT looks at a plan that is none, and says so to the runner's own logger."""
    from specrun import trt_checks, trt_library
    from specrun.errors import EngineError

    messages = trt_library.Messages()
    logger = trt_library.logger(trt, messages)
    runtime = messages.attempt("runtime", lambda: trt.Runtime(logger))
    with pytest.raises(EngineError, match="x: does not run here: TensorRT says MALFORMED_ENGINE"):
        trt_checks.check_valid(trt, runtime, memoryview(b"x" * 4096), messages, "x", "build it")
    message = "x: does not load: IRuntime::deserializeCudaEngine: Error Code 1: Serialization"
    with pytest.raises(EngineError, match=message):
        messages.attempt("x: does not load", lambda: runtime.deserialize_cuda_engine(b"x" * 4096))


def test_the_real_packages_without_a_gpu_are_an_error() -> None:
    from specrun.errors import DeviceError
    from specrun.trt_cuda import Cuda

    if not int(cudart.cudaGetDeviceCount()[0]):
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="no NVIDIA GPU can be used: cudaError"):
        Cuda()


def test_the_module_is_found_by_its_name() -> None:
    from specrun.trt_library import load

    assert load("tensorrt_rtx") is importlib.import_module("tensorrt_rtx")
