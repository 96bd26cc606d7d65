"""An engine whose own kernels spoil the original: what the original computes is asked elsewhere."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from rewrite_sites import always, recognition_of

from mha_export.evaluator import Arrays, Evaluator
from mha_export.rewrite import RewriteSettings, SiteOutcome, rewrite
from mha_export.spec import AttentionSpec

SPEC = AttentionSpec(q_heads=2, kv_heads=2, head_dim=8)


class Coarse:
    """As Vulkan's sine: results of models with some operator are off by 2^-11."""

    def __init__(self, inner: Evaluator, operator: str) -> None:
        self.name = f"coarse {operator}"
        self._inner, self._operator = inner, operator

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        spoilt = any(node.op_type == self._operator for node in model.graph)
        outputs = self._inner.run(model, inputs)
        return {name: array + np.float32(2**-11) * spoilt for name, array in outputs.items()}


def outcome(engine: Evaluator, *stand_ins: Evaluator) -> SiteOutcome:
    done = rewrite(
        recognition_of(SPEC),
        always("onnx"),
        evaluator=engine,
        stand_ins=stand_ins,
        settings=RewriteSettings(battery="ordinary"),
    )
    return done.outcomes["attn.0"]


def test_the_original_is_told_from_its_engine(evaluator: Evaluator) -> None:
    found = outcome(Coarse(evaluator, "Softmax"), evaluator)
    assert found.status == "fused", found.reason
    assert found.proof is not None
    assert found.proof.engine == "coarse Softmax", "the replacement is still the engine's"
    assert found.proof.against == ("oracle", "original")
    assert found.proof.reason is not None
    assert found.proof.reason.startswith(f"the original was run on {evaluator.name}: here output:")


def test_without_another_engine_nothing_shows_what_the_original_computes(
    evaluator: Evaluator,
) -> None:
    found = outcome(Coarse(evaluator, "Softmax"))
    assert found.status == "proof_failed"
    assert "the original graph does not compute this spec" in (found.reason or "")


def test_an_original_that_is_off_everywhere_stays_one(evaluator: Evaluator) -> None:
    coarse = Coarse(evaluator, "Softmax")
    found = outcome(coarse, Coarse(evaluator, "MatMul"))
    assert found.status == "proof_failed"
    assert "the original graph does not compute this spec" in (found.reason or "")


def test_a_replacement_that_is_off_on_its_engine_is_refused(evaluator: Evaluator) -> None:
    found = outcome(Coarse(evaluator, "Attention"), evaluator)
    assert found.status == "proof_failed"
    assert "against the oracle" in (found.reason or "")
