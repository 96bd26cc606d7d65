"""``ort-attention`` over every feature it states: the battery enters through identity weights."""

from __future__ import annotations

import numpy as np
import pytest
from features import FEATURES
from runtimes import OrtSession, compare

from mha_export.cases import cases
from mha_export.feeds import feeds, oracle_outputs
from mha_export.forms import FormParams, build_model, form_named
from mha_export.spec import AttentionSpec, ProjectionSpec

FORM = form_named("ort-attention")
PARAMS = FormParams(opset=17)


def core(feature: str) -> AttentionSpec:
    """The feature where the op can have it: one input, as many heads for keys."""
    spec = FEATURES[feature]
    return spec.replace(kv_heads=spec.q_heads, q_len="s", kv_len="s")


def projected(spec: AttentionSpec, packing: str) -> AttentionSpec:
    """Behind projections of a width that holds query, key and value side by side."""
    width = spec.q_heads * (2 * spec.head_dim + spec.value_dim)
    packed = ProjectionSpec(d_model=width, packing=packing, output=False)
    return spec.replace(projections=packed)


def identity(spec: AttentionSpec, packing: str) -> dict[str, np.ndarray]:
    """Weights that cut the hidden states into query, key and value."""
    whole = np.eye(spec.q_heads * (2 * spec.head_dim + spec.value_dim), dtype=np.float32)
    if packing == "packed":
        return {"w_qkv": whole}
    cuts = [spec.q_heads * spec.head_dim, 2 * spec.q_heads * spec.head_dim]
    parts = np.split(whole, cuts, axis=1)
    return dict(zip(("w_q", "w_k", "w_v"), map(np.ascontiguousarray, parts), strict=True))


STATED = [name for name in FEATURES if not FEATURES[name].cross and FEATURES[name].latent is None]


@pytest.mark.parametrize("feature", STATED)
def test_a_feature_is_right_or_refused(feature: str) -> None:
    spec = core(feature)
    if spec.value_source != "own":
        return
    packing = "packed" if len(feature) % 2 else "separate"
    layer = projected(spec, packing)
    verdict = FORM.supports(layer, PARAMS)
    if not verdict:
        assert verdict.feature
        assert verdict.needs
        return
    session = OrtSession(build_model(FORM, layer, PARAMS, weights=identity(spec, packing)))
    for case in cases(spec, battery="quick"):
        fed = feeds(spec, case.inputs)
        parts = [fed.pop(name) for name in ("query", "key", "value")]
        fed["hidden_states"] = np.concatenate(parts, axis=-1)
        found = list(compare(spec, case, oracle_outputs(spec, session.run(fed))))
        assert not found, "\n".join(map(str, found))


def test_most_of_what_an_encoder_needs_is_stated() -> None:
    names = {name for name in STATED if FORM.supports(projected(core(name), "packed"), PARAMS)}
    assert len(names) > 60
    assert {"mha", "v-head-dim", "scale-1", "scale-eighth", "causal-square", "alibi"} <= names
    assert {"padding-inf-zero", "padding-causal-min-uniform", "bias", "keep-heads"} <= names
