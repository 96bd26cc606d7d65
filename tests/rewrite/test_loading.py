"""A whole that does not load: the sites at fault are found, undone and told."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import pytest
from rewrite_sites import always, recognition_of

from mha_export.evaluator import Evaluator
from mha_export.rewrite import rewrite
from mha_export.rewrite._loading import breaking_sites
from mha_export.spec import AttentionSpec

GROUPS = [["a"], ["b", "c"], ["d"], ["e"]]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ([{"a"}], {"a"}),
        ([{"b"}], {"b", "c"}),
        ([{"a"}, {"e"}], {"a", "e"}),
        ([{"a", "e"}], {"e"}),
        ([{"a", "b"}, {"d"}], {"b", "c", "d"}),
    ],
    ids=["one", "a group", "two", "only together", "together and alone"],
)
def test_the_sites_at_fault_are_found(bad: list[set[str]], found: set[str]) -> None:
    def attempt(names: Collection[str]) -> str | None:
        return "no kernel" if any(group <= set(names) for group in bad) else None

    assert breaking_sites(GROUPS, attempt) == dict.fromkeys(found, "no kernel")


def fused(model: ir.Model) -> bool:
    return any(node.op_type == "Attention" for node in model.graph)


def test_a_rewrite_that_does_not_load_is_undone(evaluator: Evaluator) -> None:
    found = recognition_of(AttentionSpec(q_heads=2, kv_heads=2, head_dim=8))
    done = rewrite(
        found,
        always("onnx"),
        evaluator=evaluator,
        loads=lambda model: "no kernel for Attention" if fused(model) else None,
    )
    outcome = done.outcomes["attn.0"]
    assert outcome.status == "proof_failed"
    assert outcome.reason == "with onnx here the file does not load: no kernel for Attention"
    assert not fused(done.model)
    assert done.refusal is None


def test_a_model_that_never_loaded_is_told_and_not_undone(evaluator: Evaluator) -> None:
    found = recognition_of(AttentionSpec(q_heads=2, kv_heads=2, head_dim=8))
    done = rewrite(found, always("onnx"), evaluator=evaluator, loads=lambda model: "no such type")
    assert done.outcomes["attn.0"].status == "fused"
    assert done.refusal == "no such type"
