"""Tries one thing that may crash, hang or print, and writes what it found as JSON.

``python -m specrun.probe KIND NAME`` is run by :mod:`specrun.probes` in a process of its own, so
that nothing worse can happen than that this process ends. Kinds are the keys of ``KINDS``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any


def provider(name: str) -> dict[str, Any]:
    """Whether ONNX Runtime runs a model of one node with the provider ``name``."""
    import onnxruntime

    from specrun.ort_devices import PROBE

    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(PROBE, options, providers=[name], enable_fallback=0)
    used = session.get_providers()[0]
    return {} if used == name else {"why": f"onnxruntime would run on {used} instead"}


def tensorrt(module: str) -> dict[str, Any]:
    """Version of a TensorRT that loads, and the SMs that it builds for without one of them."""
    found = importlib.import_module(module)
    capabilities = getattr(found, "ComputeCapability", None)
    sms = [name[2:] for name in dir(capabilities) if name.startswith("SM")]
    return {"version": str(found.__version__), "builds_for": sorted(map(int, sms))}


def gpus(_: str) -> dict[str, Any]:
    """The GPUs that NVIDIA's driver knows."""
    driver: Any = importlib.import_module("cuda.bindings.driver")

    def ask(function: str, *arguments: Any) -> Any:
        status, *found = getattr(driver, function)(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{function}: {status.name}")
        return found[0] if found else None

    ask("cuInit", 0)
    version = ask("cuDriverGetVersion")
    named = f"CUDA {version // 1000}.{version % 1000 // 10}"
    attributes = driver.CUdevice_attribute
    major = attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    devices = [ask("cuDeviceGet", index) for index in range(ask("cuDeviceGetCount"))]
    return {
        "gpus": [
            {
                "name": ask("cuDeviceGetName", 256, device).split(b"\0")[0].decode(),
                "sm": 10 * ask("cuDeviceGetAttribute", major, device)
                + ask("cuDeviceGetAttribute", minor, device),
                "driver": named,
                "memory_bytes": int(ask("cuDeviceTotalMem", device)),
            }
            for device in devices
        ]
    }


KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "provider": provider,
    "tensorrt": tensorrt,
    "gpus": gpus,
}


def main(kind: str, name: str) -> None:
    """Write what was found; ``why``: it is not there, and that is the reason."""
    try:
        found = KINDS[kind](name)
    except Exception as error:
        found = {"why": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
