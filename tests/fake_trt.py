"""TensorRT in Python on the device of ``fake_cuda``: what specrun calls of it, as it answers.

A plan of the fake is JSON: what built it, its tensors and profiles, and which function it computes
(:data:`FUNCTIONS`, NumPy arrays in and out). Wrong names, shapes beyond a profile, tensors without
an address and KV outputs away from their inputs are answered as TensorRT does, with False or None
and a message to the logger.
"""

from __future__ import annotations

import abc
import enum
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from fake_cuda import FakeCuda, IllegalAddress
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
# Gets the inputs and the plan's own parameters; KV buffers are written where they are.
Function = Callable[[Arrays, Mapping[str, Any]], Arrays]
FUNCTIONS: dict[str, Function] = {}
T = TypeVar("T")


class DataType(enum.IntEnum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    INT64 = 8
    BF16 = 7


class TensorIOMode(enum.IntEnum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.IntEnum):
    DEVICE = 0
    HOST = 1


class EngineValidity(enum.IntEnum):
    VALID = 0
    SUBOPTIMAL = 1
    INVALID = 2


class EngineInvalidityDiagnostics(enum.IntEnum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64


class ExecutionContextAllocationStrategy(enum.IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class CudaGraphStrategy(enum.IntEnum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


NUMPY = {
    DataType.FLOAT: "float32",
    DataType.HALF: "float16",
    DataType.BF16: "uint16",
    DataType.INT32: "int32",
    DataType.INT64: "int64",
}


class ILogger(abc.ABC):
    """Base of a logger; TensorRT needs its own part of the object to be there."""

    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None:
        self.there = True

    @abc.abstractmethod
    def log(self, severity: ILogger.Severity, msg: str) -> None:
        """To be written by whoever logs."""


Base = ILogger  # as Library has the class under its name


class Library:
    """Stands in for the module ``tensorrt_rtx``, or ``tensorrt``.

    ``made``: objects in the order they came; ``freed``: in the order they went. ``fails``: names of
    methods that are to fail, with the message that goes to the logger.
    """

    ILogger = ILogger
    DataType = DataType
    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation
    EngineValidity = EngineValidity
    EngineInvalidityDiagnostics = EngineInvalidityDiagnostics
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    CudaGraphStrategy = CudaGraphStrategy

    def __init__(
        self, cuda: FakeCuda, version: str = "1.7.1.116", flavour: str = "tensorrt_rtx"
    ) -> None:
        self.__version__ = version
        self.cuda, self.flavour = cuda, flavour
        self.made: list[str] = []
        self.freed: list[str] = []
        self.fails: dict[str, str] = {}
        self.compiled: list[str] = []  # kernels that no cache had

    def Runtime(self, logger: Base) -> PlainRuntime:
        """Make a runtime; of the class that the flavour has."""
        if not getattr(logger, "there", False):
            raise TypeError("ILogger.__init__() must be called when overriding __init__")
        kind = Runtime if self.flavour == "tensorrt_rtx" else PlainRuntime
        return self.track(kind(logger, self), "runtime")

    def track(self, thing: T, name: str) -> T:
        """Note when ``thing`` comes and goes."""
        self.made.append(name)
        weakref.finalize(thing, self.freed.append, name)
        return thing

    def says(self, logger: Base, message: str) -> None:
        """An error for the logger."""
        logger.log(Base.Severity.ERROR, message)

    def failing(self, logger: Base, method: str) -> bool:
        """Whether ``method`` is to fail now."""
        if method in self.fails:
            self.says(logger, self.fails[method])
        return method in self.fails


class PlainRuntime:
    """A runtime of ``tensorrt``."""

    def __init__(self, logger: ILogger, library: Library) -> None:
        self._logger, self._library = logger, library

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        try:
            plan = json.loads(bytes(serialized_engine).lstrip(b"\0"))
        except ValueError:
            self._library.says(self._logger, "Serialization assertion header.magicTag failed.")
            return None
        logger, library = self._logger, self._library
        logger.log(ILogger.Severity.INFO, "Loaded engine size: 0 MiB")
        if library.failing(logger, "deserialize_cuda_engine"):
            return None
        return library.track(ICudaEngine(plan, logger, library), "engine")


class Runtime(PlainRuntime):
    """A runtime of ``tensorrt_rtx``, which can look at a plan before it is loaded."""

    def get_engine_validity(self, buffer: Any) -> tuple[EngineValidity, int]:
        flags = EngineInvalidityDiagnostics
        try:
            plan = json.loads(bytes(buffer).lstrip(b"\0"))
        except ValueError:
            return EngineValidity.INVALID, int(flags.MALFORMED_ENGINE)
        found = 0
        if plan["version"] != self._library.__version__:
            found |= flags.VERSION_MISMATCH
        if plan["capability"] != list(self._library.cuda.capability):
            found |= flags.UNSUPPORTED_CC
        return (EngineValidity.INVALID, found) if found else (EngineValidity.VALID, 0)


class IRuntimeCache:
    """Names of compiled kernels, with what they were compiled for."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.kernels: set[str] = set()

    def deserialize(self, blob: bytes) -> bool:
        try:
            version, *kernels = json.loads(blob)
        except ValueError:
            return False
        if version != self._library.__version__:
            return False
        self.kernels |= set(kernels)
        return True

    def serialize(self) -> bytes:
        return json.dumps([self._library.__version__, *sorted(self.kernels)]).encode()


class IRuntimeConfig:
    """How contexts are to be made."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.cache: IRuntimeCache | None = None
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache(self._library)

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.cache = cache
        return "set_runtime_cache" not in self._library.fails


class ICudaEngine:
    """A plan that is loaded."""

    def __init__(self, plan: dict[str, Any], logger: ILogger, library: Library) -> None:
        self.plan, self.logger, self.library = plan, logger, library
        self.tensors: dict[str, dict[str, Any]] = {t["name"]: t for t in plan["tensors"]}
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(plan["profiles"])
        self.device_memory_size_v2: int = plan["device_memory"]

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name]["dtype"]]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation[self.tensors[name].get("location", "DEVICE")]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [size if isinstance(size, int) else -1 for size in self.tensors[name]["shape"]]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.tensors[name].get("alias")

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        ranges: list[list[int]] = self.plan["profiles"][profile_index][name]
        return ranges

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig(self.library)

    def create_execution_context(
        self, runtime_config: IRuntimeConfig | None = None
    ) -> IExecutionContext | None:
        if self.library.failing(self.logger, "create_execution_context"):
            return None
        config = runtime_config or IRuntimeConfig(self.library)
        return self.library.track(IExecutionContext(self, config), "context")


class IExecutionContext:
    """Bindings under one profile."""

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        self._engine, self._config = engine, config
        self._library, self._cuda = engine.library, engine.library.cuda
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = memory, size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._refused(f"profile {profile_index} is out of range")
        if self._cuda.give(stream_handle, lambda: None):
            return self._refused("the stream is not valid")
        self._profile, self._shapes = profile_index, {}
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor = self._engine.tensors.get(name)
        if tensor is None or tensor["mode"] != "INPUT":
            return self._refused(f"{name} is no input")
        static = self._engine.get_tensor_shape(name)
        ranges = self._engine.plan["profiles"][self._profile].get(name, [static] * 3)
        low, _, high = ranges
        if len(shape) != len(low) or not all(
            a <= size <= b for a, size, b in zip(low, shape, high, strict=True)
        ):
            return self._refused(f"Set dimension {list(shape)} of {name} is not in {low}..{high}")
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name, tensor in self._engine.tensors.items()
            if tensor["mode"] == "INPUT"
            and name not in self._shapes
            and -1 in self._engine.get_tensor_shape(name)
        ]

    def get_tensor_shape(self, name: str) -> list[int]:
        sizes: dict[str, int] = {}
        for given, shape in self._shapes.items():
            declared = self._engine.tensors[given]["shape"]
            sizes |= {d: s for d, s in zip(declared, shape, strict=True) if isinstance(d, str)}
        return [
            size if isinstance(size, int) else sizes.get(size, -1)
            for size in self._engine.tensors[name]["shape"]
        ]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine.tensors:
            return self._refused(f"{name} is no tensor")
        if self._library.failing(self._engine.logger, "set_tensor_address"):
            return False
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        if self._library.failing(engine.logger, "execute_async_v3"):
            return False
        for name, tensor in engine.tensors.items():
            if not self._addresses.get(name):
                return self._refused(f"address of {name} is not set")
            alias = tensor.get("alias")
            if alias and self._addresses[name] != self._addresses[alias]:
                return self._refused(f"{name} must have the address of {alias}")
        if self._cuda.last:  # of whatever call before; it cannot tell
            return self._refused(f"cudaGetLastError: {self._cuda.last.name}")
        if self.infer_shapes():
            return self._refused("not all shapes are specified")
        wants = ExecutionContextAllocationStrategy.USER_MANAGED
        if self._config.strategy is wants and self._memory[1] < engine.device_memory_size_v2:
            return self._refused("device memory is too small")
        self._compile()
        shapes = {name: tuple(self.get_tensor_shape(name)) for name in engine.tensors}
        addresses, memory = dict(self._addresses), self._memory
        error = self._cuda.give(stream_handle, lambda: self._compute(shapes, addresses, memory))
        return not error or self._refused(error.name)

    def _compile(self) -> None:
        """What TensorRT-RTX compiles at first use, unless its cache has it."""
        kernel = f"{self._engine.plan['function']}.{self._profile}"
        cache = self._config.cache
        if cache is None or kernel not in cache.kernels:
            self._library.compiled.append(kernel)
        if cache is not None:
            cache.kernels.add(kernel)

    def _compute(
        self,
        shapes: dict[str, tuple[int, ...]],
        addresses: dict[str, int],
        memory: tuple[int, int],
    ) -> None:
        """What the device does: arrays at the addresses as they are when it gets there."""
        plan = self._engine.plan
        if memory[1]:
            self._cuda.view(*memory)[:] = bytes([0xAB]) * memory[1]
        arrays: Arrays = {}
        for name in shapes:
            dtype = np.dtype(NUMPY[self._engine.get_tensor_dtype(name)])
            nbytes = int(np.prod(shapes[name])) * dtype.itemsize
            view = self._cuda.view(addresses[name], nbytes)
            arrays[name] = np.frombuffer(view, dtype=dtype).reshape(shapes[name])
        try:
            made = FUNCTIONS[plan["function"]](arrays, plan["parameters"])
        except IndexError as error:
            raise IllegalAddress(str(error)) from error
        for name, values in made.items():
            assert values.shape == shapes[name], (name, values.shape, shapes[name])
            arrays[name][...] = values

    def _refused(self, message: str) -> bool:
        self._library.says(self._engine.logger, f"IExecutionContext: {message}")
        return False
