"""The harness itself: a graph with one feature changed must be found out."""

from __future__ import annotations

from typing import Any

import pytest
from features import FEATURES
from runtimes import OrtSession, compare

from mha_export.cases import cases
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, build_model, form_named
from mha_export.spec import AttentionSpec, CausalAlignment, MaskSpec, RotaryStyle

PLANTED: dict[str, tuple[str, Any]] = {
    "scale": ("scale-1", lambda spec: spec.replace(scale=0.9999)),
    "softcap": ("softcap", lambda spec: spec.replace(softcap=None)),
    "window-off-by-one": (
        "window-left",
        lambda spec: spec.replace(mask=MaskSpec(causal=spec.mask.causal, left_window=3)),
    ),
    "window-dropped": (
        "cache-window",
        lambda spec: spec.replace(mask=MaskSpec(causal=spec.mask.causal)),
    ),
    "alignment": (
        "causal-bottom-right",
        lambda spec: spec.replace(mask=MaskSpec(causal=CausalAlignment.TOP_LEFT)),
    ),
    "causal-dropped": ("causal-square", lambda spec: spec.replace(mask=MaskSpec())),
    "sink-dropped": ("sinks-square", lambda spec: spec.replace(sinks=False)),
    "norm-dropped": ("rms", lambda spec: spec.replace(qk_norm=None)),
    "rotary-dropped": ("rotary", lambda spec: spec.replace(rotary=None)),
    "rotary-style": (
        "rotary",
        lambda spec: spec.replace(rotary=FEATURES["rotary-interleaved"].rotary or spec.rotary),
    ),
    "bias-dropped": ("bias", lambda spec: spec.replace(mask=MaskSpec())),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name: str) -> None:
    feature, change = PLANTED[name]
    right: AttentionSpec = FEATURES[feature]
    wrong: AttentionSpec = change(right)
    assert wrong != right
    session = OrtSession(build_model(form_named("primitive"), wrong, FormParams(opset=17)))
    found = []
    for case in cases(right, battery="quick"):
        outputs = oracle_outputs(right, session.run(feeds(right, case.inputs)))
        found += list(compare(right, case, outputs))
    assert found


def test_the_styles_of_rotary_differ() -> None:
    rotary = FEATURES["rotary-interleaved"].rotary
    assert rotary is not None
    assert rotary.style is RotaryStyle.INTERLEAVED
