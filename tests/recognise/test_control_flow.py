"""Attention inside If, Loop, Scan and functions, nested too: found, and rewritten where exact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from control_flow import HEADS, NESTS, growing_cache, in_both_branches

from mha_export.forms import FormParams, form_named
from mha_export.recognise import recognise
from mha_export.rewrite import Choice, RewriteSettings, rewrite, with_opset
from mha_export.targets import evaluator_of

pytest.importorskip("onnxruntime")

Random = Callable[..., dict[str, np.ndarray]]


def rewritten(model: ir.Model) -> ir.Model:
    """Every site fused, each with a proof that saw the original."""
    params = FormParams(opset=23)
    done = rewrite(
        recognise(with_opset(model, 23)),
        lambda site: Choice(form=form_named("onnx"), params=params),
        evaluator=evaluator_of("cpu"),
        settings=RewriteSettings(seed=0, battery="quick"),
    )
    for outcome in done.outcomes.values():
        assert outcome.status == "fused", outcome.reason
        assert outcome.proof is not None
        assert outcome.proof.against == ("oracle", "original")
    return done.model


def check(model: ir.Model, random_feeds: Random, *, sites: int) -> None:
    recognition = recognise(model)
    assert [verdict.verdict for verdict in recognition.verdicts] == ["attention"] * sites
    for site in recognition.sites:
        assert site.spec.q_heads == HEADS
        assert site.replaceable
        assert all(node.graph is site.graph for node in site.nodes)
    made = rewritten(model)
    assert not any(node.op_type == "Softmax" for node in made.graph.all_nodes())
    run = evaluator_of("cpu").run
    for seed, sizes in enumerate(({}, {"batch": 3, "seq": 4, "past": 2})):
        feeds = random_feeds(model, seed=seed, **sizes)
        for got, want in zip(run(made, feeds).values(), run(model, feeds).values(), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", NESTS)
def test_an_attention_inside(name: str, random_feeds: Random) -> None:
    check(NESTS[name].model(), random_feeds, sites=1)


def test_both_branches_of_an_if(random_feeds: Random) -> None:
    check(in_both_branches(), random_feeds, sites=2)


def test_a_loop_with_a_growing_cache(random_feeds: Random) -> None:
    """Past and present are carried values of the body: they are the cache."""
    model = growing_cache()
    (site,) = recognise(model).sites
    assert site.spec.cache is not None
    assert site.operands.past_key is not None
    assert site.operands.past_key.value.name == "past_key"
    assert site.present_key is not None
    check(model, random_feeds, sites=1)
