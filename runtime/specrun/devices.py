"""Where engines may run: the names that ``device`` takes. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrun.errors import UsageError

if TYPE_CHECKING:
    from specrun.options import EngineOptions

PLUGIN = "plugin:"  # and the name of a provider that comes as a library of its own


@dataclass(frozen=True)
class Device:
    """A device that ONNX Runtime has providers for, the first of which is to run the engine.

    ``package``: what has to be installed for them. ``memory``: ``cuda`` where KV buffers stay on
    the device; with ``cpu`` ONNX Runtime copies what it needs. ``torch``: PyTorch's name of the
    device, None where it has none. ``numbered``: there may be several, see ``device_id``.
    """

    providers: tuple[str, ...]
    package: str
    memory: str = "cpu"
    torch: str | None = None
    numbered: bool = False


def _nvidia(package: str, *providers: str) -> Device:
    return Device(providers, package, memory="cuda", torch="cuda", numbered=True)


CUDA = "CUDAExecutionProvider"
DEVICES: dict[str, Device] = {
    "cpu": Device(("CPUExecutionProvider",), "onnxruntime", torch="cpu"),
    "cuda": _nvidia("onnxruntime-gpu", CUDA),
    "ort-tensorrt": _nvidia("onnxruntime-gpu", "TensorrtExecutionProvider", CUDA),
    "ort-tensorrt-rtx": _nvidia("onnxruntime-ep-nv-tensorrt-rtx", "NvTensorRTRTXExecutionProvider"),
    "coreml": Device(("CoreMLExecutionProvider",), "onnxruntime"),
    "dml": Device(("DmlExecutionProvider",), "onnxruntime-directml", numbered=True),
    "openvino": Device(("OpenVINOExecutionProvider",), "onnxruntime-openvino"),
    "migraphx": Device(
        ("MIGraphXExecutionProvider",), "onnxruntime-migraphx", torch="cuda", numbered=True
    ),
    "rocm": Device(("ROCMExecutionProvider",), "onnxruntime-rocm", torch="cuda", numbered=True),
    "qnn": Device(("QNNExecutionProvider",), "onnxruntime-qnn"),
    "webgpu": Device(("WebGpuExecutionProvider",), "onnxruntime-ep-webgpu"),
}
# These run TensorRT's own engines, without ONNX Runtime.
TENSORRT = ("tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class Place:
    """A device of this machine, as the options of an engine folder name it."""

    device: str = "cpu"
    device_id: int = 0
    provider_library: str | None = None
    user_compute_stream: int | None = None
    cuda_graph: bool = False

    @classmethod
    def of(cls, options: EngineOptions, *, cuda_graph: bool) -> Place:
        """The place of one engine; ``cuda_graph``: whether its runs may be recorded."""
        return cls(
            options.device,
            options.device_id,
            options.provider_library,
            options.user_compute_stream,
            options.cuda_graph and cuda_graph,
        )


def torch_device(options: EngineOptions) -> str:
    """PyTorch's name of the device; the one given where it has none, which PyTorch refuses."""
    known = DEVICES.get(options.device)
    if options.device in TENSORRT:
        name = "cuda"
    else:
        name = (known.torch if known is not None else None) or options.device
    return f"{name}:{options.device_id}" if options.device_id else name


def check(options: EngineOptions) -> None:
    """Raise UsageError for options that mean nothing on the device."""
    device, known = options.device, DEVICES.get(options.device)
    plugin = device.startswith(PLUGIN)
    numbered = plugin or device in TENSORRT or (known is not None and known.numbered)
    on_cuda = known is not None and CUDA in known.providers
    library = options.provider_library
    if options.device_id and not numbered:
        raise _no_effect("device_id", options.device_id, device, "cuda")
    if library is not None and (device == "cpu" or device in TENSORRT):
        raise _no_effect("provider_library", library, device, f"{PLUGIN}NAME")
    if options.user_compute_stream is not None and not on_cuda:
        raise _no_effect("user_compute_stream", options.user_compute_stream, device, "cuda")
    if options.cuda_graph and device not in ("cuda", *TENSORRT):
        raise _no_effect("cuda_graph", options.cuda_graph, device, "cuda")
    if options.cuda_graph and not options.exact:
        raise UsageError(
            "cuda_graph: records runs of one shape, which only exact mode has, got True",
            hint="give exact too, or leave cuda_graph out",
        )


def _no_effect(name: str, value: object, device: str, useful: str) -> UsageError:
    return UsageError(
        f"{name}: has no effect on device {device!r}, got {value!r}",
        hint=f"leave {name} out, or give device {useful}",
    )
