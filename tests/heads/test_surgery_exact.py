"""A pruned model is the gated model, a repeated one the original: caches and masks included."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from mha_export.errors import InputError
from mha_export.evaluator import Evaluator
from mha_export.heads import HeadModel, head_model, prune, regroup, with_gates
from mha_export.heads._rebuild import rebuilt
from mha_export.heads.alignment import turned
from mha_export.heads.checking import (
    TOLERANCE,
    difference_from_gated,
    difference_from_original,
    runnable,
)
from mha_export.heads.regrouping import _rewired, cache_bytes, contiguous_groups
from mha_export.measure.model_inputs import cases_at_traced_sizes, model_cases
from mha_export.recognise import recognise
from mha_export.targets import evaluator_of

Read = Callable[[str], HeadModel]

EVERYDAY = (
    "bert-eager",
    "deberta_v2-eager",
    "einsum_bhqd",
    "gpt2_kv-sdpa",
    "gpt_oss-eager",
    "llama_kv-sdpa",
)
FURTHER = ("gemma2-eager", "mha_kpm_nw", "mha_w", "mistral_sw-sdpa", "nanogpt-eager",
           "qwen3-sdpa", "t5_enc-eager")  # fmt: skip


def inputs_of(heads: HeadModel) -> list[Mapping[str, np.ndarray]]:
    """A few ordinary and padded inputs, with and without a past, that the model itself runs on."""
    cpu = evaluator_of("cpu")
    for cases in (model_cases(heads.model, quick=True), cases_at_traced_sizes(heads.model)):
        found = runnable(heads.model, [case.inputs for case in cases], cpu)
        if found:
            return found
    raise AssertionError("the model runs on none of the inputs")


@pytest.mark.parametrize(
    "name", [*EVERYDAY, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]
)
def test_one_head_of_each_layer(name: str, heads_of: Read, evaluator: Evaluator) -> None:
    heads = heads_of(name)
    removed = [(layer.number, layer.heads - 1) for layer in heads.layers]
    pruned = prune(heads, removed)
    origins = {layer.layer: layer.kv_kept for layer in pruned.layers}
    found = difference_from_gated(
        heads, with_gates(heads), removed, pruned.model, origins, inputs_of(heads), evaluator
    )
    assert found <= TOLERANCE
    assert not recognise(pruned.model).rejections


def test_a_whole_group_takes_its_place_in_the_cache(heads_of: Read, evaluator: Evaluator) -> None:
    heads = heads_of("llama_kv-sdpa")
    group = heads.layers[0].spec.group
    removed = [(0, head) for head in range(group)] + [(1, 0)]
    pruned = prune(heads, removed)
    first, second = pruned.layers
    assert first.kv_kept == tuple(range(1, first.kv_before))
    assert (second.padded, second.kv_kept) == (1, tuple(range(second.kv_before)))
    origins = {layer.layer: layer.kv_kept for layer in pruned.layers}
    found = difference_from_gated(
        heads, with_gates(heads), removed, pruned.model, origins, inputs_of(heads), evaluator
    )
    assert found <= TOLERANCE
    assert cache_bytes(head_model(recognise(pruned.model))) < cache_bytes(heads)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_layer_without_heads_has_no_cache(
    empty: int, heads_of: Read, evaluator: Evaluator
) -> None:
    heads = heads_of("llama_kv-sdpa")
    removed = [(empty, head) for head in range(heads.layers[empty].heads)]
    pruned = prune(heads, removed)
    assert len(pruned.model.graph.inputs) == len(heads.model.graph.inputs) - 2
    assert len(pruned.model.graph.outputs) == len(heads.model.graph.outputs) - 2
    found = difference_from_gated(
        heads, with_gates(heads), removed, pruned.model, {}, inputs_of(heads), evaluator
    )
    assert found <= TOLERANCE


def test_a_wrong_head_is_seen(heads_of: Read, evaluator: Evaluator) -> None:
    heads = heads_of("bert-eager")
    pruned = prune(heads, [(0, 1)])
    found = difference_from_gated(
        heads, with_gates(heads), [(0, 2)], pruned.model, {}, inputs_of(heads), evaluator
    )
    assert found > TOLERANCE


@pytest.mark.parametrize("name", ["llama_kv-sdpa", "qwen3-sdpa", "gpt_oss-eager"])
def test_repeating_grouped_heads_is_exact(name: str, heads_of: Read, evaluator: Evaluator) -> None:
    heads = heads_of(name)
    h = heads.layers[0].spec.q_heads
    found = regroup(heads, h)
    assert {s.spec.kv_heads for s in recognise(found.model).sites} == {h}
    origins = {n: [group[0] for group in groups] for n, groups in found.groups.items()}
    apart = difference_from_original(heads, found.model, origins, inputs_of(heads), evaluator)
    assert apart <= TOLERANCE


@pytest.mark.parametrize("wanted", [1, 2])
def test_cache_is_divided_exactly(wanted: int, heads_of: Read) -> None:
    heads = heads_of("gpt2_kv-sdpa")
    before = heads.layers[0].spec.kv_heads
    after = head_model(recognise(regroup(heads, wanted).model))
    assert cache_bytes(heads) == cache_bytes(after) * before // wanted
    assert all(layer.spec.kv_heads == wanted for layer in after.layers)


def test_equal_heads_are_averaged_without_loss(heads_of: Read, evaluator: Evaluator) -> None:
    heads = heads_of("llama_kv-sdpa")
    now = heads.layers[0].spec.kv_heads
    repeated = head_model(recognise(regroup(heads, heads.layers[0].spec.q_heads).model))
    back = regroup(repeated, now)
    assert max(back.spread.values()) < 1e-12
    found = difference_from_original(heads, back.model, {}, inputs_of(heads), evaluator)
    assert found <= TOLERANCE


REFUSED = [
    ("bert-eager", [(0, 9)], "has no head 9"),
    ("bert-eager", [(7, 0)], "there is no layer 7"),
    ("bert-eager", [], "no head is to be removed"),
    ("deepseek_v3-eager", [(0, 0)], "can't be removed"),
]


@pytest.mark.parametrize(("name", "removed", "words"), REFUSED)
def test_what_cannot_be_removed_is_refused(
    name: str, removed: list[tuple[int, int]], words: str, heads_of: Read
) -> None:
    with pytest.raises(InputError, match=words):
        prune(heads_of(name), removed)


def test_all_heads_of_all_layers(heads_of: Read) -> None:
    heads = heads_of("bert-eager")
    everything = [(x.number, head) for x in heads.layers for head in range(x.heads)]
    with pytest.raises(InputError, match="all heads of all layers"):
        prune(heads, everything)


@pytest.mark.parametrize("wanted", [0, 3, 99])
def test_a_number_that_does_not_divide(wanted: int, heads_of: Read) -> None:
    with pytest.raises(InputError, match="doesn't divide"):
        regroup(heads_of("gpt2_kv-sdpa"), wanted)


@pytest.mark.parametrize(
    "name",
    [
        *EVERYDAY,
        # the padding of mha_kpm_nw's inputs leaves no finite number to compare
        *(pytest.param(n, marks=pytest.mark.slow) for n in FURTHER if n != "mha_kpm_nw"),
    ],
)
def test_turned_heads_run_as_the_original(name: str, heads_of: Read, evaluator: Evaluator) -> None:
    """Masks and biases that depend on the queries, sinks and caches included."""
    heads = heads_of(name)
    changes = []
    for layer in heads.layers:
        count = layer.spec.kv_heads
        ready = turned(layer, [tuple(range(count))])
        changes.append(_rewired(ready, contiguous_groups(count, count)))
    model, inputs = rebuilt(heads, changes), inputs_of(heads)
    wanted = [str(value.name) for value in heads.model.graph.outputs]
    compared = 0
    for given in inputs:
        if any("past" in key and array.size for key, array in given.items()):
            continue  # a past is in the basis of the model that made it
        before, after = evaluator.run(heads.model, given), evaluator.run(model, given)
        for output in wanted:
            if "present" not in output:
                np.testing.assert_allclose(after[output], before[output], rtol=0, atol=TOLERANCE)
                compared += int(np.isfinite(before[output]).sum())
    assert compared
