"""What the loop asks of whatever runs an engine: ONNX Runtime or TensorRT, on the host or a device.

::

    Session    an engine that is open; knows the memory its KV buffers must be in
      prepare  -> Run      all tensors bound; refill ``inputs``, ``run()``, read ``outputs``
    Memory     gives KV buffers
      zeros    -> Buffer   bound as an input and, for what the engine writes, as an output too

Inputs and outputs of a run are the host's: small ones are copied by every run, large ones (logits,
hidden states) when somebody looks at them, as an output may be any object that NumPy can make an
array of (``__array__``) and that slices like one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from specrun.contract import DType
from specrun.manifest import EngineSpec


class Buffer(Protocol):
    """A KV buffer ``[batch, heads, capacity, head size]`` in the memory of a session."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        ...

    @property
    def host(self) -> NDArray[Any] | None:
        """The buffer itself where it is the host's memory, else None."""
        ...

    def read(self) -> NDArray[Any]:
        """Its values: ``host``, or a copy of what is on the device."""
        ...

    def write(self, values: NDArray[Any]) -> None:
        """Replace all values by ``values``, of the same shape and dtype."""
        ...

    def copy_rows(self, source: Buffer, lengths: Sequence[int]) -> None:
        """Take the first ``lengths[b]`` rows of every sequence b from a smaller buffer."""
        ...


class Memory(Protocol):
    """Where KV buffers are allocated."""

    @property
    def device(self) -> str:
        """``cpu``, ``cuda``."""
        ...

    def zeros(self, name: str, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """A buffer of zeros; ``name`` is for messages. Raises ContextFull where memory runs out."""
        ...


class Run(Protocol):
    """One run of an engine with all its buffers bound."""

    @property
    def name(self) -> str:
        """File of the engine, for messages."""
        ...

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]:
        """Filled by the caller before each run."""
        ...

    @property
    def outputs(self) -> Mapping[str, NDArray[Any]]:
        """Valid until the next run."""
        ...

    def run(self) -> None:
        """Run the engine. Raises EngineError."""
        ...


class Session(Protocol):
    """An engine that is open."""

    @property
    def spec(self) -> EngineSpec:
        """Its entry in the manifest."""
        ...

    @property
    def memory(self) -> Memory:
        """Where the KV buffers it is given must be."""
        ...

    @property
    def provider(self) -> str:
        """What runs it, as stats show it: ``CPUExecutionProvider``, ``TensorRT 11.4 (SM 89)``."""
        ...

    @property
    def most_rows(self) -> int | None:
        """Most rows of a run, None for any number."""
        ...

    @property
    def most_wanted(self) -> int | None:
        """Most of them whose logits can be had, None for all."""
        ...

    def prepare(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        past: Mapping[str, Buffer],
        present: Mapping[str, Buffer],
    ) -> Run:
        """A run on these arrays and buffers.

        ``inputs`` and ``outputs`` name arrays of the sizes of this run, for some outputs or all;
        ``past`` and ``present`` name KV buffers that are read, and that are written in place.
        Raises EngineError.
        """
        ...
