"""Small models of the corpus and a small encoder, with their heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.evaluator import Evaluator
from mha_export.heads import HeadModel, head_model
from mha_export.jobs import build_graph
from mha_export.recognise import recognise
from mha_export.spec import AttentionSpec, EmptyRow, MaskSpec, ProjectionSpec
from mha_export.targets import evaluator_of

CORPUS = Path(__file__).parents[2] / "graphs" / "corpus"

ENCODER = AttentionSpec(
    q_heads=4,
    kv_heads=4,
    head_dim=8,
    mask=MaskSpec(padding=True, fill="min", empty_row=EmptyRow.UNIFORM),
    projections=ProjectionSpec(d_model=32, q_bias=True, k_bias=True, v_bias=True, output_bias=True),
    q_len="seq",
    kv_len="seq",
)


@pytest.fixture(scope="session")
def evaluator() -> Evaluator:
    return evaluator_of("cpu")


@pytest.fixture(scope="session")
def heads_of() -> Callable[[str], HeadModel]:
    """A corpus model's heads, read once."""
    known: dict[str, HeadModel] = {}

    def read(name: str) -> HeadModel:
        if name not in known:
            (file,) = CORPUS.glob(f"{name}.*.onnx")
            known[name] = head_model(recognise(ir.load(file)))
        return known[name]

    return read


@pytest.fixture(scope="session")
def encoder_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "encoder.onnx"
    build_graph(ENCODER, output=path, flags={"weights": "random", "form": "primitive"})
    return path


@pytest.fixture(scope="session")
def encoder(encoder_file: Path) -> HeadModel:
    return head_model(recognise(ir.load(encoder_file)))


@pytest.fixture(scope="session")
def encoder_data(encoder: HeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve samples, labelled, for the encoder."""
    draw = np.random.default_rng(0)
    arrays = {}
    for value in encoder.model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        shape = [12 if axis == 0 else 6 if not isinstance(dim, int) else dim
                 for axis, dim in enumerate(value.shape)]  # fmt: skip
        kind = value.dtype.numpy()
        arrays[str(value.name)] = (
            draw.standard_normal(shape).astype(kind)
            if value.dtype.is_floating_point()
            else np.ones(shape, kind)
        )
    path = tmp_path_factory.mktemp("data") / "samples.npz"
    np.savez(path, labels=np.arange(12) % 3, **arrays)
    return path
