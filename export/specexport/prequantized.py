"""Checkpoints whose linear layers are stored in integers: GPTQ, AWQ and compressed-tensors.

A layer ``X`` has no ``X.weight`` there but packed integers, scales and zero points beside each
other; together they are read as one tensor, in floats or, where an engine's blocks can hold them,
as the integers that they are. Packed means: several values in an int32, the first in the lowest
bits; with AWQ in another order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specexport.errors import WeightsError
from specexport.integers import (
    BlockForm,
    BlockParts,
    Integers,
    as_blocks,
    dequantized,
    unpack,
)
from specexport.safetensors_files import SafeTensor
from specexport.weights import Array, Shape, StoredTensor
from specgraphs.formats import BLOCK_SIZES

READ = "gptq (4 and 8 bits), awq (gemm), compressed-tensors (pack-quantized, 4 and 8 bits)"
WORD = 32  # bits of a packed integer
FLOATS = ("F16", "BF16", "F32")
# Which of the 8 values of a word an output is, in AWQ.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class NotReadError(Exception):
    """A quantization that is not read; the message is what it is, for an error."""


@dataclass(frozen=True)
class Scheme:
    """How the quantized layers of a checkpoint are stored.

    ``size``: columns that share a scale, None for a whole row. ``shift``: what is added to a stored
    zero point. ``needed``: parts of a layer that could lack in other schemes.
    """

    method: str
    bits: int
    size: int | None
    shift: int = 0
    needed: tuple[str, ...] = ()


def scheme(config: Mapping[str, Any]) -> Scheme:
    """What a ``quantization_config`` says. Raises NotReadError for what cannot be read."""
    method = config.get("quant_method", "of an unnamed kind")
    parse = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(method)
    if parse is None:
        raise NotReadError(method)
    found = parse(config)
    if found.bits not in (4, 8) or (method == "awq" and found.bits != 4):
        raise NotReadError(f"{method}, {found.bits} bits")
    if found.size is not None and found.size < 1:
        raise NotReadError(f"{method}, groups of {found.size}")
    return found


def _gptq(config: Mapping[str, Any]) -> Scheme:
    form = str(config.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise NotReadError(f"gptq, checkpoint format {form}")
    # The first version stores every zero point less one.
    shift, needed = 1 if form == "gptq" else 0, ("g_idx",) if config.get("desc_act") else ()
    return Scheme("gptq", _bits(config, "bits"), _size(config), shift, needed)


def _awq(config: Mapping[str, Any]) -> Scheme:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise NotReadError(f"awq, version {version}")
    if not config.get("zero_point", True):
        raise NotReadError("awq without zero points")
    return Scheme("awq", _bits(config, "bits"), _size(config))


def _compressed(config: Mapping[str, Any]) -> Scheme:
    method = "compressed-tensors"
    groups = list(dict(config.get("config_groups") or {}).values())
    if not groups:
        raise NotReadError(f"{method} without config_groups")
    kinds = {str(group.get("format") or config.get("format")) for group in groups}
    if kinds != {"pack-quantized"}:
        raise NotReadError(f"{method}, format {', '.join(sorted(kinds)) or config.get('format')}")
    if config.get("transform_config"):
        raise NotReadError(f"{method} with transforms")
    if any(group.get("input_activations") for group in groups):
        raise NotReadError(f"{method} with quantized activations")
    found = {_compressed_group(group.get("weights") or {}) for group in groups}
    if len(found) != 1:
        raise NotReadError(f"{method}, layers of {len(found)} kinds")
    return found.pop()


def _compressed_group(weights: Mapping[str, Any]) -> Scheme:
    method, strategy = "compressed-tensors", weights.get("strategy")
    if strategy not in ("group", "channel") or weights.get("type", "int") != "int":
        raise NotReadError(f"{method}, {weights.get('type')} per {strategy}")
    size = _size(weights) if strategy == "group" else None
    needed: tuple[str, ...] = () if weights.get("symmetric", True) else ("weight_zero_point",)
    if weights.get("actorder") == "group":
        needed += ("weight_g_idx",)
    return Scheme(method, _bits(weights, "num_bits"), size, needed=needed)


def _bits(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise NotReadError(f"{name} is {value!r}")
    return value


def _size(config: Mapping[str, Any]) -> int | None:
    value = config.get("group_size")
    if not isinstance(value, int):
        raise NotReadError(f"group_size is {value!r}")
    return None if value == -1 else value


def grouped(stored: Mapping[str, SafeTensor], found: Scheme) -> dict[str, StoredTensor]:
    """Tensors by name, the parts of a quantized layer ``X`` as one ``X.weight``.

    Raises WeightsError for a layer whose parts are missing or do not fit each other.
    """
    kind = KINDS[found.method]
    suffix = f".{kind.MAIN}"
    layers = [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]
    tensors: dict[str, StoredTensor] = dict(stored)
    for layer in layers:
        parts = {part: tensors.pop(f"{layer}.{part}", None) for part in kind.PARTS}
        there = {part: one for part, one in parts.items() if isinstance(one, SafeTensor)}
        packed = kind(layer, found, there)
        packed.check()
        tensors[f"{layer}.weight"] = packed
    return tensors


@dataclass(frozen=True)
class Packed(ABC):
    """The weight of one layer, ``[outputs, inputs]``; ``parts``: tensors of the file by suffix."""

    MAIN: ClassVar[str]
    PARTS: ClassVar[tuple[str, ...]]
    ORDER: ClassVar[str]  # the part that says which group a column is in

    name: str
    scheme: Scheme
    parts: Mapping[str, SafeTensor] = field(repr=False)

    @property
    def dtype(self) -> np.dtype[Any]:
        """What ``rows`` returns."""
        return np.dtype(np.float32)

    @property
    def stored(self) -> str:
        """Method and bits, for example ``gptq in 4 bits``."""
        return f"{self.scheme.method} in {self.scheme.bits} bits"

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """``(outputs, inputs)``, as the packed integers have them."""

    @abstractmethod
    def wanted(self) -> dict[str, tuple[tuple[str, ...], Shape]]:
        """Every part that there must be: its types and its shape."""

    @abstractmethod
    def integers(self, start: int, stop: int) -> Integers:
        """Rows ``start <= row < stop`` as they are stored."""

    def check(self) -> None:
        """Raises WeightsError naming the layer and the part that is missing or misshapen."""
        main = self.parts[self.MAIN]
        if len(main.shape) != 2 or 0 in main.shape or main.stored != "I32":
            raise WeightsError(
                f"{main.path}: {main.name} is {main.stored} {list(main.shape)}, must be an I32"
                " matrix",
                hint="download the checkpoint again",
            )
        wanted = self.wanted()
        for part in self.scheme.needed:
            wanted.setdefault(part, ((), ()))  # of which there is none
        for part, (types, shape) in wanted.items():
            tensor = self.parts.get(part)
            if tensor is None:
                raise WeightsError(
                    f"{main.path}: {self.name}.{part} is missing beside {self.MAIN}",
                    hint="download the checkpoint again",
                )
            if tensor.shape != shape or tensor.stored not in types:
                raise WeightsError(
                    f"{tensor.path}: {tensor.name} is {tensor.stored} {list(tensor.shape)}, must be"
                    f" {' or '.join(types)} {list(shape)} beside {self.MAIN} {list(main.shape)}",
                    hint="the weights must be those that quantization_config describes",
                )

    def rows(self, start: int, stop: int) -> Array:
        """Rows ``start <= row < stop`` in float32."""
        return dequantized(self.integers(start, stop), self._groups)

    def form(self) -> BlockForm | None:
        """Bits and block size; no size where an engine's blocks cannot hold the integers."""
        obstacle = self._obstacle
        return BlockForm(self.scheme.bits, None if obstacle else self.scheme.size, obstacle)

    def blocks(self, start: int, stop: int) -> BlockParts:
        """Rows ``start <= row < stop``, bit for bit; only without an obstacle."""
        assert self.scheme.size is not None
        return as_blocks(self.integers(start, stop), self.scheme.bits, self.scheme.size)

    @cached_property
    def _obstacle(self) -> str:
        size, bits = self.scheme.size, self.scheme.bits
        if not np.array_equal(self._groups, self._in_order()):
            return "act-order"
        if size is None:
            return "one scale for a whole row"
        if size not in BLOCK_SIZES:
            return f"groups of {size} columns"
        if bits == 8 and (self.integers(0, self.shape[0]).zeros != 128).any():
            return "8 bits with zero points other than 128"
        return ""

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """``[inputs]``: the group of each column."""
        order = self.parts.get(self.ORDER)
        if order is None:
            return self._in_order()
        groups = order.rows(0, order.shape[0]).astype(np.int64)
        if groups.min() < 0 or groups.max() >= self.num_groups:
            raise WeightsError(
                f"{order.path}: {order.name} names group {int(groups.max())} of {self.num_groups}",
                hint="download the checkpoint again",
            )
        return groups

    def _in_order(self) -> NDArray[np.int64]:
        columns = np.arange(self.shape[1], dtype=np.int64)
        return columns * 0 if self.scheme.size is None else columns // self.scheme.size

    @property
    def num_groups(self) -> int:
        """Groups of columns that share a scale."""
        return 1 if self.scheme.size is None else -(-self.shape[1] // self.scheme.size)

    @property
    def per_word(self) -> int:
        """Values in a packed int32."""
        return WORD // self.scheme.bits

    def unpacked(self, words: Array) -> NDArray[np.uint8]:
        """``[..., words]`` int32 to ``[..., values]``, the lowest bits first."""
        values = np.ascontiguousarray(words).view(np.uint8)
        return values if self.scheme.bits == 8 else unpack(values)

    def words(self, start: int, stop: int) -> slice:
        """The packed integers that hold values ``start <= value < stop``."""
        return slice(start // self.per_word, -(-stop // self.per_word))


class _Transposed(Packed):
    """Scales and zero points by group and output, the zero points packed along the outputs."""

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """``[rows, groups]``."""
        return self.parts["scales"].columns(start, stop).T.astype(np.float32)

    def along_outputs(self, part: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Values of outputs ``start <= output < stop`` of a part that is packed along them:
        ``[stop - start, rows of the part]``."""
        held = self.words(start, stop)
        values = self.ordered(self.unpacked(self.parts[part].columns(held.start, held.stop)))
        first = held.start * self.per_word
        return values[:, start - first : stop - first].T

    def ordered(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """``[..., values]``, unpacked, in the order of the outputs."""
        return values


class Gptq(_Transposed):
    """qweight int32 ``[inputs / 8, outputs]`` (in 4 bits), packed along the inputs; qzeros
    ``[groups, outputs / 8]``; scales ``[groups, outputs]``; g_idx ``[inputs]``, which may lack."""

    MAIN, ORDER = "qweight", "g_idx"
    PARTS = ("qweight", "qzeros", "scales", "g_idx")

    @property
    def shape(self) -> Shape:
        """``(outputs, inputs)``."""
        rows, outputs = self.parts["qweight"].shape
        return outputs, rows * self.per_word

    def wanted(self) -> dict[str, tuple[tuple[str, ...], Shape]]:
        """Every part that there must be: its types and its shape."""
        outputs, inputs = self.shape
        order = {"g_idx": (("I32", "I64"), (inputs,))} if "g_idx" in self.parts else {}
        words = self.words(0, outputs).stop
        return {
            "qzeros": (("I32",), (self.num_groups, words)),
            "scales": (FLOATS, (self.num_groups, outputs)),
            **order,
        }

    def integers(self, start: int, stop: int) -> Integers:
        """Rows ``start <= row < stop`` as they are stored.

        A zero point stored as the largest integer stands for 0, one less having wrapped around:
        quantizers choose it among the integers of a value.
        """
        values = self.unpacked(self.parts["qweight"].columns(start, stop).T)
        zeros = self.along_outputs("qzeros", start, stop) + np.uint8(self.scheme.shift)
        return Integers(
            values, self.scales(start, stop), zeros & np.uint8((1 << self.scheme.bits) - 1)
        )


class Awq(_Transposed):
    """qweight int32 ``[inputs, outputs / 8]``, packed along the outputs; qzeros
    ``[groups, outputs / 8]``; scales ``[groups, outputs]``."""

    MAIN, ORDER = "qweight", ""
    PARTS = ("qweight", "qzeros", "scales")

    @property
    def shape(self) -> Shape:
        """``(outputs, inputs)``."""
        inputs, words = self.parts["qweight"].shape
        return words * self.per_word, inputs

    def wanted(self) -> dict[str, tuple[tuple[str, ...], Shape]]:
        """Every part that there must be: its types and its shape."""
        outputs = self.shape[0]
        return {
            "qzeros": (("I32",), (self.num_groups, outputs // self.per_word)),
            "scales": (FLOATS, (self.num_groups, outputs)),
        }

    def integers(self, start: int, stop: int) -> Integers:
        """Rows ``start <= row < stop`` as they are stored."""
        values, zeros = (self.along_outputs(p, start, stop) for p in ("qweight", "qzeros"))
        return Integers(values, self.scales(start, stop), zeros)

    def ordered(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """``[..., values]``, unpacked, in the order of the outputs."""
        per_word = len(AWQ_PLACES)
        words = values.reshape(*values.shape[:-1], values.shape[-1] // per_word, per_word)
        return words[..., AWQ_PLACES].reshape(values.shape)


class Compressed(Packed):
    """weight_packed int32 ``[outputs, inputs / 8]`` (in 4 bits); weight_scale ``[outputs,
    groups]``; weight_shape ``[2]``; where they are not all half of the range weight_zero_point,
    int32 ``[outputs / 8, groups]``, packed along the outputs, or signed int8 ``[outputs, groups]``;
    with act-order weight_g_idx ``[inputs]``."""

    MAIN, ORDER = "weight_packed", "weight_g_idx"
    PARTS = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    )

    @property
    def shape(self) -> Shape:
        """``(outputs, inputs)``; the last word of a row may be filled."""
        return self.parts["weight_packed"].shape[0], self._inputs

    @cached_property
    def _inputs(self) -> int:
        said = self.parts.get("weight_shape")
        if said is None or said.shape != (2,):  # check() will say so
            return self.parts["weight_packed"].shape[1] * self.per_word
        return int(said.rows(0, 2)[1])

    def wanted(self) -> dict[str, tuple[tuple[str, ...], Shape]]:
        """Every part that there must be: its types and its shape."""
        outputs, inputs = self.shape
        found: dict[str, tuple[tuple[str, ...], Shape]] = {
            "weight_packed": (("I32",), (outputs, self.words(0, inputs).stop)),
            "weight_shape": (("I32", "I64"), (2,)),
            "weight_scale": (FLOATS, (outputs, self.num_groups)),
        }
        zeros = self.parts.get("weight_zero_point")
        if zeros is not None:
            rows = outputs if zeros.stored == "I8" else self.words(0, outputs).stop
            found["weight_zero_point"] = (("I8", "I32"), (rows, self.num_groups))
        if self.ORDER in self.parts:
            found[self.ORDER] = (("I32", "I64"), (inputs,))
        return found

    def integers(self, start: int, stop: int) -> Integers:
        """Rows ``start <= row < stop`` as they are stored."""
        values = self.unpacked(self.parts["weight_packed"].rows(start, stop))
        scales = self.parts["weight_scale"].rows(start, stop).astype(np.float32)
        return Integers(values[:, : self.shape[1]], scales, self._zeros(start, stop))

    def _zeros(self, start: int, stop: int) -> NDArray[np.uint8]:
        half, zeros = np.uint8(1 << (self.scheme.bits - 1)), self.parts.get("weight_zero_point")
        if zeros is None:
            return np.full((stop - start, self.num_groups), half, np.uint8)
        if zeros.stored == "I8":
            return zeros.rows(start, stop).view(np.uint8) + half
        held = self.words(start, stop)
        values = self.unpacked(zeros.rows(held.start, held.stop).T)
        first = held.start * self.per_word
        return values[:, start - first : stop - first].T


KINDS: dict[str, type[Gptq] | type[Awq] | type[Compressed]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
}
