"""ONNX Runtime's sessions on a device: by the provider that was asked for, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime

from specrun.devices import CUDA, DEVICES, PLUGIN, TENSORRT, Device, Place
from specrun.errors import DeviceError, EngineError
from specrun.memory import HOST
from specrun.ort_memory import OrtDeviceMemory
from specrun.runner import Memory

# An ONNX model of one Identity node, float32 [1]: what tells whether a provider runs at all.
PROBE = (
    b'\x08\x08\x12\x00:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08'
    b"\x01\x12\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00"
    b"\x10\r"
)
ELSE_CPU = "or use --device cpu"

_registered: set[str] = set()  # libraries of providers, by their real path
_running: set[Place] = set()  # where the probe ran


def create(model: Path | bytes, options: Any, place: Place) -> Any:
    """A session whose first provider is that of ``place``.

    Raises DeviceError where there is none, and what ONNX Runtime raises.
    """
    wanted = provider_of(place)
    source = model if isinstance(model, bytes) else str(model)
    built_in = wanted in onnxruntime.get_available_providers()
    if built_in and not place.device.startswith(PLUGIN):
        providers = _with_options(DEVICES[place.device], place)
    else:
        providers = None
        options.add_provider_for_devices([_plugged(wanted, place)], {})
    # Its fallback to other providers, which it would print, is none that we would take.
    session = onnxruntime.InferenceSession(source, options, providers=providers, enable_fallback=0)
    if (used := session.get_providers()[0]) != wanted:
        raise DeviceError(
            f"device: {place.device!r} is not available: {wanted} does not load, and onnxruntime"
            f" would run on {used} instead",
            hint=f"see what specrun doctor says of it, {ELSE_CPU}",
        )
    return session


def check_device(place: Place) -> None:
    """Raise DeviceError, with the reason, unless the device runs the smallest of models.

    So that a device that does not work is told from an engine that does not.
    """
    place = replace(place, user_compute_stream=None, cuda_graph=False)
    if place.device == "cpu" or place in _running:
        return
    try:
        create(PROBE, _quiet(), place)
        memory_of(place)
    except EngineError:
        raise
    except Exception as error:
        raise DeviceError(
            f"device: {place.device!r} is not available: {provider_of(place)} does not load:"
            f" {error}",
            hint=f"see what specrun doctor says of it, {ELSE_CPU}",
        ) from error
    _running.add(place)


def memory_of(place: Place) -> Memory:
    """Where KV buffers are for engines there. Raises DeviceError where it cannot be had."""
    known = DEVICES.get(place.device)
    if known is None or known.memory == "cpu":
        return HOST
    memory = OrtDeviceMemory(known.memory, place.device_id)
    memory.check()
    return memory


def provider_of(place: Place) -> str:
    """Name of the provider. Raises DeviceError where this onnxruntime does not have it."""
    if place.provider_library is not None:
        _register(place.provider_library)
    if place.device.startswith(PLUGIN):
        return _plugin(place.device)
    known = DEVICES.get(place.device)
    available = onnxruntime.get_available_providers()
    if known is not None:
        wanted = known.providers[0]
        if wanted in available or wanted in _plugins():
            return wanted
    here = [name for name, value in DEVICES.items() if value.providers[0] in available]
    raise DeviceError(
        f"device: {place.device!r} is not available, this onnxruntime has {', '.join(here)}",
        hint=_install(place.device, known.package if known else None),
    )


def _plugin(device: str) -> str:
    wanted = device.removeprefix(PLUGIN)
    if wanted in (there := _plugins()):
        return wanted
    raise DeviceError(
        f"device: {device!r} is not available, there are providers {', '.join(sorted(there))}",
        hint=f"give its library with --provider-library, {ELSE_CPU}",
    )


def _plugins() -> set[str]:
    """Providers that can be chosen by their devices, of libraries that are registered."""
    return {str(device.ep_name) for device in onnxruntime.get_ep_devices()}


def _install(device: str, package: str | None) -> str:
    if package is None:
        names = ", ".join((*DEVICES, *TENSORRT))
        return f"devices are {names} and {PLUGIN}NAME: use --device cpu"
    if package.startswith("onnxruntime-ep-"):
        return f"pip install {package}, and give its library with --provider-library, {ELSE_CPU}"
    if package == "onnxruntime":
        return f"{device} comes with {package} on other systems: use --device cpu"
    return f"pip uninstall onnxruntime, then pip install {package}, {ELSE_CPU}"


def _with_options(known: Device, place: Place) -> list[tuple[str, dict[str, str]]]:
    options = {"device_id": str(place.device_id)} if known.numbered else {}
    if place.user_compute_stream is not None:
        options["user_compute_stream"] = str(place.user_compute_stream)
    recorded = {"enable_cuda_graph": "1"} if place.cuda_graph else {}
    return [(name, options | (recorded if name == CUDA else {})) for name in known.providers]


def _plugged(provider: str, place: Place) -> Any:
    """The device number ``device_id`` of those that a plug-in provider has."""
    found = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider]
    if place.device_id < len(found):
        return found[place.device_id]
    raise DeviceError(
        f"device_id: {provider} has {len(found)} devices, counted from 0, got {place.device_id}",
        hint="give a smaller --device-id, or leave it out",
    )


def _register(library: str) -> None:
    """Let ONNX Runtime load a provider's library, once per process. Raises DeviceError."""
    path = Path(library)
    real = str(path.resolve())
    if real in _registered:
        return
    hint = f"give the path of the provider's shared library, {ELSE_CPU}"
    if not path.is_file():
        raise DeviceError(f"provider_library: {library}: there is no such file", hint=hint)
    try:
        onnxruntime.register_execution_provider_library(path.name, real)
    except Exception as error:
        raise DeviceError(
            f"provider_library: {library}: does not load: {error}", hint=hint
        ) from error
    _registered.add(real)


def _quiet() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return options
