"""What a rewrite is asked for, and what became of each site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.forms import Form, FormParams
from mha_export.recognise import Site

ProofStatus = Literal["pass", "imprecise", "fail"]
SiteStatus = Literal["fused", "lowered", "kept", "proof_failed"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Emit ``form``. ``lowered``: the forms asked for cannot say this site; ``reason`` is why."""

    form: Form
    params: FormParams
    reason: str | None = None
    lowered: bool = False


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Leave the site as it is."""

    reason: str


Chooser = Callable[[Site], Choice | Keep]
Loads = Callable[[ir.Model], str | None]
"""Why a runtime does not load a model, or None where it does."""


@dataclass(frozen=True, kw_only=True)
class RewriteSettings:
    """What steers a rewrite.

    Attributes:
        seed: of the proof's inputs.
        battery: ``full`` adversarial battery, or only the ``ordinary`` inputs.
        strict: a failed proof is an error (after all sites were tried) and not an undone rewrite.
        cache: only ``keep``: inputs and outputs of the graph stay as they are.
        prove: False emits without proof; outcomes then carry none.
    """

    seed: int = 0
    battery: Literal["full", "ordinary"] = "full"
    strict: bool = False
    cache: str = "keep"
    prove: bool = True

    def __post_init__(self) -> None:
        if self.cache != "keep":
            raise InputError(
                f"cache {self.cache!r} is not supported by this version; expected 'keep'",
                fix="export the model with its cache inputs and outputs, and leave cache at keep",
            )


@dataclass(frozen=True, kw_only=True)
class ProofCase:
    """One input of a proof: the worst output's error and bound."""

    name: str
    status: ProofStatus
    max_err: float
    bound: float
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "max_err": self.max_err,
            "bound": self.bound,
        }


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How a replacement was compared with the oracle and with what it replaces.

    Attributes:
        engine: what ran the graphs.
        against: ``oracle``, ``original``; the latter is missing where the engine cannot run it.
        cases: number of inputs. max_err, bound: of the case with the largest ``max_err / bound``.
        representative: the structurally equal site that was run; None where it is this one.
        weights: ``full`` for the site that was run; ``structural`` for one that is equal to it in
            everything but values that enter as operands.
        reason: why it failed, or what it could not do.
    """

    engine: str
    against: tuple[str, ...]
    status: ProofStatus
    cases: int = 0
    max_err: float | None = None
    bound: float | None = None
    representative: str | None = None
    weights: Literal["structural", "sampled", "full"] = "full"
    by_case: tuple[ProofCase, ...] = ()
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "against": list(self.against),
            "cases": self.cases,
            "max_err": self.max_err,
            "bound": self.bound,
            "representative": self.representative,
            "weights": self.weights,
            "by_case": [case.to_json() for case in self.by_case],
        }


@dataclass(frozen=True, kw_only=True)
class SiteOutcome:
    """What became of one site.

    Attributes:
        form: name of the form that was (or, with ``proof_failed``, was to be) emitted.
        status: ``fused`` in the form asked for; ``lowered`` to ``primitive`` because no form asked
            for can say it; ``kept`` as it was; ``proof_failed``: kept because the proof failed.
        reason: why it is not ``fused``, or what to know about it.
    """

    status: SiteStatus
    form: str | None = None
    params: FormParams | None = None
    reason: str | None = None
    proof: Proof | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "params": {} if self.params is None else self.params.to_json(),
            "status": self.status,
            "reason": self.reason,
            "proof": None if self.proof is None else self.proof.to_json(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """The new model, and the outcome of every site by id, in graph order.

    Attributes:
        fixed_lengths: symbols of the graph inputs whose length the exporter wrote into the graph,
            with that length: there alone the model runs, rewritten or not.
        refusal: why the model was not loaded, where the one before the rewrite is not either.
    """

    model: ir.Model
    fixed_lengths: Mapping[str, int] = field(default_factory=dict)
    refusal: str | None = None
    outcomes: Mapping[str, SiteOutcome] = field(default_factory=dict)
