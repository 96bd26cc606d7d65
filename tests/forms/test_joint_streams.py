"""Two streams that attend together: joined along the length, and cut where the first one ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emission import Bench, heads_of

from mha_export.forms._joint import leave_joint, project_joint
from mha_export.forms._weights import random_weights
from mha_export.operands import Layout
from mha_export.spec import AttentionSpec, JointSpec, ProjectionSpec, QkNormSpec

LENGTHS = (3, 2)
WIDTHS = (6, 5)
RNG = np.random.default_rng(6)
STREAMS = [
    RNG.normal(size=(2, length, width)).astype(np.float32)
    for length, width in zip(LENGTHS, WIDTHS, strict=True)
]


def _spec(norm: QkNormSpec | None = None, *, second: bool = True, output: bool = True) -> Any:
    joint = JointSpec(lengths=("a", "b"), d_model=WIDTHS[1], qk_norm=norm, output=second)
    projections = ProjectionSpec(d_model=WIDTHS[0], joint=joint, q_bias=True, output=output)
    return AttentionSpec(
        q_heads=4,
        kv_heads=2,
        head_dim=4,
        v_head_dim=3,
        projections=projections,
        q_len="s",
        kv_len="s",
    )


def _weight(weights: dict[str, np.ndarray], name: str, stream: int) -> np.ndarray | None:
    return weights.get(("encoder_" if stream else "") + name)


NORMS: dict[str, QkNormSpec | None] = {
    "none": None,
    "both": QkNormSpec(kind="rms"),
    "queries alone": QkNormSpec(kind="layer", bias=True, key=False),
    "without weights": QkNormSpec(kind="l2", weight=False),
}


def _normed(norm: QkNormSpec, x: np.ndarray, weight: Any, bias: Any) -> np.ndarray:
    if norm.kind == "l2":
        return x / np.sqrt((x * x).sum(-1, keepdims=True))
    x = x - x.mean(-1, keepdims=True) if norm.kind == "layer" else x
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.epsilon)
    return y * weight + (0.0 if bias is None else bias)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", NORMS)
def test_each_stream_has_weights_of_its_own(name: str, opset: int) -> None:
    norm = NORMS[name]
    spec = _spec(norm)
    weights = random_weights(spec, 0)
    bench = Bench(opset=opset)
    bound = {key: bench.value(key, array) for key, array in weights.items()}
    streams = (bench.value("first", STREAMS[0]), bench.value("second", STREAMS[1]))
    made = project_joint(bench.scope, spec, spec.projections.joint, bound, streams)
    found = bench.run(*(heads.value for heads in made))
    for part, heads, array in zip("qkv", made, found, strict=True):
        pieces = []
        for index, x in enumerate(STREAMS):
            y = x @ _weight(weights, f"w_{part}", index)
            bias = _weight(weights, f"b_{part}", index)
            assert (bias is not None) is (part == "q")
            y = y if bias is None else y + bias
            y = y.reshape(*y.shape[:2], heads.heads, heads.dim).swapaxes(1, 2)
            if norm is not None and part in ("qk" if norm.key else "q"):
                stated = (
                    _weight(weights, f"{part}_norm_{kind}", index) for kind in ("weight", "bias")
                )
                y = _normed(norm, y, *stated)
            pieces.append(y)
        expected = np.concatenate(pieces, axis=2)
        np.testing.assert_allclose(heads_of(array, heads), expected, rtol=1e-4, atol=1e-5)
    assert bench.types.count("Concat") == 3
    assert ("RMSNormalization" in bench.types) is (opset == 23 and name == "both")


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("output", [True, False], ids=["projected", "bare"])
@pytest.mark.parametrize("second", [True, False], ids=["both leave", "one leaves"])
def test_the_streams_part_where_the_first_one_ends(
    second: bool, output: bool, layout: Layout
) -> None:
    spec = _spec(second=second, output=output)
    weights = random_weights(spec, 0)
    bench = Bench()
    bound = {key: bench.value(key, array) for key, array in weights.items()}
    x = bench.value("first", STREAMS[0])
    context = RNG.normal(size=(2, 4, sum(LENGTHS), 3)).astype(np.float32)
    heads = bench.heads("context", context, layout)
    parts = leave_joint(bench.scope, spec, spec.projections.joint, bound, heads, x)
    merged = context.swapaxes(1, 2).reshape(2, sum(LENGTHS), 12)
    pieces = [merged[:, : LENGTHS[0]], merged[:, LENGTHS[0] :]][: 2 if second else 1]
    for index, (piece, array) in enumerate(zip(pieces, bench.run(*parts), strict=True)):
        expected = piece @ _weight(weights, "w_o", index) if output else piece
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)


def test_a_stream_of_a_fixed_length_is_cut_by_a_number() -> None:
    spec = _spec(output=False)
    bench = Bench()
    x = bench.value("first", STREAMS[0], shape=["b", LENGTHS[0], WIDTHS[0]])
    context = RNG.normal(size=(2, 4, sum(LENGTHS), 3)).astype(np.float32)
    heads = bench.heads("context", context, Layout.BSM)
    leave_joint(bench.scope, spec, spec.projections.joint, {}, heads, x)
    assert bench.types == ["Slice", "Slice"]
