"""Real exports: every attention of every file, as the manifest says it is, proven by the oracle.

Those of ``graphs/corpus``; ``scripts/corpus_check`` holds a larger folder to more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.recognise import NotAttention, Recognition, Site, recognise
from mha_export.rewrite import with_dtype
from mha_export.spec import DType

OWN = Path(__file__).parents[2] / "graphs" / "corpus"


def _cases() -> list[Any]:
    listed = json.loads((OWN / "manifest.json").read_text(encoding="utf-8"))["cases"]
    return [
        pytest.param(OWN, case, file, id=file["file"].removesuffix(".onnx"))
        for case in listed
        for file in case["files"]
    ]


CASES = _cases()


def _recognised(folder: Path, file: dict[str, Any]) -> Recognition:
    return recognise(ir.load(folder / file["file"]))


@pytest.mark.parametrize(("folder", "case", "file"), CASES)
def test_every_layer_is_what_it_is(
    folder: Path, case: dict[str, Any], file: dict[str, Any], assert_sound: Callable[..., None]
) -> None:
    recognition = _recognised(folder, file)
    assert not recognition.rejections
    sites = recognition.sites
    assert len(sites) == case["attention_layers"]
    for site, layer in zip(sites, case["layers"], strict=True):
        _check_layer(site, case, layer)
    for other in recognition.verdicts:
        assert isinstance(other, Site) or other.reason.code == "router"
    _check_samples(recognition, folder, case, file, assert_sound)


def _check_layer(site: Site, case: dict[str, Any], layer: dict[str, Any]) -> None:
    spec = site.spec
    assert site.replaceable, site.cannot_replace
    assert (spec.q_heads, spec.kv_heads) == (case["num_heads"], case["kv_heads"])
    assert spec.head_dim == case["head_dim"]
    assert spec.effective_scale == pytest.approx(layer["scale"], rel=1e-6)
    assert (spec.mask.causal is not None) == layer["causal"]
    assert spec.mask.left_window == layer["left_window"]
    # DeBERTa hides the rows of padded queries too: a keep mask, not a padding of keys
    assert (spec.mask.padding or spec.mask.keep is not None) == layer["padding"]
    assert (spec.mask.bias is not None) == layer["bias"]
    assert spec.softcap == layer["softcap"]
    assert spec.sinks == layer["sinks"]
    assert spec.cross == layer["cross"]
    assert (spec.cache.growth if spec.cache else None) == layer["cache"]


def _check_samples(
    recognition: Recognition,
    folder: Path,
    case: dict[str, Any],
    file: dict[str, Any],
    assert_sound: Callable[..., None],
) -> None:
    """At the stored inputs; where the file itself fails at them, with a batch of one."""
    with np.load(folder / case["sample"]) as sample:
        arrays = {name: sample[name] for name in sample.files}
    for number, runs in enumerate(file["parity"]):
        feeds = {
            name.removeprefix(f"in{number}."): array
            for name, array in arrays.items()
            if name.startswith(f"in{number}.")
        }
        if runs is None:
            if file["exporter"] == "legacy":
                continue  # a length is baked in: there is nothing to compare with
            feeds = {name: array[:1] for name, array in feeds.items()}
        assert_sound(recognition, feeds)


def _ids(recognition: Recognition) -> list[str]:
    return [verdict.id for verdict in recognition.verdicts]


def test_ids_are_of_structure_and_order() -> None:
    recognition = recognise(ir.load(OWN / "unet_xattn-eager.dynamo.18.onnx"))
    assert _ids(recognition) == [
        "layer.0.self",
        "layer.0.cross",
        "layer.1.self",
        "layer.1.cross",
    ]


@pytest.mark.parametrize("name", ["gpt_oss-eager.dynamo.18", "bert-eager.legacy.17"])
def test_copies_of_a_model_have_the_same_sites(name: str, tmp_path: Path) -> None:
    """As text, with external data, and wrapped in a function."""
    model = ir.load(OWN / f"{name}.onnx")
    expected = [_stated(v) for v in recognise(model).verdicts]
    ir.save(model, tmp_path / "external.onnx", external_data="weights.bin")
    copies = {
        "text": ir.from_onnx_text(ir.to_onnx_text(model)),
        "external": ir.load(tmp_path / "external.onnx"),
        "function": _in_a_function(model),
    }
    for kind, copy in copies.items():
        assert [_stated(v) for v in recognise(copy).verdicts] == expected, kind


@pytest.mark.parametrize(
    "name", ["gpt_oss-eager.dynamo.18", "llama_kv-sdpa.dynamo.18", "qwen3-sdpa.dynamo.23"]
)
def test_half_precision_copies_say_the_same(name: str) -> None:
    """Casts between sinks, tables, masks and the attention change nothing but the types."""
    model = ir.load(OWN / f"{name}.onnx")
    expected = recognise(model).sites
    found = recognise(with_dtype(model, DType.FP16)).sites
    assert len(found) == len(expected)
    for site, original in zip(found, expected, strict=True):
        assert site.replaceable
        assert site.spec.io_dtype is DType.FP16
        assert site.operands.query.value.dtype == ir.DataType.FLOAT16
        same = {"io_dtype", "softmax_dtype", "scale", "fill"}
        stated, wanted = site.spec.to_json(), original.spec.to_json()
        assert {k: v for k, v in stated.items() if k not in same} == {
            k: v for k, v in wanted.items() if k not in same
        }


def _stated(verdict: Any) -> tuple[str, Any]:
    if isinstance(verdict, NotAttention):
        return verdict.id, verdict.reason.code
    return verdict.id, verdict.spec.to_json()


def _in_a_function(model: ir.Model) -> ir.Model:
    """The whole main graph as the body of one function; weights become its inputs."""
    inner = model.clone().graph
    weights = list(inner.initializers.values())
    inputs, outputs = list(inner.inputs), list(inner.outputs)
    shapes = [(v.name, v.type, v.shape) for v in inputs]
    result_shapes = [(v.name, v.type, v.shape) for v in outputs]
    nodes = list(inner)
    tensors = [weight.const_value for weight in weights]
    for weight in weights:
        weight.const_value = None
    inner.initializers.clear()
    inner.remove(nodes)
    inner.inputs.clear()
    inner.outputs.clear()
    body = ir.Graph(
        [*inputs, *weights],
        outputs,
        nodes=nodes,
        opset_imports=dict(model.opset_imports),
        name="body",
    )
    function = ir.Function("local", "Whole", graph=body, attributes=[])
    outer_inputs = [ir.Value(name=n, type=t, shape=s) for n, t, s in shapes]
    stored = [
        ir.Value(
            name=f"weight_{place}",
            const_value=tensor,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tuple(tensor.shape)),
        )
        for place, tensor in enumerate(tensors)
        if tensor is not None
    ]
    results = [ir.Value(name=f"{n}_whole", type=t, shape=s) for n, t, s in result_shapes]
    call = ir.Node("local", "Whole", [*outer_inputs, *stored], outputs=results, name="call")
    graph = ir.Graph(
        outer_inputs,
        results,
        nodes=[call],
        initializers=stored,
        opset_imports={**model.opset_imports, "local": 1},
        name="outer",
    )
    return ir.Model(graph, ir_version=model.ir_version, functions=[function])
