"""For pyright, which does not see into the binary module; tests/test_trt_types.py looks closely."""

from typing import Any

def __getattr__(name: str) -> Any: ...
