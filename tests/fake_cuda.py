"""A GPU in Python that stands in for ``cuda.bindings.runtime``: what specrun calls of it.

Its memory is reached through its calls alone, has poison in it before it is written and after it is
freed, and its streams do nothing before somebody waits for them, as far as pinned memory goes. So a
wait that is missing, an address that is stale or a buffer that is too small shows, as it does on a
GPU, where the first use of a wrong address breaks all calls behind it.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DEVICE_BASE = 0x7F00_0000_0000
ALIGNMENT = 512
FRESH, FREED = 0xCD, 0xDE
Operation = Callable[[], None]


class Error(enum.IntEnum):
    """cudaError_t, as far as the fake gives any."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900


class MemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class DeviceAttr(enum.IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


class CaptureMode(enum.IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class IllegalAddress(Exception):
    """What the device finds when it gets to the work."""


@dataclass
class Properties:
    name: bytes


@dataclass
class StreamState:
    work: list[Operation] = field(default_factory=list)
    captured: list[Operation] | None = None


class FakeCuda:
    """``capability``: major and minor; ``total``: bytes of memory; ``missing``: no driver, say.

    ``mistakes``: what a program must not do and CUDA does not always tell. ``calls``: names.
    """

    cudaError_t = Error
    cudaMemcpyKind = MemcpyKind
    cudaDeviceAttr = DeviceAttr
    cudaStreamCaptureMode = CaptureMode
    cudaStreamNonBlocking = 1

    def __init__(
        self,
        capability: tuple[int, int] = (8, 6),
        total: int = 1 << 26,
        name: str = "NVIDIA RTX A2000",
        missing: Error = Error.cudaSuccess,
    ) -> None:
        self.capability, self.total, self.name, self.missing = capability, total, name, missing
        self.memory: dict[int, bytearray] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, StreamState] = {}
        self.graphs: dict[int, list[Operation]] = {}
        self.broken = Error.cudaSuccess  # stays, once a wrong address was used
        self.last = Error.cudaSuccess  # until somebody asks
        self.mistakes: list[str] = []
        self.calls: list[str] = []
        self._next_address = DEVICE_BASE
        self._next_handle = 0x5000

    # What the device does, also for the fake of TensorRT.

    def view(self, address: int, nbytes: int) -> memoryview:
        """Memory of the device. Raises IllegalAddress."""
        for start, data in self.memory.items():
            if start <= address and address + nbytes <= start + len(data):
                return memoryview(data)[address - start : address - start + nbytes]
        raise IllegalAddress(hex(address))

    def give(self, stream: int, operation: Operation) -> Error:
        """Put work on a stream, or into what is captured of it."""
        state = self.streams.get(stream)
        if state is None:
            return Error.cudaErrorInvalidResourceHandle
        (state.work if state.captured is None else state.captured).append(operation)
        return self.broken

    def drain(self, stream: int) -> None:
        """Do the work of a stream."""
        work, self.streams[stream].work = self.streams[stream].work, []
        for operation in work:
            if self.broken:
                return
            try:
                operation()
            except IllegalAddress as error:
                self.mistakes.append(f"illegal address {error}")
                self.broken = Error.cudaErrorIllegalAddress

    def check_clean(self) -> None:
        """Nothing is left allocated, and nothing was done that must not be."""
        assert not self.mistakes
        assert not self.memory
        assert not self.pinned
        assert not self.streams
        assert not self.graphs

    def _handle(self) -> int:
        self._next_handle += 16
        return self._next_handle

    def _drain_all(self) -> None:
        for stream in self.streams:
            self.drain(stream)

    def _said(self, name: str) -> None:
        self.calls.append(name)

    # The device.

    def cudaGetDeviceCount(self) -> tuple[Error, int | None]:
        if self.missing:
            return self.missing, None
        return Error.cudaSuccess, 1

    def cudaSetDevice(self, device: int) -> tuple[Error]:
        if device != 0:
            return (Error.cudaErrorInvalidDevice,)
        return (self.broken,)

    def cudaDeviceGetAttribute(self, attr: DeviceAttr, device: int) -> tuple[Error, int]:
        major = attr is DeviceAttr.cudaDevAttrComputeCapabilityMajor
        return Error.cudaSuccess, self.capability[0 if major else 1]

    def cudaGetDeviceProperties(self, device: int) -> tuple[Error, Properties]:
        return Error.cudaSuccess, Properties(self.name.encode())

    def cudaMemGetInfo(self) -> tuple[Error, int, int]:
        used = sum(map(len, self.memory.values()))
        return self.broken, self.total - used, self.total

    def cudaGetErrorString(self, error: Error) -> tuple[Error, bytes]:
        return Error.cudaSuccess, error.name.removeprefix("cudaError").lower().encode()

    def cudaGetLastError(self) -> tuple[Error]:
        last, self.last = self.last, Error.cudaSuccess
        return (self.broken or last,)

    # Memory.

    def cudaMalloc(self, size: int) -> tuple[Error, int | None]:
        self._said("cudaMalloc")
        if any(state.captured is not None for state in self.streams.values()):
            self.mistakes.append("memory was allocated during a capture")
        if self.broken:
            return self.broken, None
        if sum(map(len, self.memory.values())) + size > self.total:
            self.last = Error.cudaErrorMemoryAllocation
            return self.last, None
        address = self._next_address
        self._next_address += (size // ALIGNMENT + 2) * ALIGNMENT  # with a gap behind it
        self.memory[address] = bytearray([FRESH]) * size
        return Error.cudaSuccess, address

    def cudaFree(self, devPtr: int) -> tuple[Error]:
        self._said("cudaFree")
        self._drain_all()
        data = self.memory.pop(devPtr, None)
        if data is None:
            self.mistakes.append(f"freed what is not allocated: {devPtr:#x}")
            return (Error.cudaErrorInvalidValue,)
        data[:] = bytes([FREED]) * len(data)
        return (self.broken,)

    def cudaMallocHost(self, size: int) -> tuple[Error, int]:
        buffer = (ctypes.c_uint8 * size)()
        ctypes.memset(buffer, FRESH, size)
        address = ctypes.addressof(buffer)
        self.pinned[address] = buffer
        return self.broken, address

    def cudaFreeHost(self, ptr: int) -> tuple[Error]:
        self._drain_all()
        if self.pinned.pop(ptr, None) is None:
            self.mistakes.append(f"freed what is not pinned: {ptr:#x}")
            return (Error.cudaErrorInvalidValue,)
        return (self.broken,)

    # Copies.

    def cudaMemcpyAsync(
        self, dst: int, src: int, count: int, kind: MemcpyKind, stream: int
    ) -> tuple[Error]:
        self._said("cudaMemcpyAsync")
        if kind is MemcpyKind.cudaMemcpyHostToDevice:
            return (self._to_device(dst, src, count, stream),)
        if kind is MemcpyKind.cudaMemcpyDeviceToHost:
            return (self._to_host(dst, src, count, stream),)
        return (Error.cudaErrorInvalidValue,)

    def _is_pinned(self, address: int, count: int) -> bool:
        return any(
            start <= address and address + count <= start + len(buffer)
            for start, buffer in self.pinned.items()
        )

    def _to_device(self, dst: int, src: int, count: int, stream: int) -> Error:
        if self._is_pinned(src, count):

            def copy() -> None:
                self.view(dst, count)[:] = ctypes.string_at(src, count)

        else:
            staged = ctypes.string_at(src, count)  # CUDA has it copied when the call returns

            def copy() -> None:
                self.view(dst, count)[:] = staged

        return self.give(stream, copy)

    def _to_host(self, dst: int, src: int, count: int, stream: int) -> Error:
        def copy() -> None:
            ctypes.memmove(dst, bytes(self.view(src, count)), count)

        return self.give(stream, copy)

    def cudaMemcpy2DAsync(
        self,
        dst: int,
        dpitch: int,
        src: int,
        spitch: int,
        width: int,
        height: int,
        kind: MemcpyKind,
        stream: int,
    ) -> tuple[Error]:
        if kind is not MemcpyKind.cudaMemcpyDeviceToDevice or width > min(dpitch, spitch):
            return (Error.cudaErrorInvalidValue,)

        def copy() -> None:
            for row in range(height):
                source = self.view(src + row * spitch, width)
                self.view(dst + row * dpitch, width)[:] = source

        return (self.give(stream, copy),)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> tuple[Error]:
        def fill() -> None:
            self.view(devPtr, count)[:] = bytes([value]) * count

        return (self.give(stream, fill),)

    # Streams and graphs.

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Error, int]:
        handle = self._handle()
        self.streams[handle] = StreamState()
        return self.broken, handle

    def cudaStreamSynchronize(self, stream: int) -> tuple[Error]:
        self._said("cudaStreamSynchronize")
        if stream not in self.streams:
            return (Error.cudaErrorInvalidResourceHandle,)
        if self.streams[stream].captured is not None:
            return (Error.cudaErrorStreamCaptureUnsupported,)
        self.drain(stream)
        return (self.broken,)

    def cudaStreamDestroy(self, stream: int) -> tuple[Error]:
        if stream not in self.streams:
            self.mistakes.append(f"destroyed what is no stream: {stream:#x}")
            return (Error.cudaErrorInvalidResourceHandle,)
        self.drain(stream)
        del self.streams[stream]
        return (self.broken,)

    def cudaStreamBeginCapture(self, stream: int, mode: CaptureMode) -> tuple[Error]:
        self.streams[stream].captured = []
        return (self.broken,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Error, int]:
        captured, self.streams[stream].captured = self.streams[stream].captured, None
        assert captured is not None
        handle = self._handle()
        self.graphs[handle] = captured
        return self.broken, handle

    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[Error, int]:
        handle = self._handle()
        self.graphs[handle] = list(self.graphs[graph])
        return self.broken, handle

    def cudaGraphDestroy(self, graph: int) -> tuple[Error]:
        del self.graphs[graph]
        return (self.broken,)

    def cudaGraphExecDestroy(self, graphExec: int) -> tuple[Error]:
        del self.graphs[graphExec]
        return (self.broken,)

    def cudaGraphLaunch(self, graphExec: int, stream: int) -> tuple[Error]:
        self._said("cudaGraphLaunch")
        for operation in self.graphs[graphExec]:
            self.give(stream, operation)
        return (self.broken,)
