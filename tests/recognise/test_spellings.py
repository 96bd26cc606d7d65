"""Every spelling of one attention is recognised as that attention, and proven by the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from spellings import POSITIVES, Choices, attention

from mha_export.recognise import Site, recognise

Feeds = Callable[..., dict[str, np.ndarray]]


@pytest.mark.parametrize("name", POSITIVES)
def test_spelling(name: str, random_feeds: Feeds, assert_sound: Callable[..., None]) -> None:
    choices = POSITIVES[name]
    model = attention(choices)
    recognition = recognise(model)
    (site,) = recognition.verdicts
    assert isinstance(site, Site)
    assert site.replaceable, site.cannot_replace
    spec = site.spec
    assert (spec.q_heads, spec.kv_heads) == (choices.heads, choices.kv_heads)
    assert (spec.head_dim, spec.value_dim) == (choices.dim, choices.value_dim)
    assert spec.effective_scale == pytest.approx(_scale(choices), rel=1e-6)
    assert spec.softcap == choices.softcap
    assert spec.sinks == (choices.sink != "none")
    assert spec.cross == choices.cross
    assert (spec.cache is not None) == (choices.cache != "none")
    assert (spec.mask.causal is not None) == ("causal" in choices.mask or "window" in choices.mask
                                              or choices.mask == "two")  # fmt: skip
    assert spec.combine == ("mean" if choices.merge == "mean" else "concat")
    assert_sound(recognition, random_feeds(model))
    assert_sound(recognition, random_feeds(model, seed=1, batch=1, seq=1, keys=4, past=6))


def _scale(choices: Choices) -> float:
    number = choices.factor if choices.factor is not None else choices.dim**-0.5
    return 1.0 if choices.scale == "none" else number


@pytest.mark.parametrize("name", ["plain", "cache", "bias-and-causal", "merged-batch-heads"])
def test_the_input_model_is_left_alone(name: str) -> None:
    model = attention(POSITIVES[name])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    recognise(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("name", ["plain", "shared-expand", "packed-five-axes", "einsum"])
def test_no_layout_op_is_left_between_projection_and_site(name: str) -> None:
    """The nodes a replacement removes are all there are but the projections' own."""
    recognition = recognise(attention(POSITIVES[name]))
    (site,) = recognition.sites
    left = {node.op_type for node in recognition.model.graph} - {"MatMul", "Add", "Constant"}
    gone = {node.op_type for node in site.nodes}
    kept = [node.op_type for node in recognition.model.graph if node not in set(site.nodes)]
    assert left <= gone | {"Reshape", "Transpose", "Gather"}
    if name != "packed-five-axes":
        assert not {"Transpose", "Expand", "Reshape", "Softmax"} & set(kept)


def test_a_cached_key_is_the_new_tokens_and_the_past() -> None:
    recognition = recognise(attention(POSITIVES["cache-bshd"]))
    (site,) = recognition.sites
    operands = site.operands
    assert operands.past_key is not None
    assert operands.past_key.value.name == "past_key"
    assert operands.past_key.layout == "bshd"
    assert site.present_key is not None
    assert site.present_key.value.name == "present_key"
    assert site.spec.cache is not None
    assert site.spec.cache.layout == "bshd"


def test_weights_that_leave_the_graph_are_an_output_of_the_site(
    random_feeds: Feeds, assert_sound: Callable[..., None]
) -> None:
    model = attention(POSITIVES["causal"].but(extra="weights-output"))
    recognition = recognise(model)
    (site,) = recognition.sites
    assert site.spec.qk_output == "probabilities"
    assert site.qk_output is not None
    assert site.replaceable
    assert_sound(recognition, random_feeds(model))
