"""What a caller may ask of a job, checked once; the command line passes its options here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mha_export.errors import InputError
from mha_export.frontends import ExporterName, SourceOptions
from mha_export.spec import DType

if TYPE_CHECKING:
    from mha_export.targets import Limits


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the symbolic dimensions, and whole shapes of inputs, of one measurement."""

    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """How a source is turned into a graph.

    Attributes:
        shapes: ``INPUT=N,N`` lines: sizes of a torch module's sample inputs.
        dims: ``NAME=N`` lines: sizes that the model's symbolic dimensions must know.
        exporter: which of torch's exporters; see
            :class:`~mha_export.frontends.SourceOptions`.
    """

    task: str | None = None
    dtype: DType | None = None
    opset: int | None = None
    shapes: Sequence[str] = ()
    dims: Sequence[str] = ()
    exporter: ExporterName = "auto"
    trust_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", DType(self.dtype))

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The sizes that were asked for."""
        return parse_workloads(self.dims, self.shapes)

    def for_frontend(self) -> SourceOptions:
        return SourceOptions(
            task=self.task,
            opset=self.opset,
            shapes=self.workloads[0].shapes,
            exporter=self.exporter,
            trust_code=self.trust_code,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What an export is asked for beyond its source and targets.

    Attributes:
        cache: ``keep``, ``concat`` or ``static``: see docs/caches.md.
        split: ``none``, or ``prefill-decode``: a decoder as two graphs.
        weights: ``keep``, or how the linear layers' weights are quantised; see
            :mod:`mha_export.rewrite.quantised`.
    """

    form: str | None = None
    cache: str = "keep"
    split: str = "none"
    weights: str = "keep"
    strict: bool = False
    require_fused: bool = False
    plan: Path | None = None
    standalone: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {"cache": ("keep", "concat", "static"), "split": ("none", "prefill-decode")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(values)}"
                )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a measurement is asked for.

    Attributes:
        time_limit: seconds that one build, load or run may take; None: 600, and 120 when quick.
        memory_limit: MiB that a target's process and its descendants may use; None: four fifths
            of what is free.
        budget: seconds for the run, shared out among its targets; None: no limit; 120 when quick.
    """

    workloads: tuple[Workload, ...] = (Workload(),)
    inputs: Path | None = None
    vs: str | None = None
    quick: bool = False
    seed: int = 0
    time_limit: float | None = None
    memory_limit: int | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.vs not in (None, "raw"):
            raise InputError(
                f"unknown baseline --vs {self.vs!r}",
                fix="use --vs raw: the unmodified model on the same target",
            )
        for name in ("time_limit", "memory_limit", "budget"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise InputError(f"{name} is {limit}; expected a number above 0")

    @property
    def limits(self) -> Limits:
        """What each request to a target's process may use."""
        from mha_export.targets import Limits  # which reads the process table

        seconds = self.time_limit or (120.0 if self.quick else 600.0)
        return Limits(seconds=seconds, memory_mb=self.memory_limit)

    @property
    def most_seconds(self) -> float | None:
        """The budget that holds."""
        return self.budget or (120.0 if self.quick else None)

    @classmethod
    def from_options(
        cls, *, dims: Iterable[str] = (), shapes: Iterable[str] = (), **options: Any
    ) -> RunSettings:
        return cls(workloads=parse_workloads(dims, shapes), **options)


def split_settings(
    options: Mapping[str, Any],
) -> tuple[SourceSettings, ExportSettings, RunSettings]:
    """Divide the options of ``check`` (or of one of its parts) among the jobs they steer.

    Errors:
        InputError: an option that steers none of them, or a value that is none.
    """
    kinds = (SourceSettings, ExportSettings, RunSettings)
    known = sorted({item.name for kind in kinds for item in fields(kind)} - {"workloads"})
    for name in options:
        if name not in known:
            raise InputError(f"there is no option {name!r}", fix=f"one of {', '.join(known)}")
    return (
        SourceSettings(**_named_in(SourceSettings, options)),
        ExportSettings(**_named_in(ExportSettings, options)),
        RunSettings.from_options(
            dims=options.get("dims", ()),
            shapes=options.get("shapes", ()),
            **_named_in(RunSettings, options),
        ),
    )


def _named_in(settings: type, options: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(settings)}
    return {name: value for name, value in options.items() if name in names}


def parse_workloads(dims: Iterable[str], shapes: Iterable[str]) -> tuple[Workload, ...]:
    """``batch=2 seq=16 seq=128`` is two workloads: every combination of the values given.

    Errors:
        InputError: not ``NAME=N``, or a size below 0.
    """
    sizes: dict[str, list[int]] = {}
    for text in dims:
        name, value = _name_and_value("--dim", text, "NAME=N, e.g. --dim batch=2")
        sizes.setdefault(name, []).append(_size("--dim", text, value))
    whole = {}
    for text in shapes:
        name, value = _name_and_value("--shape", text, "INPUT=N,N, e.g. --shape input_ids=2,128")
        whole[name] = tuple(_size("--shape", text, size) for size in value.split(","))
    combinations = itertools.product(*sizes.values())
    return tuple(
        Workload(dims=dict(zip(sizes, combination, strict=True)), shapes=whole)
        for combination in combinations
    )


def _name_and_value(option: str, text: str, expected: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InputError(f"{option} {text!r} is not understood", fix=f"write {expected}")
    return name.strip(), value


def _size(option: str, text: str, value: str) -> int:
    try:
        size = int(value)
    except ValueError:
        size = -1
    if size < 0:
        raise InputError(
            f"{option} {text!r}: {value!r} is not a size", fix="use whole numbers of 0 or more"
        )
    return size
