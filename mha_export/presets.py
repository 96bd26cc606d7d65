"""Specs from YAML: files of the user's, and the published architectures that ship along.

A file is a mapping with the fields of :class:`mha_export.spec.AttentionSpec`, nested where the
spec is (``mask``, ``rotary``, ``qk_norm``, ``cache``, ``projections``, ``latent``), enumerations by
their value, plus two lines of its own: ``about`` and ``source``. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mha_export.errors import InputError
from mha_export.spec import AttentionSpec

_PLACES = (
    Path(__file__).parent.parent / "graphs" / "specs",  # a checkout
    Path(__file__).parent / "_presets",  # an installed wheel
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published architecture's attention.

    Attributes:
        name: of the file, ``llama-3-8b``.
        about: what it is, in a line.
        source: paper and model card that its numbers come from.
        path: the YAML file.
    """

    name: str
    about: str
    source: str
    spec: AttentionSpec
    path: Path


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def load_preset(name: str) -> AttentionSpec:
    """The spec of a preset.

    Errors:
        InputError: no preset of that name; the message lists the nearest ones.
    """
    return describe_preset(name).spec


def describe_preset(name: str) -> Preset:
    """A preset with where its numbers come from.

    Errors:
        InputError: no preset of that name; the message lists the nearest ones.
    """
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        raise InputError(
            f"no preset is called {name!r}",
            fix=f"the nearest are {', '.join(near)}" if near else f"one of {', '.join(names)}",
        )
    path = _folder() / f"{name}.yaml"
    mapping = _read(path)
    return Preset(
        name=name,
        about=str(mapping.pop("about", "")),
        source=str(mapping.pop("source", "")),
        spec=spec_from_mapping(mapping, where=str(path)),
        path=path,
    )


def spec_from_yaml(path: str | Path) -> AttentionSpec:
    """Read a spec from a YAML file; ``about`` and ``source`` lines are allowed and ignored.

    Errors:
        InputError: the file is missing, unreadable, not YAML, empty or not a mapping; or a key or
            value in it is wrong. SpecError (an InputError): the spec contradicts itself.
    """
    mapping = _read(Path(path))
    for key in ("about", "source"):
        mapping.pop(key, None)
    return spec_from_mapping(mapping, where=str(path))


def spec_from_mapping(mapping: Mapping[str, Any], *, where: str = "spec") -> AttentionSpec:
    """A spec from plain values, strictly: every key known, every value of its type.

    Args:
        mapping: fields of the spec; nested mappings for its parts; enumerations by value.
        where: what to call the source in a message.

    Errors:
        InputError: an unknown or missing key, or a value of another type.
    """
    return _record(AttentionSpec, mapping, where)


def spec_to_mapping(spec: AttentionSpec) -> dict[str, Any]:
    """Plain values that :func:`spec_from_mapping` reads back; fields at their default left out."""
    return _plain_record(spec)


@functools.cache
def _folder() -> Path:
    for place in _PLACES:
        if place.is_dir():
            return place
    raise InputError(
        f"the presets are missing: none of {', '.join(map(str, _PLACES))} exists",
        fix="install mha-export again",
    )


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = " ".join(str(error).split())
        raise InputError(f"{path}: not YAML: {place}") from error
    if loaded is None:
        raise InputError(f"{path}: the file is empty", fix="state q_heads, kv_heads and head_dim")
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: expected a mapping of spec fields, got {_kind(loaded)}")
    return loaded


def _record(cls: type[T], value: object, where: str) -> T:
    """An instance of a dataclass from a mapping of its fields."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: expected a mapping, got {_kind(value)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    for key in value:
        if key not in fields:
            raise InputError(f"{where}: unknown key {key!r}", fix=_instead_of(str(key), cls))
    missing = [
        name
        for name, field in fields.items()
        if name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} missing")
    return cls(**{str(k): _value(hints[str(k)], v, f"{where}: {k}") for k, v in value.items()})


def _instead_of(key: str, cls: type[Any]) -> str:
    """What to write for a key that ``cls`` doesn't have: its place, a near name, or all names."""
    hints = get_type_hints(cls)
    for name, hint in hints.items():
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part) and key in {f.name for f in dataclasses.fields(part)}:
                return f"{key} belongs under {name!r}: write {{{name}: {{{key}: ...}}}}"
    near = difflib.get_close_matches(key, hints, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hints)}"


def _value(hint: Any, value: object, where: str) -> Any:
    """``value`` as the type a field declares."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        found = _one_of(option, value, where)
        if found is not _NO:
            return found
    wanted = " or ".join(_named(option) for option in options)
    raise InputError(f"{where} is {value!r}; expected {wanted}")


_NO = object()


def _one_of(option: Any, value: object, where: str) -> Any:
    """``value`` as one alternative of a union, or ``_NO``."""
    if option is type(None):
        return None if value is None else _NO
    if get_origin(option) is Literal:
        return value if isinstance(value, str) and value in get_args(option) else _NO
    if get_origin(option) is tuple:
        if not isinstance(value, (list, tuple)):
            return _NO
        inner = get_args(option)[0]
        return tuple(_value(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(option) and isinstance(option, type):
        return _NO if value is None else _record(option, value, where)
    if isinstance(option, type) and issubclass(option, Enum):
        return option(value) if value in [member.value for member in option] else _NO
    if option is float:
        return _float(value)
    if option is int and isinstance(value, bool):
        return _NO
    return value if isinstance(value, option) else _NO


def _float(value: object) -> Any:
    """Also ``1e-6``, which YAML 1.1 takes for text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return _NO
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _NO
    return _NO if math.isnan(number) else number


def _named(option: Any) -> str:
    if option is type(None):
        return "nothing"
    if get_origin(option) is Literal:
        return " or ".join(map(repr, get_args(option)))
    if get_origin(option) is tuple:
        return "a list"
    if isinstance(option, type) and issubclass(option, Enum):
        return "one of " + ", ".join(str(member.value) for member in option)
    names = {int: "a whole number", float: "a number", str: "a name", bool: "true or false"}
    return names.get(option, "a mapping")


def _kind(value: object) -> str:
    return {list: "a list", str: "text", type(None): "nothing"}.get(
        type(value), type(value).__name__
    )


def _plain_record(record: Any) -> dict[str, Any]:
    plain = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if value != default or type(value) is not type(default):
            plain[field.name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return _plain_record(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
