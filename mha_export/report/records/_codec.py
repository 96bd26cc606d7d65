"""Frozen dataclasses to JSON and back, by their own type hints.

JSON has no NaN and no infinity; a figure that is one is written as the text ``"nan"``, ``"inf"`` or
``"-inf"`` and read back as the number. Names that a record does not know are ignored when read, so
a file written by a later minor version still loads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self, Union, get_args, get_origin

from mha_export.errors import InputError

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: Any) -> Any:
    """``value`` as JSON-ready data; mappings come out sorted by key, records in field order.

    Errors:
        TypeError: a value that is no record, mapping, sequence or JSON scalar.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return to_plain(value.item())
    raise TypeError(f"{type(value).__name__} has no JSON form; expected a record or a plain value")


def _number(value: float) -> float | int | str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value.is_integer() and abs(value) < 2**53:
        return int(value)  # 1 and 1.0 are one number in JSON: one spelling, so equal bytes
    return float(value)


class Record:
    """Base of every record: ``to_json`` and ``from_json`` follow the dataclass fields."""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data, stable: equal records give equal bytes."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The record ``data`` states.

        Errors:
            InputError: a required name is missing, or a value has the wrong type.
        """
        record: Self = _record(cls, data, cls.__name__)
        return record


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _record(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: expected an object, got {type(data).__name__}")
    hints, values = _hints(cls), {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            values[field.name] = _value(
                hints[field.name], data[field.name], f"{where}.{field.name}"
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where}: {field.name!r} is missing")
    return cls(**values)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if origin in (Union, types.UnionType):
        return _one_of(args, data, where)
    if origin is Literal:
        if data not in args:
            raise InputError(f"{where}: got {data!r}; expected one of {', '.join(map(str, args))}")
        return data
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise InputError(f"{where}: expected a list, got {type(data).__name__}")
        return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: expected an object, got {type(data).__name__}")
        return {str(k): _value(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(hint, data, where)
    return _scalar(hint, data, where)


def _one_of(options: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    for option in rest[:-1]:
        try:
            return _value(option, data, where)
        except InputError:
            continue
    return _value(rest[-1], data, where)


def _scalar(hint: Any, data: Any, where: str) -> Any:
    is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
    if hint is float and isinstance(data, str) and data in _NON_FINITE:
        return _NON_FINITE[data]
    if hint is float and is_number:
        return float(data)
    if hint is int and is_number and int(data) == data:  # 2.0 is an integer in JSON Schema
        return int(data)
    if hint in (str, bool) and isinstance(data, hint):
        return data
    raise InputError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {data!r:.60}")
