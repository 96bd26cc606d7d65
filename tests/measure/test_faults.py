"""Every class of planted fault is caught, right graphs pass, what changes nothing is no fault."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mha_export.measure.faults import FAULTS, Base, Bench, bases, document, markdown

pytest.importorskip("onnxruntime", reason="the wrong graphs run on ONNX Runtime's CPU")

DOCS = Path(__file__).parents[2] / "docs"
SAMPLED = (
    "encoder, padded",
    "decoder, grouped, rotary, padded, cache",
    "decoder, sinks, window",
    "encoder, two windows",
    "decoder, softcap, window, cache",
    "decoder, normalised",
    "decoder, alibi",
    "encoder, lengths",
    "decoder, prefix",
    "decoder, chunks",
    "decoder, documents",
    "encoder, keep mask",
)
UNSEEN = {
    "encoder, padded": {"K bias dropped"},
    "decoder, sinks, window": {"causal alignment swapped"},
    "decoder, grouped, rotary, padded, cache": set[str](),
}
"""Classes that are the same function in a layer: the sample meets them in another one."""


def base_named(name: str) -> Base:
    (base,) = bases((name,))
    return base


def sample() -> Iterator[tuple[str, list[str]]]:
    """Each class at the first layer of the sample that has room for it."""
    left = dict.fromkeys(FAULTS)
    for name in SAMPLED:
        base = base_named(name)
        here = [fault for fault in left if next(FAULTS[fault](base), None) is not None]
        here = [fault for fault in here if fault not in UNSEEN.get(name, ())]
        for fault in here:
            del left[fault]
        yield name, here


SAMPLE = dict(sample())


def test_the_sample_has_every_class() -> None:
    assert {fault for faults in SAMPLE.values() for fault in faults} == set(FAULTS)


@pytest.mark.parametrize("name", SAMPLE)
def test_every_planted_fault_is_caught_and_the_right_graph_passes(name: str) -> None:
    bench = Bench(base_named(name), polygraphy=False, forms=("primitive",), targets=("cpu",))
    found = bench.found(SAMPLE[name])
    assert [right.status for right in found.right] == ["pass"]
    assert {planted.fault for planted in found.planted} == set(SAMPLE[name])
    missed = [planted for planted in found.planted if not planted.cpu]
    assert not missed


def test_what_changes_no_output_is_not_counted() -> None:
    bench = Bench(base_named("encoder, padded"), polygraphy=False, targets=("reference",))
    found = bench.found(["K bias dropped"])
    assert not found.planted
    assert found.equivalent == (("K bias dropped", "b_k", "encoder, padded"),)


def test_a_fused_graph_is_judged_too() -> None:
    base = base_named("decoder, softcap, window, cache")
    bench = Bench(base, polygraphy=False, forms=("ort-gqa", "onnx"), targets=("cpu",))
    found = bench.found(["left window one long", "heads tiled"])
    assert {(p.form, p.fault) for p in found.planted if p.cpu} == {
        (form, fault)
        for form in ("ort-gqa", "onnx")
        for fault in ("left window one long", "heads tiled")
    }


@pytest.mark.skipif(
    importlib.util.find_spec("polygraphy") is None, reason="polygraphy is not installed"
)
def test_a_comparator_on_one_token_sees_no_window() -> None:
    bench = Bench(base_named("encoder, two windows"), forms=("primitive",), targets=("cpu",))
    found = bench.found(["left window one short", "V bias dropped", "output heads permuted"])
    by_fault = {planted.fault: planted for planted in found.planted}
    window = by_fault["left window one short"]
    assert window.cpu
    assert window.polygraphy is False
    assert window.polygraphy_sized
    assert by_fault["output heads permuted"].polygraphy


def test_the_table_says_what_was_found() -> None:
    bench = Bench(
        base_named("encoder, packed"), polygraphy=False, forms=("primitive",), targets=("cpu",)
    )
    found = document([bench.found(["scale doubled", "K bias dropped"])], seed=0)
    assert found["total"]["planted"] == found["total"]["cpu"] == 1
    assert found["right"]["false_alarms"] == []
    text = markdown(found)
    assert "| scale doubled | 1 | 1 |" in text
    assert "K bias dropped (b_k): encoder, packed" in text


def test_the_committed_table_is_that_of_the_committed_data() -> None:
    found = json.loads((DOCS / "bench_parity.json").read_text(encoding="utf-8"))
    assert markdown(found) == (DOCS / "bench_parity.md").read_text(encoding="utf-8")
    assert found["total"]["planted"] >= 300
    assert found["total"]["cpu"] == found["total"]["planted"]
    assert found["missed"] == []
    assert found["right"]["false_alarms"] == []
    assert {row["fault"] for row in found["faults"]} == set(FAULTS)
