"""The CUDA calls that running a plan takes: memory, copies, a stream and graphs of one device.

Memory is freed once, when its last reference goes or ``free`` is called, and never in a fork, where
the device's context is that of another process. All calls raise EngineError with CUDA's own name of
the error.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.errors import DeviceError, EngineError
from specrun.process import check_process

INSTALL = "pip install 'specrun[tensorrt-rtx]', or 'specrun[tensorrt]'"


class OutOfMemory(EngineError):
    """The memory of the device, or what of the host's can be pinned, does not suffice."""


class Cuda:
    """One device, and CUDA's runtime as ``cuda-python`` binds it.

    Raises DeviceError: the package, the driver or the device is not there.
    """

    def __init__(self, device: int = 0) -> None:
        self._api = _bindings()
        self.device = device
        self.process = os.getpid()
        self._check_there()
        self.use()

    def use(self) -> None:
        """Make this the device of the calling thread. Raises UsageError in a fork."""
        check_process(self.process)
        self.values("cudaSetDevice", self._api.cudaSetDevice(self.device))

    def values(self, call: str, result: tuple[Any, ...]) -> Any:
        """What ``call`` returned behind its error code: one value as it is, several in a list."""
        error, *values = result
        if int(error):
            self._fail(call, error)
        return values[0] if len(values) == 1 else values

    def malloc(self, nbytes: int, what: str) -> Memory:
        """Memory of the device; its bytes may be anything. ``what``: for the message."""
        return self._memory(self._api.cudaMalloc, self._api.cudaFree, nbytes, what)

    def malloc_pinned(self, nbytes: int, what: str) -> Memory:
        """Memory of the host that copies run from and to while the host goes on."""
        return self._memory(self._api.cudaMallocHost, self._api.cudaFreeHost, nbytes, what)

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self, self._api)

    @property
    def name(self) -> str:
        """The device's name, as its maker calls it."""
        found = self.values(
            "cudaGetDeviceProperties", self._api.cudaGetDeviceProperties(self.device)
        ).name
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)

    @property
    def compute_capability(self) -> int:
        """10 * major + minor."""
        kinds = self._api.cudaDeviceAttr
        major, minor = (
            int(
                self.values(
                    "cudaDeviceGetAttribute", self._api.cudaDeviceGetAttribute(kind, self.device)
                )
            )
            for kind in (
                kinds.cudaDevAttrComputeCapabilityMajor,
                kinds.cudaDevAttrComputeCapabilityMinor,
            )
        )
        return 10 * major + minor

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all."""
        free, total = self.values("cudaMemGetInfo", self._api.cudaMemGetInfo())
        return int(free), int(total)

    def _check_there(self) -> None:
        error, count = self._api.cudaGetDeviceCount()
        if int(error):
            raise DeviceError(
                f"device: no NVIDIA GPU can be used: {self._described(error)}",
                hint="install the driver of the GPU, or use --device cpu",
            )
        if not 0 <= self.device < count:
            raise DeviceError(
                f"device: there is no GPU {self.device}, this machine has {count}",
                hint="give a smaller number, or use --device cpu",
            )

    def _memory(
        self, malloc: Callable[[int], Any], free: Callable[[int], Any], nbytes: int, what: str
    ) -> Memory:
        self.use()
        error, address = malloc(max(nbytes, 1))
        if error == self._api.cudaError_t.cudaErrorMemoryAllocation:
            self._api.cudaGetLastError()  # it stays set else, for whoever asks next
            free_bytes, total = self.memory()
            raise OutOfMemory(
                f"{what}: there is no memory for {nbytes} bytes, {free_bytes} of the device's"
                f" {total} are free",
                hint="open the folder with a smaller max_context, or free memory of the GPU",
            )
        if int(error):
            self._fail(malloc.__name__, error)
        return Memory(int(address), nbytes, free, self.process)

    def _fail(self, call: str, error: Any) -> None:
        raise EngineError(f"{call}: {self._described(error)}")

    def _described(self, error: Any) -> str:
        _, text = self._api.cudaGetErrorString(error)
        return f"{error.name} ({text.decode('utf-8', 'replace')})"


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except (ImportError, OSError) as error:
        raise DeviceError(f"cuda-python: does not load: {error}", hint=INSTALL) from error


class Memory:
    """``nbytes`` at ``address``, of the device or pinned memory of the host."""

    def __init__(self, address: int, nbytes: int, free: Callable[[int], Any], process: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._free = weakref.finalize(self, _free_in, process, free, address)
        self._free.atexit = False  # the process takes it along

    def free(self) -> None:
        """Free it; a second call does nothing."""
        self._free()

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A view of pinned memory, valid for as long as this object."""
        count = int(np.prod(shape, dtype=np.int64))
        size = count * dtype.itemsize
        raw: Any = (ctypes.c_uint8 * size).from_address(self.address + offset)
        return np.frombuffer(raw, dtype=dtype, count=count).reshape(shape)


def _free_in(process: int, free: Callable[[int], Any], address: int) -> None:
    """What fails here failed before, in the run that broke the context."""
    if os.getpid() == process:
        free(address)


class Stream:
    """Work for the device in its order. Copies take addresses, and bytes."""

    def __init__(self, cuda: Cuda, api: Any) -> None:
        self.cuda = cuda
        self._api = api
        flags = api.cudaStreamNonBlocking  # no waiting for what others do on the default stream
        made = cuda.values("cudaStreamCreateWithFlags", api.cudaStreamCreateWithFlags(flags))
        self.handle = int(made)
        free = api.cudaStreamDestroy
        weakref.finalize(self, _free_in, cuda.process, free, self.handle).atexit = False

    def to_device(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the host; pinned memory must stay as it is until the stream got there."""
        self._copy(target, source, nbytes, self._api.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def to_host(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the device; valid after ``synchronize``."""
        self._copy(target, source, nbytes, self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int
    ) -> None:
        """Copy ``count`` rows of ``width`` bytes that lie so many bytes apart, on the device."""
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        call = self._api.cudaMemcpy2DAsync
        self.cuda.values(
            "cudaMemcpy2DAsync",
            call(target, target_pitch, source, source_pitch, width, count, kind, self.handle),
        )

    def zero(self, target: int, nbytes: int) -> None:
        """Set memory of the device to 0."""
        result = self._api.cudaMemsetAsync(target, 0, nbytes, self.handle)
        self.cuda.values("cudaMemsetAsync", result)

    def synchronize(self) -> None:
        """Wait until all is done. Raises EngineError for whatever of it failed."""
        result = self._api.cudaStreamSynchronize(self.handle)
        self.cuda.values("cudaStreamSynchronize", result)

    def capture(self, work: Callable[[], None]) -> Graph:
        """What ``work`` would do on this stream, to be done again and again by one call."""
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        values = self.cuda.values
        values("cudaStreamBeginCapture", self._api.cudaStreamBeginCapture(self.handle, mode))
        try:
            work()
        finally:
            ended = self._api.cudaStreamEndCapture(self.handle)
        return Graph(self, self._api, values("cudaStreamEndCapture", ended))

    def _copy(self, target: int, source: int, nbytes: int, kind: Any) -> None:
        result = self._api.cudaMemcpyAsync(target, source, nbytes, kind, self.handle)
        self.cuda.values("cudaMemcpyAsync", result)


class Graph:
    """Work that was captured on a stream. It has the addresses that were bound then."""

    def __init__(self, stream: Stream, api: Any, captured: Any) -> None:
        self._stream, self._api = stream, api
        made = api.cudaGraphInstantiate(captured, 0)
        api.cudaGraphDestroy(captured)
        self._run = stream.cuda.values("cudaGraphInstantiate", made)
        process, free = stream.cuda.process, api.cudaGraphExecDestroy
        weakref.finalize(self, _free_in, process, free, self._run).atexit = False

    def launch(self) -> None:
        """Do it all once."""
        result = self._api.cudaGraphLaunch(self._run, self._stream.handle)
        self._stream.cuda.values("cudaGraphLaunch", result)
