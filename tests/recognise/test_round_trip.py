"""What a form builds is recognised as what it was built from, spelled out or fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mha_export.forms import FormParams, all_forms, build_model, form_named
from mha_export.recognise import Site, recognise
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
    RotaryStyle,
)

PLAIN = AttentionSpec(
    q_heads=4, kv_heads=4, head_dim=8, projections=ProjectionSpec(d_model=32), q_len="s", kv_len="s"
)
CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
DECODER = PLAIN.replace(
    kv_heads=2, mask=CAUSAL, rotary=RotarySpec(dim=8, theta=1e4), cache=CacheSpec(), kv_len="t"
)

SPECS: dict[str, AttentionSpec] = {
    "plain": PLAIN,
    "scale": PLAIN.replace(scale=0.3),
    "causal": PLAIN.replace(mask=MaskSpec(causal=CausalAlignment.TOP_LEFT)),
    "window": PLAIN.replace(mask=MaskSpec(causal=CausalAlignment.TOP_LEFT, left_window=2)),
    "padding": PLAIN.replace(mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM)),
    "bias": PLAIN.replace(mask=MaskSpec(bias=("batch", 4, "s", "s"))),
    "grouped": PLAIN.replace(kv_heads=2),
    "value-wider": PLAIN.replace(v_head_dim=12),
    "softcap": PLAIN.replace(softcap=3.0),
    "sinks": PLAIN.replace(sinks=True),
    "decoder": DECODER,
    "decoder-with-norm": DECODER.replace(qk_norm=QkNormSpec(kind="rms")),
    "decoder-interleaved": DECODER.replace(
        rotary=RotarySpec(dim=4, theta=1e4, style=RotaryStyle.INTERLEAVED)
    ),
    "static-cache": DECODER.replace(
        cache=CacheSpec(growth="static", max_length=16), kv_len=16
    ),
    "key-prefix": PLAIN.replace(
        kv_heads=1, v_head_dim=6, value_source="key_prefix", mask=CAUSAL, cache=CacheSpec(),
        kv_len="t",
    ),
    "cross": PLAIN.replace(cross=True, kv_len="t"),
    "mean": PLAIN.replace(combine="mean", projections=ProjectionSpec(d_model=32, output=False)),
}  # fmt: skip

OPSETS = {"onnx": 24, "portable": 23, "trt": 23}
"""At which a form is emitted; 18 for the others."""


def _cases() -> list[Any]:
    found = []
    for form in all_forms():
        opset = OPSETS.get(form, 18)
        for name, spec in SPECS.items():
            if form_named(form).supports(spec, FormParams(opset=opset)):
                found.append(pytest.param(spec, form, opset, id=f"{name}-{form}"))
    return found


@pytest.mark.parametrize(("spec", "form", "opset"), _cases())
def test_the_spec_comes_back(spec: AttentionSpec, form: str, opset: int) -> None:
    model = build_model(form_named(form), spec, FormParams(opset=opset))
    (site,) = recognise(model).verdicts
    assert isinstance(site, Site), site.reason
    wanted, found = spec.resolved().to_json(), site.spec.to_json()
    assert found.pop("scale") == pytest.approx(wanted.pop("scale"), rel=1e-6)
    for stated in (found, wanted):
        stated["fill"] = "-inf" if stated["fill"] == "min" else stated["fill"]  # both absorb
        del stated["dims"]
    if wanted["empty_row"] == "n/a":  # whatever the op has for a row that cannot be
        found["empty_row"] = "n/a"
    assert found == wanted


@pytest.mark.parametrize("name", ["decoder", "static-cache", "key-prefix", "sinks", "softcap"])
def test_the_operands_give_what_the_graph_gives(
    name: str, random_feeds: Callable[..., dict[str, np.ndarray]], assert_sound: Callable[..., None]
) -> None:
    model = build_model(form_named("primitive"), SPECS[name], FormParams(opset=18))
    sizes = {"batch": 2, "s": 3, "t": 8, "past_len": 5}
    feeds = random_feeds(model, **sizes)
    if "kv_lengths" in feeds:
        feeds["kv_lengths"] = np.array([3, 11], np.int64)
    assert_sound(recognise(model), feeds)
