"""ONNX's attention cases with the op's body in its place, through the recogniser and a rewrite.

The body is forty small nodes that ONNX itself states Attention by. Each case has one attention to
be found there, with the spec that its twin in op form states, or what the body says otherwise; the
graph rewritten to a form has to give the stored outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_cases import Expressed, NodeCase, attention_cases, read_case
from onnx_forms import Outcome, runtime_for
from runtimes import SESSIONS

from mha_export.forms import FormParams, form_named
from mha_export.recognise import Recognition, Site, recognise
from mha_export.rewrite import Choice, RewriteSettings, rewrite
from mha_export.spec import AttentionSpec, DType, EmptyRow
from mha_export.targets import evaluator_of

FORMS = ("primitive", "onnx")
"""What a found attention is rewritten to: plain ops, and the op whose body was found."""

ROUNDED = {DType.FP16: 2.0**-9, DType.BF16: 2.0**-6}
"""Relative error of a scale whose square root is rounded twice."""

ADDED_UP = "the body adds its masks up to one tensor, which is bound whole as a bias"
HIDES_NOTHING = "with one query the diagonal hides nothing that the lengths do not"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """One expanded case, what its twin in op form states, and what was recognised."""

    case: NodeCase
    twin: Expressed
    recognition: Recognition

    @property
    def site(self) -> Site:
        """The one attention.

        Errors:
            LookupError: there is none, or there are several; with the first refusal's words.
        """
        verdicts = self.recognition.verdicts
        if len(verdicts) != 1 or not isinstance(verdicts[0], Site):
            reasons = [v.reason.message for v in self.recognition.rejections]
            raise LookupError(f"{len(verdicts)} verdicts, expected one attention: {reasons}")
        return verdicts[0]


@functools.cache
def found_cases() -> tuple[Found, ...]:
    """Every attention case in expanded form, recognised."""
    twins = {case.name: case for case in attention_cases()}
    return tuple(_found(case, twins) for case in attention_cases(expanded=True))


def _found(case: NodeCase, twins: Mapping[str, NodeCase]) -> Found:
    twin = read_case(twins[case.name.replace("_expanded", "")])
    assert isinstance(twin, Expressed)
    model = ir.serde.deserialize_model(case.model)
    return Found(case=case, twin=twin, recognition=recognise(model))


def differences(found: AttentionSpec, stated: AttentionSpec) -> dict[str, tuple[Any, Any]]:
    """Fields (``mask.causal``) in which two specs differ, with both values.

    Scales that are one in fp32 do not.
    """
    return {
        name: (one, other)
        for name, one, other in _fields(found.resolved(), stated.resolved())
        if one != other and not (name == "scale" and math.isclose(one, other, rel_tol=2.0**-22))
    }


def _fields(found: AttentionSpec, stated: AttentionSpec) -> Iterator[tuple[str, Any, Any]]:
    for prefix, one, other in (("", found, stated), ("mask.", found.mask, stated.mask)):
        for field in dataclasses.fields(one):
            if prefix + field.name != "mask":
                yield prefix + field.name, getattr(one, field.name), getattr(other, field.name)


def said_otherwise(found: Found) -> dict[str, str | None]:
    """Each difference from what the op form states, with why both mean the same (None: unknown)."""
    one, other = found.site.spec, found.twin.spec
    return {name: _reason(name, pair, one, other) for name, pair in differences(one, other).items()}


def _reason(
    name: str, pair: tuple[Any, Any], one: AttentionSpec, other: AttentionSpec
) -> str | None:
    here, there = pair
    data = other.mask.keep is not None or other.mask.bias is not None
    if name == "cross":
        return "whether keys come from another sequence is not the op's affair"
    if name == "scale" and math.isclose(here, there, rel_tol=ROUNDED.get(other.io_dtype, 0.0)):
        return "the body rounds the root of the scale"
    if name == "mask.empty_row" and here is EmptyRow.NOT_APPLICABLE and not data:
        return "by positions alone no row is empty at these sizes"
    if name.startswith("mask.") and one.mask.bias is not None and data:
        return ADDED_UP
    if name == "mask.causal" and here is None and one.uses_lengths and other.q_len == 1:
        return HIDES_NOTHING
    return None


def expanded_outcome(found: Found, form: str) -> Outcome:
    """Rewrite one case to one form, run it and compare at the case's own tolerance.

    ``kept`` where the site may not be replaced: then the reason is its own.
    """
    runtime = runtime_for(found.twin)
    name = found.case.name
    try:
        site = found.site
    except LookupError as error:
        return Outcome(name, form, runtime, "fail", str(error))
    if site.cannot_replace is not None:
        return Outcome(name, form, runtime, "kept", site.cannot_replace.message)
    params = FormParams(opset=found.case.opset)
    verdict = form_named(form).supports(site.spec, params)
    if not verdict:
        return Outcome(name, form, runtime, "unsupported", str(verdict))
    rewritten = rewrite(
        found.recognition,
        lambda site: Choice(form=form_named(form), params=params),
        evaluator=evaluator_of(runtime),
        settings=RewriteSettings(prove=False),
    )
    try:
        outputs = SESSIONS[runtime](rewritten.model).run(dict(found.case.inputs))
    except Exception as error:  # a runtime's refusal is a result here
        return Outcome(name, form, runtime, "fail", str(error).splitlines()[0][:300])
    for output, expected in found.case.outputs.items():
        try:
            np.testing.assert_allclose(
                outputs[output].astype(np.float64),
                expected.astype(np.float64),
                rtol=found.case.rtol,
                atol=found.case.atol,
            )
        except AssertionError as error:
            text = " ".join(str(error).split())
            return Outcome(name, form, runtime, "fail", f"{output}: {text[:200]}")
    return Outcome(name, form, runtime, "pass")
