"""What a target can do, as probed: by form, feature and dtype.

The exporter asks :func:`capabilities_for`: the matrix of a capability file that the user names,
else the one probed on this machine for this version of the runtime, else one measured elsewhere and
shipped with the package, else nothing (it says so).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from mha_export.errors import InputError
from mha_export.spec import AttentionSpec
from mha_export.states import CapabilityState
from mha_export.targets import _platform
from mha_export.targets._features import features_of
from mha_export.targets._target import Availability, Target

Source = Literal["given", "probed here", "shipped", "none"]
GIVEN = "MHA_EXPORT_CAPABILITIES"
"""Names a file that ``doctor -o`` wrote, here or on the machine that an export is for."""
USABLE: frozenset[str] = frozenset({"ok", "imprecise"})
PLAIN_FORMS = frozenset({"primitive", "tiled", "grouped"})
"""Forms of ordinary operators only, which every runtime has: knowing nothing is no refusal."""
NUMBER_FORMATS = frozenset({"f32", "f16", "bf16"})
REVISION = 2
"""Of the probes themselves: a cached matrix of another revision is probed again."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One probe's finding.

    Attributes:
        form: a form's name, or an operator's (``com.microsoft.GroupQueryAttention``).
        placement: where its floating-point nodes ran, or what the builder made of the attention.
        message: the runtime's own words, or what was wrong.
    """

    form: str
    feature: str
    dtype: str
    state: CapabilityState
    max_err: float | None = None
    placement: str | None = None
    message: str | None = None

    def __post_init__(self) -> None:
        if self.state not in get_args(CapabilityState):
            raise ValueError(f"capability state '{self.state}' is not one of the contract's")

    def to_json(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "feature": self.feature,
            "dtype": self.dtype,
            "state": self.state,
            "max_err": self.max_err,
            "placement": self.placement,
            "message": self.message,
        }


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The matrix of one target.

    Attributes:
        measured: date (ISO) of the measurement; None where there is none.
        source: ``given`` (a capability file), ``probed here``, ``shipped`` (measured elsewhere) or
            ``none``.
    """

    target: str
    precision: str | None = None
    runtime: str | None = None
    version: str | None = None
    device: str | None = None
    measured: str | None = None
    source: Source = "none"
    rows: tuple[Capability, ...] = ()

    def state(self, form: str, feature: str, dtype: str) -> CapabilityState:
        """What was found for one cell; ``not-probed`` where nobody looked."""
        row = self._index().get((form, feature, dtype))
        return "not-probed" if row is None else row.state

    def refusal(self, form: str, spec: AttentionSpec) -> str | None:
        """Why ``form`` must not be emitted for ``spec`` on this target; None where it may.

        Every feature of the spec that the form can state by itself was probed, so one bad cell
        refuses; a form with operators of its own of which nothing is known is refused too.
        ``primitive`` is never refused, and neither is anything where nothing at all is known of
        the target.
        """
        if form == "primitive" or not self.rows:
            return None
        dtype, index = spec.io_dtype.value, self._index()
        found = {
            feature: index[form, feature, dtype]
            for feature in features_of(spec)
            if (form, feature, dtype) in index
        }
        for feature, row in found.items():
            if row.state not in USABLE:
                words = f": {row.message.splitlines()[0]}" if row.message else ""
                return f"{self.target} {self.version}: {feature} in {dtype} is {row.state}{words}"
        if not found and form not in PLAIN_FORMS:
            return f"{self.target} {self.version}: {form} in {dtype} was not probed"
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "precision": self.precision,
            "runtime": self.runtime,
            "version": self.version,
            "device": self.device,
            "measured": self.measured,
            "capabilities": [row.to_json() for row in self.rows],
        }

    def _index(self) -> Mapping[tuple[str, str, str], Capability]:
        return _indexed(self.rows)


@cache
def _indexed(rows: tuple[Capability, ...]) -> Mapping[tuple[str, str, str], Capability]:
    return {(row.form, row.feature, row.dtype): row for row in rows}


def capabilities_from_json(document: Mapping[str, Any], *, source: Source) -> Capabilities:
    """Read what :meth:`Capabilities.to_json` wrote.

    Errors:
        ValueError: a state that the contract does not know. KeyError: a missing field.
    """
    return Capabilities(
        target=document["target"],
        precision=document.get("precision"),
        runtime=document.get("runtime"),
        version=document.get("version"),
        device=document.get("device"),
        measured=document.get("measured"),
        source=source,
        rows=tuple(
            Capability(**{name: row.get(name) for name in Capability.__dataclass_fields__})
            for row in document["capabilities"]
        ),
    )


def capabilities_for(target: Target, precision: str | None = None) -> Capabilities:
    """The best matrix known of a target: given, else probed here, else shipped, else an empty one.

    Nothing is probed here; :func:`mha_export.targets.probe` does that. What a runtime supports does
    not hang on the number format it is told to compute in, so such a precision without a matrix of
    its own has the target's; so has the one that the target takes when it is told none.

    Errors:
        mha_export.errors.InputError: ``MHA_EXPORT_CAPABILITIES`` names no capability file.
    """
    found = (
        given(target.name, precision)
        or read_cached(target, precision, target.availability())
        or shipped(target.name, precision)
    )
    if found is None and precision in NUMBER_FORMATS | set(target.precisions[:1]):
        return capabilities_for(target)
    return found or Capabilities(target=target.name, precision=precision)


def given(target: str, precision: str | None = None) -> Capabilities | None:
    """The matrix of a target in the capability file that ``MHA_EXPORT_CAPABILITIES`` names.

    A target of which the file holds no probe (one absent from that machine) has none.

    Errors:
        mha_export.errors.InputError: the file is missing, or is no capability file.
    """
    path = os.environ.get(GIVEN)
    return (
        _given(path).get(target if precision is None else f"{target}:{precision}") if path else None
    )


@cache
def _given(path: str) -> Mapping[str, Capabilities]:
    try:
        rows = json.loads(Path(path).read_text("utf-8"))["targets"]
        found = [
            capabilities_from_json(
                row | dict(zip(("target", "precision"), row["target"].split(":"), strict=False)),
                source="given",
            )
            for row in rows
        ]
        names = [row["target"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{GIVEN} is '{path}': no capability file: {type(error).__name__}: {error}",
            fix="write one with mha-export doctor -o caps.json, or unset it",
        ) from error
    return {name: matrix for name, matrix in zip(names, found, strict=True) if matrix.rows}


@cache
def shipped(target: str, precision: str | None = None) -> Capabilities | None:
    """The matrix of a target that came with the package, measured on another machine."""
    file = resources.files("mha_export.targets") / "data" / f"{_stem(target, precision)}.json"
    if not file.is_file():
        return None
    return capabilities_from_json(json.loads(file.read_text("utf-8")), source="shipped")


def cache_file(target: Target, precision: str | None, availability: Availability) -> Path:
    """Where the matrix for this runtime version and device is kept."""
    facts = (REVISION, availability.version, availability.device)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    name = f"{_stem(target.name, precision)}-{key}.json"
    return _platform.cache_dir() / "capabilities" / name


def read_cached(
    target: Target, precision: str | None, availability: Availability
) -> Capabilities | None:
    """What was probed here before; None where nothing was, or the file is damaged."""
    try:
        text = cache_file(target, precision, availability).read_text("utf-8")
        return capabilities_from_json(json.loads(text), source="probed here")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_cached(
    target: Target, precision: str | None, availability: Availability, found: Capabilities
) -> None:
    """Keep a matrix for the next export; a cache that cannot be written is no error."""
    file = cache_file(target, precision, availability)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_suffix(".new")
        staged.write_text(json.dumps(found.to_json(), indent=1) + "\n", encoding="utf-8")
        _platform.replace_file(staged, file)
    except OSError:
        return


class Unfinished:
    """The cells of a probing under way, kept as they come: one that was ended goes on from there.

    Args:
        file: where the whole matrix will be; the cells lie beside it until then.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.with_suffix(".cells.jsonl")
        self._known: dict[str, Capability] = {}
        with contextlib.suppress(OSError):
            for line in self._file.read_text("utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off in mid-line
                    row = json.loads(line)
                    self._known[row["probe"]] = Capability(**row["cell"])

    def get(self, probe: str) -> Capability | None:
        """The cell that the graph with this digest gave."""
        return self._known.get(probe)

    def add(self, probe: str, cell: Capability) -> None:
        line = json.dumps({"probe": probe, "cell": cell.to_json()})
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _stem(target: str, precision: str | None) -> str:
    return target if precision is None else f"{target}.{precision}"
