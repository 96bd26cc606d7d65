"""Importance against what it is defined by; patterns, spectra and groups on made-up cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.heads import HeadModel, with_gates
from mha_export.heads.data import read_samples
from mha_export.heads.identities import identities_of, three_way_split
from mha_export.heads.importance import importance
from mha_export.heads.measures import rank_correlation
from mha_export.heads.probing import Probe
from mha_export.heads.regrouping import similar_groups
from mha_export.heads.scoring import Scorer
from mha_export.heads.search import curve, greedy, one_shot
from mha_export.heads.spectra import Contributions, product_spectrum, value_output_spectra


@pytest.fixture(scope="module")
def scorer(encoder: HeadModel, encoder_data: Path, evaluator: Evaluator) -> Scorer:
    samples = read_samples(encoder_data, encoder.model)
    return Scorer(with_gates(encoder), evaluator, samples.batches, "embedding")


def test_ablation_is_the_loss_with_the_gate_at_zero(scorer: Scorer) -> None:
    found = importance(scorer, "ablation")
    whole = scorer.losses().mean()
    for head, value in found.values.items():
        assert value == pytest.approx(scorer.losses([head]).mean() - whole, abs=1e-12)
        assert value > 0


def test_fisher_is_the_hessian_where_the_loss_is_zero(scorer: Scorer) -> None:
    fisher, hessian = importance(scorer, "fisher"), importance(scorer, "hessian")
    for head, value in fisher.values.items():
        assert value == pytest.approx(hessian.values[head], rel=0.02)


def test_gradient_of_a_label_loss_is_that_of_autograd(
    encoder: HeadModel, encoder_data: Path, evaluator: Evaluator
) -> None:
    torch = pytest.importorskip("torch")
    samples = read_samples(encoder_data, encoder.model)
    scorer = Scorer(with_gates(encoder), evaluator, samples.batches, "prototypes")
    found = importance(scorer, "gradient")
    probe = Probe(encoder, evaluator)
    expected = torch.zeros(4, dtype=torch.float64)
    (batch,) = samples.batches
    (seen,) = probe.see(batch)
    assert encoder.layers[0].output is not None
    weight = torch.from_numpy(encoder.layers[0].output.weight)
    bias = torch.from_numpy(encoder.layers[0].output.bias)
    context = torch.from_numpy(seen.context)
    gates = torch.ones(batch.samples, 4, dtype=torch.float64, requires_grad=True)
    output = torch.einsum("bh,bhse,hem->bsm", gates, context, weight) + bias
    losses = scorer.measure.losses(torch, output, scorer.references[0], batch)
    (slopes,) = torch.autograd.grad(losses.sum(), [gates])
    expected = slopes.abs().mean(0).numpy()
    values = np.array([found.values[0, head] for head in range(4)])
    assert rank_correlation(values, expected) == pytest.approx(1.0)
    assert values == pytest.approx(expected, rel=1e-2)


def test_the_gradient_of_agreement_is_refused(scorer: Scorer) -> None:
    with pytest.raises(InputError, match="zero at the model itself"):
        importance(scorer, "gradient")


def test_greedy_scores_again(scorer: Scorer) -> None:
    units = [((0, head),) for head in range(4)]
    order = greedy(scorer, units, count=3)
    left = [unit for unit in units if unit != order[0]]
    best = min(left, key=lambda unit: scorer.loss([*order[0], *unit]))
    assert order[1] == best
    first = one_shot(units, [scorer.loss(unit) for unit in units])
    steps, other = curve(scorer, order), curve(scorer, first[:3])
    assert steps[0].loss == other[0].loss
    assert steps[1].loss <= other[1].loss


def test_contributions_add_up(encoder: HeadModel, encoder_data: Path, evaluator: Evaluator) -> None:
    (batch,) = read_samples(encoder_data, encoder.model).batches
    (seen,) = Probe(encoder, evaluator).see(batch)
    layer = encoder.layers[0]
    assert layer.output is not None
    own = Contributions(layer=layer)
    own.add(seen)
    each = np.einsum("bhse,hem->bhsm", seen.context, layer.output.weight)
    output = each.sum(1) + layer.output.bias
    (name,) = [str(value.name) for value in encoder.model.graph.outputs]
    actual = evaluator.run(encoder.model, batch.inputs)[name]
    assert np.abs(output - actual).max() < 1e-5
    assert own.norms() == pytest.approx(np.sqrt((each**2).sum(-1).mean((0, 2))))
    assert own.mean() == pytest.approx(each.sum(1).mean((0, 1)))
    flat = each.transpose(1, 0, 2, 3).reshape(4, -1, each.shape[-1])
    flat = flat - flat.mean(1, keepdims=True)
    cross = np.linalg.norm(flat[0].T @ flat[1]) ** 2
    scale = np.linalg.norm(flat[0].T @ flat[0]) * np.linalg.norm(flat[1].T @ flat[1])
    assert own.similarity()[0, 1] == pytest.approx(cross / scale)
    assert np.diag(own.similarity()) == pytest.approx(np.ones(4))


def test_spectrum_is_that_of_the_product() -> None:
    draw = np.random.default_rng(0)
    left, right = draw.standard_normal((20, 4)), draw.standard_normal((30, 4))
    left[:, 3] = left[:, 2]
    right[:, 3] = 0.0
    found = product_spectrum(left, right)
    expected = np.linalg.svd(left @ right.T, compute_uv=False)[:4]
    assert found.values == pytest.approx(expected, abs=1e-9)
    assert found.rank == 3
    assert 1.0 < found.effective <= 3.0


def test_ranks_of_a_layer(encoder: HeadModel) -> None:
    assert {spectrum.rank for spectrum in value_output_spectra(encoder.layers[0])} == {8}


def test_identities(encoder: HeadModel) -> None:
    found = identities_of(encoder.layers[0])
    assert found.packed < 1e-14
    assert found.summed < 1e-14
    assert (found.concat_rank, found.mean_rank) == (32, 8)
    split = three_way_split()
    assert split.one_head == pytest.approx(4 / 3, abs=1e-3)
    assert split.three_heads < 1e-12


def test_alike_heads_are_grouped() -> None:
    draw = np.random.default_rng(1)
    centres = draw.standard_normal((3, 16))
    order = [0, 2, 1, 2, 0, 1]
    vectors = centres[order] + 0.01 * draw.standard_normal((6, 16))
    apart = ((vectors[:, None] - vectors[None]) ** 2).sum(-1)
    assert similar_groups(apart, 3) == ((0, 4), (1, 3), (2, 5))


def test_ranks_of_ties_are_shared() -> None:
    assert rank_correlation(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 2, 3])) == 1.0
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == -1.0
