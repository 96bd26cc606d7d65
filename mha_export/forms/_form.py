"""What a form is: one way to state an attention in ONNX.

A form is one file of this package that defines ``FORM``. It never looks at the graph it emits
into; it sees a spec, its own parameters and the operand values, and returns the values it made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import onnx_ir as ir

from mha_export.operands import Heads, Operands
from mha_export.spec import AttentionSpec

if TYPE_CHECKING:
    from mha_export.forms._scope import Scope


@dataclass(frozen=True, kw_only=True)
class FormParams:
    """Data that steers a form; recorded, hashed, part of a plan.

    Attributes:
        opset: version of ``ai.onnx`` the emitted nodes may use.
        options: form-specific settings (tile count, packed weights, ...), each a plain value.
    """

    opset: int = 23
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return {"opset": self.opset, **dict(sorted(self.options.items()))}


@dataclass(frozen=True, kw_only=True)
class Supported:
    """The form states this spec exactly.

    ``by_other_means`` lists each feature the form has no native word for and how it is said
    instead, e.g. ``{"left_window": "additive bias"}``.
    """

    by_other_means: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """The form cannot state this spec: the first feature that stops it, and what it would need."""

    feature: str
    needs: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.feature}: needs {self.needs}"


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """Values a form made: the context, and what else the spec asked for."""

    output: Heads
    qk_output: ir.Value | None = None
    present_key: Heads | None = None
    present_value: Heads | None = None

    @property
    def heads(self) -> dict[str, Heads]:
        """What has heads, by role; ``output`` first, then what a cache has become."""
        made = {
            "output": self.output,
            "present_key": self.present_key,
            "present_value": self.present_value,
        }
        return {role: heads for role, heads in made.items() if heads is not None}


@runtime_checkable
class Form(Protocol):
    """One way to state an attention."""

    @property
    def name(self) -> str: ...

    @property
    def min_opset(self) -> int:
        """Least ``ai.onnx`` opset this form can be emitted at."""
        ...

    @property
    def summary(self) -> str: ...

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        """Whether, and by which means, the spec can be stated. Never builds anything."""
        ...

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        """Append the nodes to ``scope`` and return the values they produce.

        ``operands.query.layout`` and the others may be any :class:`~mha_export.operands.Layout`;
        the output comes in whichever layout is natural to the form (the caller converts).

        Errors:
            ValueError: ``supports`` would have said no, or an operand is of a kind that the spec
                does not tell and the form has no place for; the message says which.
        """
        ...
