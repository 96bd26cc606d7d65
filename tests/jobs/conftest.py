"""A small encoder layer as an .onnx file, and copies of it with one thing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from mha_export.jobs import build_graph
from mha_export.spec import AttentionSpec, EmptyRow, MaskSpec, ProjectionSpec

ENCODER = AttentionSpec(
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM),
    projections=ProjectionSpec(d_model=32, q_bias=True, k_bias=True, v_bias=True),
    q_len="seq",
    kv_len="seq",
)


def build(spec: AttentionSpec, path: Path, **flags: object) -> Path:
    build_graph(spec, output=path, flags={"weights": "random", "form": "primitive", **flags})
    return path


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ENCODER, tmp_path_factory.mktemp("models") / "encoder.onnx")


@pytest.fixture(scope="session")
def encoder_scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights; the scale is 1.2 times what it should be."""
    wrong = ENCODER.replace(scale=ENCODER.effective_scale * 1.2)
    return build(wrong, tmp_path_factory.mktemp("models") / "encoder.onnx")


@pytest.fixture(scope="session")
def encoder18(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At opset 18, in which form ``onnx`` cannot be said."""
    return build(ENCODER, tmp_path_factory.mktemp("models") / "encoder.onnx", opset=18)


@pytest.fixture(scope="session")
def exported(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mha_export.jobs import export_model

    out = tmp_path_factory.mktemp("exports") / "out"
    result = export_model(encoder, targets=["cpu", "reference", "portable"], out=out)
    assert result.ok, result.notices
    return out
