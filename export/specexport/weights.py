"""The weights of a checkpoint, read in pieces under the names of the text model's state dict.

Nothing here holds a checkpoint: a tensor is known by its place in a file and read row by row. A row
is one step of the first axis: a token of an embedding, an output of a projection, a whole expert of
a merged expert tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specexport.errors import WeightsError
from specexport.integers import BlockForm, BlockParts

Array = NDArray[Any]
Shape = tuple[int, ...]


class StoredTensor(Protocol):
    """A tensor in a file. ``dtype`` is what ``rows`` returns, ``stored`` how the file has it."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def stored(self) -> str: ...

    def rows(self, start: int, stop: int) -> Array:
        """Rows ``start <= row < stop`` as ``[stop - start, *shape[1:]]``, owned by the caller."""
        ...


@runtime_checkable
class Stack(Protocol):
    """What a tensor of more than two axes offers besides: pieces of an entry of its first axis."""

    def matrix_rows(self, start: int, stop: int) -> Array:
        """Rows ``start <= row < stop`` of the matrix of its last axis."""
        ...


@runtime_checkable
class InIntegers(Protocol):
    """What a stored tensor offers besides, if the file may have it in integers with scales."""

    def form(self) -> BlockForm | None:
        """In which integers; None for floats and for what has no such form."""
        ...

    def blocks(self, start: int, stop: int) -> BlockParts:
        """Rows of the matrix of its last axis, bit for bit; only where the form has a size."""
        ...


@dataclass(frozen=True)
class MergedExperts:
    """Experts stored one by one, seen as the one tensor that the model has.

    ``experts[e]`` are the matrices that make up expert e, one below the other (gate, up)::

        merged[e] = concatenate(experts[e], axis=0)
    """

    experts: tuple[tuple[StoredTensor, ...], ...]

    def __post_init__(self) -> None:
        if not self.experts or not all(self.experts):
            raise ValueError("merged experts need at least one expert with one matrix")
        shapes = {tuple(part.shape for part in parts) for parts in self.experts}
        widths = {shape[1:] for parts in shapes for shape in parts}
        if len(shapes) != 1 or len(widths) != 1:
            raise ValueError(f"experts must all have the same shapes, got {sorted(shapes)}")

    @property
    def shape(self) -> Shape:
        """``[experts, rows of one expert, columns]``."""
        parts = self.experts[0]
        return (len(self.experts), sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the first matrix; all of a checkpoint's experts are stored alike."""
        return self.experts[0][0].dtype

    @property
    def stored(self) -> str:
        """How the file has the first matrix."""
        return self.experts[0][0].stored

    def rows(self, start: int, stop: int) -> Array:
        """Experts ``start <= e < stop``, each read matrix by matrix into its place."""
        inner = self.shape[1]
        rows = self.matrix_rows(start * inner, stop * inner)
        return rows.reshape(stop - start, *self.shape[1:])

    def matrix_rows(self, start: int, stop: int) -> Array:
        """Rows of all experts one below the other."""
        out = np.empty((stop - start, self.shape[-1]), self.dtype)
        row = 0
        for part, first, last in self._pieces(start, stop):
            out[row : row + last - first] = part.rows(first, last)
            row += last - first
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[StoredTensor, int, int]]:
        """Matrices and the range of rows of each that rows ``start:stop`` of all are."""
        row = start
        while row < stop:
            expert, inside = divmod(row, self.shape[1])
            for part in self.experts[expert]:
                if inside < part.shape[0]:
                    last = min(part.shape[0], inside + stop - row)
                    yield part, inside, last
                    row += last - inside
                    break
                inside -= part.shape[0]

    def form(self) -> BlockForm | None:
        """That of every matrix of every expert; where they differ, one that no block fits."""
        forms = {_form(part) for parts in self.experts for part in parts}
        if len(forms) == 1:
            return forms.pop()
        bits = max(form.bits for form in forms if form is not None)
        return BlockForm(bits, None, "experts that are stored in different ways")

    def blocks(self, start: int, stop: int) -> BlockParts:
        """Rows of all experts one below the other."""
        pieces = [
            part.blocks(first, last)
            for part, first, last in self._pieces(start, stop)
            if isinstance(part, InIntegers)
        ]
        zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
        return BlockParts(
            np.concatenate([piece.values for piece in pieces]),
            np.concatenate([piece.scales for piece in pieces]),
            np.concatenate(zeros) if zeros else None,
        )


class Weights:
    """Tensors by name, read in pieces.

    ``tensors``: name -> where it is stored. ``aliases``: name -> the name whose bytes it shares (a
    head tied to the embedding); an alias is listed, read and measured like any other name, and
    ``canonical`` says under which name to store it, once.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str] | None = None
    ) -> None:
        self._tensors = dict(tensors)
        self._aliases = dict(aliases or {})

    def names(self) -> list[str]:
        """Every name of the state dict that the checkpoint gives, aliases included, sorted."""
        return sorted(self._tensors.keys() | self._aliases.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self._aliases

    def alias(self, name: str) -> str | None:
        """The name whose bytes ``name`` shares, or None if it has its own."""
        return self._aliases.get(name)

    def canonical(self, name: str) -> str:
        """The name under which the bytes of ``name`` are stored: itself, unless it is an alias."""
        return self._aliases.get(name, name)

    def shape(self, name: str) -> Shape:
        """Shape in the orientation of the state dict."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Dtype of the arrays that reading gives: float32, float16, or the stored integers.

        bfloat16 and GGUF blocks come as float32; see ``stored`` for what the file has.
        """
        return self._tensor(name).dtype

    def stored(self, name: str) -> str:
        """Type in the file, as the file calls it: ``BF16``, ``F32``, ``Q4_K``, ``I64``."""
        return self._tensor(name).stored

    def nbytes(self, name: str) -> int:
        """Bytes of the whole tensor as it is read (``dtype(name)``), not as it is stored."""
        tensor = self._tensor(name)
        return prod(tensor.shape) * tensor.dtype.itemsize

    @property
    def total_nbytes(self) -> int:
        """Bytes of all tensors as they are read, those that share bytes once."""
        return sum(self.nbytes(name) for name in self._tensors)

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Rows ``start <= row < stop`` of the first axis, ``[stop - start, *shape[1:]]``.

        A scalar has the one row 0 and comes as shape ``[]``. The array is a copy that nothing else
        holds. Raises WeightsError for a range outside of the tensor.
        """
        tensor = self._tensor(name)
        count = tensor.shape[0] if tensor.shape else 1
        if not 0 <= start <= stop <= count:
            raise WeightsError(f"{name}: rows {start}:{stop} are not within 0:{count}")
        return tensor.rows(start, stop)

    def read(self, name: str) -> Array:
        """The whole tensor at once; for small ones."""
        shape = self.shape(name)
        return self.read_rows(name, 0, shape[0] if shape else 1)

    def chunks(self, name: str, max_bytes: int, index: int | None = None) -> Iterator[Array]:
        """The tensor in order, as arrays of at most ``max_bytes`` bytes but at least one row.

        A tensor of more than one axis comes as the matrix ``[rows, columns]`` of its last one.
        ``index``: only that entry of the first axis.
        """
        tensor = self._tensor(name)
        for start, stop in _spans(tensor, max_bytes, index):
            yield _matrix_rows(tensor, start, stop)

    def form(self, name: str) -> BlockForm | None:
        """In which integers the file has the tensor; None for floats and other forms."""
        return _form(self._tensor(name))

    def block_chunks(
        self, name: str, max_bytes: int, index: int | None = None
    ) -> Iterator[BlockParts]:
        """The integers and scales of the file in order, in the pieces that ``chunks`` gives.

        Raises WeightsError where the form of the tensor has no size.
        """
        tensor = self._tensor(name)
        form = _form(tensor)
        if not isinstance(tensor, InIntegers) or form is None or form.size is None:
            raise WeightsError(f"{name}: is not stored in blocks")
        for start, stop in _spans(tensor, max_bytes, index):
            yield tensor.blocks(start, stop)

    def check_complete(self, expected: Mapping[str, Shape]) -> None:
        """Raises WeightsError naming the tensors that are missing or not of the expected shape."""
        missing = [name for name in expected if name not in self]
        if missing:
            raise WeightsError(
                f"the checkpoint lacks {listed(missing)}",
                hint="download it again, or check that config.json belongs to these weights",
            )
        wrong = [
            f"{name} is {list(self.shape(name))}, must be {list(shape)}"
            for name, shape in expected.items()
            if self.shape(name) != tuple(shape)
        ]
        if wrong:
            raise WeightsError(
                f"the weights do not fit their config: {listed(wrong)}",
                hint="config.json and the weights must come from the same checkpoint",
            )

    def _tensor(self, name: str) -> StoredTensor:
        try:
            return self._tensors[self.canonical(name)]
        except KeyError:
            raise WeightsError(f"{name}: no such tensor in the checkpoint") from None


def _form(tensor: StoredTensor) -> BlockForm | None:
    return tensor.form() if isinstance(tensor, InIntegers) else None


def _spans(tensor: StoredTensor, max_bytes: int, index: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of rows of the matrix of the last axis, of at most ``max_bytes`` or one row.

    ``index``: of that entry of the first axis only.
    """
    count, *rest = tensor.shape or (1,)
    inner, columns = prod(rest[:-1]), rest[-1] if rest else 1
    start, stop = (0, count * inner) if index is None else (index * inner, (index + 1) * inner)
    step = max(1, max_bytes // max(1, columns * tensor.dtype.itemsize))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _matrix_rows(tensor: StoredTensor, start: int, stop: int) -> Array:
    """Rows of ``tensor`` as a matrix, whatever number of axes it has."""
    if len(tensor.shape) < 3:
        return tensor.rows(start, stop)
    if isinstance(tensor, Stack):
        return tensor.matrix_rows(start, stop)
    inner = prod(tensor.shape[1:-1])
    first, last = start // inner, -(-stop // inner)
    whole = tensor.rows(first, last).reshape(-1, tensor.shape[-1])
    return whole[start - first * inner : stop - first * inner]


def listed(items: list[str], limit: int = 5) -> str:
    """The first few items and how many more there are."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")
