"""TensorRT as it is installed: its module, what it says, and the place where plans run."""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specrun.errors import DeviceError, EngineError
from specrun.plans import BACKENDS, PRODUCTS, Flavour, TrtDevice
from specrun.trt_cuda import Cuda

if TYPE_CHECKING:
    import tensorrt_rtx as trt

KEPT_MESSAGES = 20


class Messages:
    """What TensorRT said last, warnings and worse; nothing of it is printed."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=KEPT_MESSAGES)

    def add(self, message: str) -> None:
        """Keep one more."""
        self._kept.append(message.strip())

    def clear(self) -> None:
        """Forget what was said, before a call that may fail."""
        self._kept.clear()

    def fail(self, what: str, hint: str | None = None) -> NoReturn:
        """Raise EngineError: ``what``, and what TensorRT said of it."""
        said = "; ".join(self._kept) or "TensorRT gave no reason"
        self.clear()
        raise EngineError(f"{what}: {said}", hint=hint)

    def attempt(self, what: str, call: Callable[[], Any], hint: str | None = None) -> Any:
        """What ``call`` returns. Raises EngineError where that is None or it raises."""
        self.clear()
        try:
            result = call()
        except Exception as error:
            self.add(str(error))
            result = None
        return self.fail(what, hint) if result is None else result


def load(flavour: Flavour) -> Any:
    """The Python module of TensorRT. Raises DeviceError where it is not installed."""
    try:
        return importlib.import_module(flavour)
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"{PRODUCTS[flavour]}: the Python package {flavour} does not load: {error}",
            hint=f"pip install 'specrun[{BACKENDS[flavour]}]'",
        ) from error


def trt_device(flavour: Flavour, library: Any, cuda: Cuda) -> TrtDevice:
    """What is installed, and the device. Nothing of TensorRT is made for it."""
    return TrtDevice(flavour, str(library.__version__), cuda.compute_capability, cuda.name)


def logger(library: Any, messages: Messages) -> trt.ILogger:
    """A logger of TensorRT that hands warnings and worse to ``messages``."""
    base: Any = library.ILogger
    least = int(base.Severity.WARNING)

    class Kept(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)  # as TensorRT asks, else its object is not there

        def log(self, severity: Any, msg: str) -> None:
            if int(severity) <= least:
                messages.add(msg)

    made: trt.ILogger = Kept()
    return made


class KernelCache:
    """Kernels that TensorRT-RTX compiled for a plan on this device, kept from run to run.

    In the user's own cache folder, not beside the plan: it holds code for the device, and an engine
    folder may come from anywhere and may be read-only. TensorRT itself refuses one of another
    release, device or driver, and it is then written anew.
    """

    def __init__(self, key: str, config: trt.IRuntimeConfig, messages: Messages) -> None:
        self.path = cache_folder() / f"{key}.kernels"
        self._cache: trt.IRuntimeCache = config.create_runtime_cache()
        self._messages = messages
        self._read = self._stored()
        if self._read:
            self._cache.deserialize(self._read)

    def use(self, config: trt.IRuntimeConfig) -> None:
        """Let contexts made with ``config`` take kernels from here. Raises EngineError."""
        if not config.set_runtime_cache(self._cache):
            self._messages.fail("the cache of compiled kernels cannot be used")

    def save(self) -> None:
        """Write what was compiled since. Without a place to write, the next run compiles again."""
        blob = bytes(self._cache.serialize())
        if blob == self._read:
            return
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(blob)
            partial.replace(self.path)
        except OSError:
            return
        self._read = blob

    def _stored(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError:
            return b""


def cache_folder() -> Path:
    """Where the user's programs keep what can be made again."""
    if sys.platform == "win32":
        given = os.environ.get("LOCALAPPDATA")
    else:
        given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "specrun" / "tensorrt_rtx"
