"""JSON to frozen dataclasses, strictly: every field known, present and of its declared type."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specrun.reading import shown

T = TypeVar("T")


class DecodeError(ValueError):
    """A field that is not what its dataclass declares; the message starts with its path."""


def decode(cls: type[T], data: object, path: str = "") -> T:
    """Build ``cls`` from parsed JSON.

    Raises DecodeError naming the path of the field for unknown, missing or mistyped fields, and
    for values that the dataclass itself refuses in ``__post_init__``.
    """
    where = path or "(top level)"
    if not isinstance(data, Mapping):
        raise DecodeError(f"{where}: must be an object, got {shown(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            raise DecodeError(f"{where}: field must be one of {sorted(fields)}, got {shown(name)}")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{path}.{name}" if path else name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{where}: field {name!r} is missing")
    try:
        return cls(**values)
    except DecodeError:
        raise
    except ValueError as error:
        raise DecodeError(f"{where}: {error}") from error


def encode(value: object) -> Any:
    """The inverse of :func:`decode`: plain JSON values, enums by value, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def _value(hint: Any, data: object, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union(get_args(hint), data, path)
    if origin is tuple:
        return _tuple(get_args(hint), data, path)
    if origin is dict:
        key_hint, item_hint = get_args(hint)
        if not isinstance(data, Mapping):
            raise DecodeError(f"{path}: must be an object, got {shown(data)}")
        return {
            _value(key_hint, key, f"{path} key"): _value(item_hint, item, f"{path}.{_step(key)}")
            for key, item in data.items()
        }
    if origin is typing.Literal:
        if data not in get_args(hint) or isinstance(data, bool):
            raise DecodeError(f"{path}: must be one of {list(get_args(hint))}, got {shown(data)}")
        return data
    if hint is Any:
        return data
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            choices = [member.value for member in hint]
            raise DecodeError(f"{path}: must be one of {choices}, got {shown(data)}") from None
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, data, path)
    return _scalar(typing.cast(type, hint), data, path)


def _union(choices: tuple[Any, ...], data: object, path: str) -> Any:
    if data is None and type(None) in choices:
        return None
    errors = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _value(choice, data, path)
        except DecodeError as error:
            errors.append(str(error))
    raise DecodeError(errors[0] if len(errors) == 1 else f"{path}: got {shown(data)}")


def _tuple(args: tuple[Any, ...], data: object, path: str) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise DecodeError(f"{path}: must be a list, got {shown(data)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_value(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if len(data) != len(args):
        raise DecodeError(f"{path}: must have {len(args)} items, got {len(data)}")
    pairs = enumerate(zip(args, data, strict=True))
    return tuple(_value(arg, item, f"{path}[{i}]") for i, (arg, item) in pairs)


def _scalar(hint: type, data: object, path: str) -> Any:
    number = isinstance(data, (int, float)) and not isinstance(data, bool)
    if hint is float and number:
        return float(typing.cast(float, data))
    right = isinstance(data, hint) and (hint is bool or not isinstance(data, bool))
    if not right:
        raise DecodeError(f"{path}: must be {hint.__name__}, got {shown(data)}")
    return data


def _step(key: object) -> str:
    """A key in the path of a message."""
    text = str(key)
    return text if len(text) <= 60 and text.isprintable() else shown(text)
