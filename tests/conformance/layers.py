"""A canonical graph with projections, run and compared with the oracle's layer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from emission import Arrays, run_model

from mha_export.forms import FormParams, build_model, form_named
from mha_export.forms._weights import SECOND_STREAM, random_weights
from mha_export.oracle import (
    LatentWeights,
    LayerWeights,
    OracleResult,
    SideInputs,
    StreamWeights,
    joint_layer,
    latent_layer,
    layer,
)
from mha_export.spec import AttentionSpec

BATCH, QUERIES, PAST, MEMORY = 3, 5, 3, 7
NORMS = ("q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias")


def layer_inputs(spec: AttentionSpec, rng: np.random.Generator) -> tuple[Arrays, Arrays]:
    """Graph inputs that hold states, and those that the oracle calls side operands."""
    assert spec.projections is not None
    joint = spec.projections.joint
    s = spec.q_len if isinstance(spec.q_len, int) else QUERIES
    width = spec.projections.d_model
    states = {"hidden_states": rng.standard_normal((BATCH, s, width))}
    if joint is not None:
        states["encoder_hidden_states"] = rng.standard_normal(
            (BATCH, MEMORY, joint.d_model or width)
        )
        s += MEMORY
    if spec.cross:
        other = spec.projections.kv_d_model or width
        states["encoder_hidden_states"] = rng.standard_normal((BATCH, MEMORY, other))
    side: Arrays = {}
    if spec.cache is not None:
        side["past_key"] = rng.standard_normal((BATCH, spec.kv_heads, PAST, spec.head_dim))
        if spec.value_source == "own":
            side["past_value"] = rng.standard_normal((BATCH, spec.kv_heads, PAST, spec.value_dim))
    if spec.mask.padding:
        side["key_padding"] = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    if spec.mask.bias is not None:
        side["bias"] = rng.standard_normal((1, spec.q_heads, s, s))
    single = {name: _single(array) for name, array in states.items()}
    return single, {name: _single(array) for name, array in side.items()}


def _single(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def check_layer(form: str, spec: AttentionSpec, opset: int, tolerance: float = 2e-5) -> None:
    """One run with seeded weights: every output of the layer and the cache are the oracle's."""
    states, side = layer_inputs(spec, np.random.default_rng(5))
    weights = random_weights(spec, 7)
    model = build_model(form_named(form), spec, FormParams(opset=opset), weights=weights)
    expected, result = _exact(spec, weights, states, side)
    found = run_model(model, states | side)
    assert {name for name in found if name.endswith("output")} == set(expected)
    for name, exact in expected.items():
        np.testing.assert_allclose(found[name], exact, rtol=tolerance, atol=tolerance)
    if spec.cache is not None:
        np.testing.assert_allclose(found["present_key"], result.present_key, rtol=1e-4, atol=1e-5)


def _exact(
    spec: AttentionSpec, weights: Arrays, states: Arrays, side: Arrays
) -> tuple[dict[str, np.ndarray], OracleResult]:
    assert spec.projections is not None
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    norms = {name: wide[name] for name in (*NORMS, "sinks") if name in wide}
    x, memory = states["hidden_states"], states.get("encoder_hidden_states")
    if spec.projections.joint is not None:
        assert memory is not None
        streams = (_stream(wide, ""), _stream(wide, SECOND_STREAM))
        operands = SideInputs(**side, **{n: a for n, a in norms.items() if n not in NORMS})
        outputs, result = joint_layer(spec, streams, (x, memory), side=operands)
        return dict(zip(("output", "encoder_output"), outputs, strict=False)), result
    operands = SideInputs(**side, **norms)
    if spec.latent is not None:
        output, result = latent_layer(spec, _only(LatentWeights, wide), x, side=operands)
    else:
        own = _only(LayerWeights, wide)
        output, result = layer(spec, own, x, memory=memory, side=operands)
    return {"output": output}, result


def _stream(wide: Arrays, prefix: str) -> StreamWeights:
    own = {name[len(prefix) :]: a for name, a in wide.items() if name.startswith(prefix)}
    norms = {name: own[name] for name in NORMS if name in own}
    return StreamWeights(linear=_only(LayerWeights, own), **norms)


def _only(kind: Any, wide: Arrays) -> Any:
    """The record of those weights that it has a name for."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: array for name, array in wide.items() if name in known})
