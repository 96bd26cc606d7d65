"""The textbook module: its numpy twin, its exports and the module itself agree."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.frontends import SourceOptions, open_source

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "classic_attention.py"


@pytest.fixture(scope="module")
def classic() -> ModuleType:
    spec = importlib.util.spec_from_file_location("classic_attention", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(batch: int, n: int, m: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {
        name: random.standard_normal((batch, length, 512)).astype(np.float32)
        for name, length in (("query", n), ("key", m), ("value", m))
    }


def test_the_module_equals_its_numpy_twin(classic: ModuleType) -> None:
    module, _ = classic.example()
    arrays = inputs(2, 5, 7)
    mask = np.tril(np.ones((5, 7), dtype=np.int64))[None, None]
    with torch.no_grad():
        got = module(**{k: torch.from_numpy(v) for k, v in arrays.items()}, mask=torch.tensor(mask))
    want = classic.numpy_attention(module, **arrays, mask=mask)
    np.testing.assert_allclose(got.numpy(), want, atol=2e-6)


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_its_export_equals_the_numpy_twin_at_other_sizes(
    classic: ModuleType, exporter: Any, run: Any
) -> None:
    options = SourceOptions(trust_code=True, exporter=exporter)
    loaded = open_source(f"{EXAMPLE}:example", options)
    module, _ = classic.example()
    arrays = inputs(3, 4, 9)
    (got,) = run(loaded.model, arrays)
    np.testing.assert_allclose(got, classic.numpy_attention(module, **arrays), atol=2e-6)


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_its_rewritten_export_equals_the_numpy_twin(
    classic: ModuleType, exporter: Any, run: Any, tmp_path: Path
) -> None:
    from mha_export.jobs import export_model

    loaded = open_source(f"{EXAMPLE}:example", SourceOptions(trust_code=True, exporter=exporter))
    result = export_model(loaded.model, targets=["cpu"], out=tmp_path / "out")
    (outcome,) = result.document["variants"][0]["sites"].values()
    assert outcome["status"] == "fused"
    rewritten = ir.external_data.load_to_model(ir.load(tmp_path / "out" / "cpu.onnx"))
    assert [node.op_type for node in rewritten.graph].count("Softmax") == 0
    module, _ = classic.example()
    arrays = inputs(3, 4, 9)
    (got,) = run(rewritten, arrays)
    np.testing.assert_allclose(got, classic.numpy_attention(module, **arrays), atol=2e-6)
