"""The Python module of the TensorRT that this process builds with.

``trt`` has the types of ``tensorrt_rtx``, which full TensorRT shares. One process builds with one
flavour: which one is said once, by :func:`use`, before anything of ``trt`` is asked for.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorrt_rtx as trt
else:

    class _Chosen:
        """Stands for the module until it is chosen; importing it here would load a GPU library."""

        module: ModuleType | None = None

        def __getattr__(self, name: str) -> Any:
            if self.module is None:
                raise RuntimeError("use(module) comes first")
            return getattr(self.module, name)

    trt = _Chosen()

__all__ = ["trt", "use"]


def use(module: ModuleType) -> None:
    """Build with this module from here on; another one than before is refused."""
    chosen: Any = trt
    before = vars(chosen).get("module")
    if before not in (None, module):
        raise RuntimeError(f"this process builds with {before.__name__} already")
    chosen.module = module
