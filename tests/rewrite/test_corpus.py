"""Real exports, rewritten: every attention proven, outputs equal to the framework's.

The files of ``graphs/corpus``; ``scripts/corpus_check`` holds a larger folder to more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.forms import FormParams
from mha_export.recognise import recognise
from mha_export.rewrite import choose_form, rewrite, with_opset
from mha_export.targets import evaluator_of, target_named

TOLERANCE = 2e-5
"""Largest difference to the framework's fp32 outputs, absolute."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One exported file and what the framework computed."""

    path: Path
    data: Path
    layers: int
    runs: tuple[bool, bool]
    """Whether the file as exported ran at each of the two samples."""


def _samples(folder: Path) -> Iterator[Sample]:
    for case in json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["cases"]:
        for entry in case["files"]:
            first, second = (parity is not None for parity in entry["parity"])
            yield Sample(
                path=folder / entry["file"],
                data=folder / case["sample"],
                layers=case["attention_layers"],
                runs=(first, second),
            )


SAMPLES = list(_samples(Path(__file__).parents[2] / "graphs" / "corpus"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.path.stem)
def test_a_real_export_is_rewritten(sample: Sample, evaluator: Evaluator) -> None:
    target = target_named("cpu")
    model = ir.load(sample.path)
    opset = max(23, model.graph.opset_imports[""])
    found = recognise(with_opset(model, opset), evaluator=evaluator)
    assert len(found.sites) == sample.layers, [v.to_json() for v in found.verdicts]
    done = rewrite(
        found,
        lambda site: choose_form(
            site, preferred=target.default_forms, params=FormParams(opset=opset)
        ),
        evaluator=evaluator,
        stand_ins=[evaluator_of("reference")],  # a table of one batch: RotaryEmbedding on ORT
    )
    for name, outcome in done.outcomes.items():
        assert outcome.status in ("fused", "lowered"), (name, outcome.reason)
    onnx.checker.check_model(ir.to_proto(done.model))
    assert [v.name for v in done.model.graph.inputs] == [v.name for v in model.graph.inputs]
    assert [v.name for v in done.model.graph.outputs] == [v.name for v in model.graph.outputs]
    arrays = dict(np.load(sample.data))
    for number, ran in enumerate(sample.runs):
        feeds = {key[4:]: a for key, a in arrays.items() if key.startswith(f"in{number}.")}
        try:
            outputs = evaluator.run(done.model, feeds)
        except MhaExportError:
            # A length that the exporter baked in: the original cannot run there either.
            assert number == 1
            assert not ran
            continue
        for key, expected in arrays.items():
            if key.startswith(f"out{number}."):
                got = outputs[key.removeprefix(f"out{number}.")]
                np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)
