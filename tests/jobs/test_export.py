from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.forms import all_forms
from mha_export.jobs import (
    ExportSettings,
    SourceSettings,
    build_graph,
    export_model,
    inspect_model,
)
from mha_export.jobs._destinations import destinations_of
from mha_export.operands import ir_dtype
from mha_export.report.records import read_export, validate
from mha_export.spec import AttentionSpec, DType


def ops(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(path).graph)


def test_a_folder_holds_every_variant_one_weights_file_and_the_record(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "cpu.onnx",
        "reference.onnx",
        "portable.onnx",
        "original.onnx",
        "weights.bin",
        "export.json",
    }
    record = read_export(exported / "export.json")
    assert [variant.target for variant in record.variants] == ["cpu", "reference", "portable"]
    for variant in record.variants:
        (outcome,) = variant.sites.values()
        assert outcome.status == "fused"
        assert outcome.proof is not None
        assert outcome.proof.cases > 5
        assert "oracle" in outcome.proof.against


def test_export_json_is_valid_and_names_the_sites_that_inspect_names(
    exported: Path, encoder: Path
) -> None:
    document = json.loads((exported / "export.json").read_text())
    validate("export", document)
    inspected = inspect_model(encoder).document
    assert [s["id"] for s in document["sites"]] == [s["id"] for s in inspected["sites"]]


@pytest.mark.parametrize(("form", "op"), [("onnx", "Attention"), ("ort-mha", "MultiHeadAttention")])
def test_a_forced_form_is_one_node_without_transposes(
    encoder: Path, tmp_path: Path, form: str, op: str
) -> None:
    if form == "ort-mha":
        pytest.importorskip("onnxruntime", reason="the contrib op is proven on ONNX Runtime")
    result = export_model(
        encoder, targets=["cpu"], out=tmp_path / "out", settings=ExportSettings(form=form)
    )
    assert result.ok
    found = ops(tmp_path / "out" / "cpu.onnx")
    assert found[op] == 1
    assert found["Softmax"] == 0
    if form == "onnx":  # MultiHeadAttention has no grouped heads: those are repeated before it
        assert found["Transpose"] == 0


def test_same_source_same_bytes(exported: Path, encoder: Path, tmp_path: Path) -> None:
    """In a process whose sets and dictionaries of strings hash otherwise, too."""
    program = (
        "import sys; from mha_export.jobs import export_model; "
        "export_model(sys.argv[1], targets=['cpu', 'reference', 'portable'], out=sys.argv[2])"
    )
    again = tmp_path / "again"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run(
        [sys.executable, "-c", program, encoder, again],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
    )
    for file in exported.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_a_plan_decides_the_form(encoder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"targets": {"cpu": {"*": {"form": "primitive"}}}}))
    result = export_model(
        encoder, targets=["cpu"], out=tmp_path / "out", settings=ExportSettings(plan=plan)
    )
    (outcome,) = result.document["variants"][0]["sites"].values()
    assert outcome["form"] == "primitive"
    assert ops(tmp_path / "out" / "cpu.onnx")["Softmax"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("not json", "not JSON", id="not JSON"),
        pytest.param("[]", "not a plan", id="not an object"),
        pytest.param('{"targets": {"cpu": 1}}', "expected an object of site ids", id="no sites"),
        pytest.param('{"targets": {"cpu": {"*": {}}}}', "with a 'form'", id="no form"),
        pytest.param('{"targets": {"cpu": {"*": {"form": "x"}}}}', "unknown form", id="unknown"),
    ],
)
def test_a_bad_plan_is_refused(encoder: Path, tmp_path: Path, text: str, message: str) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    with pytest.raises(InputError, match=message):
        export_model(
            encoder, targets=["cpu"], out=tmp_path / "out", settings=ExportSettings(plan=plan)
        )
    assert not (tmp_path / "out").exists()


def test_a_form_that_cannot_say_the_site_keeps_it_and_says_why(
    encoder18: Path, tmp_path: Path
) -> None:
    result = export_model(
        encoder18,
        targets=["cpu"],
        out=tmp_path / "out",
        source_settings=SourceSettings(opset=18),
        settings=ExportSettings(form="onnx"),
    )
    (outcome,) = result.document["variants"][0]["sites"].values()
    assert outcome["status"] == "kept"
    assert "opset" in outcome["reason"]
    assert any("kept" in notice for notice in result.notices)


def test_require_fused_refuses_and_writes_nothing(encoder18: Path, tmp_path: Path) -> None:
    result = export_model(
        encoder18,
        targets=["cpu"],
        out=tmp_path / "out",
        source_settings=SourceSettings(opset=18),
        settings=ExportSettings(form="onnx", require_fused=True),
    )
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()


@contextmanager
def dropped_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ``onnx`` form forgets half of the scale."""
    form = type(all_forms()["onnx"])
    emit = form.emit

    def wrong(self, scope, spec, params, operands):  # type: ignore[no-untyped-def]
        return emit(self, scope, spec.replace(scale=spec.effective_scale / 2), params, operands)

    with monkeypatch.context() as patch:
        patch.setattr(form, "emit", wrong)
        yield


def test_a_wrong_form_is_undone(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dropped_scale(monkeypatch):
        result = export_model(
            encoder, targets=["cpu"], out=tmp_path / "out", settings=ExportSettings(form="onnx")
        )
    (outcome,) = result.document["variants"][0]["sites"].values()
    assert outcome["status"] == "proof_failed"
    assert ops(tmp_path / "out" / "cpu.onnx")["Softmax"] == 1
    assert result.ok


def test_a_wrong_form_is_an_error_under_strict(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dropped_scale(monkeypatch):
        result = export_model(
            encoder,
            targets=["cpu"],
            out=tmp_path / "out",
            settings=ExportSettings(form="onnx", strict=True),
        )
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("targets", "form", "message"),
    [
        pytest.param(["nope"], None, "unknown target", id="target"),
        pytest.param(["cpu"], "nope", "unknown form", id="form"),
        pytest.param(["cpu:bf16"], None, "no precision", id="precision"),
    ],
)
def test_unknown_names_are_refused_before_any_work(
    targets: list[str], form: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        export_model(
            tmp_path / "missing.onnx",
            targets=targets,
            out=tmp_path / "out",
            settings=ExportSettings(form=form),
        )


def test_an_unknown_target_of_an_export_is_answered_with_every_name_it_takes(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match="unknown target") as caught:
        export_model(tmp_path / "missing.onnx", targets=["nope"], out=tmp_path / "out")
    assert str(caught.value.fix).endswith("all, portable")


def _in(dtype: str, folder: Path) -> Path:
    """An attention in ``dtype``."""
    spec = AttentionSpec(q_heads=2, kv_heads=2, head_dim=4, io_dtype=dtype)
    return build_graph(spec, output=folder / f"{dtype}.onnx").files[0]


@pytest.mark.parametrize(
    ("own", "dtype", "cast"),
    [
        ("fp32", "fp16", True),
        ("fp32", "bf16", True),
        ("fp16", "fp32", True),
        ("fp32", "fp32", False),
        ("fp64", None, False),
        ("fp16", None, False),
    ],
)
def test_an_export_has_the_precision_it_says_and_is_judged_against_the_model_in_it(
    tmp_path: Path, own: str, dtype: str | None, cast: bool
) -> None:
    out = tmp_path / "out"
    result = export_model(
        _in(own, tmp_path),
        targets=["reference"],
        out=out,
        source_settings=SourceSettings(dtype=dtype),
    )
    assert any(f"cast to {dtype}" in notice for notice in result.notices) is cast
    (variant,) = result.document["variants"]
    assert variant["dtype"] == (dtype or own)
    types = [
        [v.dtype for v in ir.load(out / f"{n}.onnx").graph.inputs]
        for n in ("original", "reference")
    ]
    assert types[0] == types[1] == [ir_dtype(DType(dtype or own))] * 3


def test_double_precision_is_not_cast_in_silence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in fp64, which is not cast"):
        inspect_model(_in("fp64", tmp_path), settings=SourceSettings(dtype="fp16"))


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-qdq"])
def test_quantised_weights_are_in_what_the_rewriting_is_judged_against(
    encoder: Path, tmp_path: Path, weights: str
) -> None:
    out = tmp_path / "out"
    result = export_model(
        encoder, targets=["cpu"], out=out, settings=ExportSettings(weights=weights)
    )
    assert result.ok, result.notices
    assert any(f"weights of {weights}" in notice for notice in result.notices)
    (variant,) = result.document["variants"]
    assert {site["status"] for site in variant["sites"].values()} == {"fused"}
    layer = "DequantizeLinear" if weights == "int4-qdq" else "MatMulNBits"
    counts = [
        sum(node.op_type == layer for node in ir.load(out / f"{name}.onnx").graph)
        for name in ("original", "cpu")
    ]
    assert counts[0] == counts[1] > 0


def test_every_precision_asked_of_a_target_can_veto_a_form() -> None:
    one, *more = destinations_of(["openvino:bf16", "openvino:f32", "cpu"], ExportSettings())
    assert one.precisions == ("bf16", "f32")
    assert [other.name for other in more] == ["cpu"]


def test_a_site_that_only_the_plan_knows_is_told(encoder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"targets": {"reference": {"*": {"form": "onnx"}, "s.9": {"form": "onnx"}}}}')
    result = export_model(
        encoder, targets=["reference"], out=tmp_path / "out", settings=ExportSettings(plan=plan)
    )
    assert result.notices == ("--plan: reference: the model has no site s.9",)


def with_another_softmax(encoder: Path, *, rejected: bool) -> ir.Model:
    """The encoder, and beside it a router, or scores through a sine, which no attention has."""
    model = ir.external_data.load_to_model(ir.load(encoder))
    graph = model.graph
    (y,) = graph.outputs
    weight = ir.val("router", const_value=ir.tensor(np.ones((32, 4), np.float32), name="router"))
    graph.register_initializer(weight)
    if rejected:
        turned = ir.node("Transpose", [y], attributes={"perm": [0, 2, 1]})
        product = ir.node("MatMul", [y, turned.outputs[0]])
        nodes = [turned, product, ir.node("Sin", product.outputs)]
    else:
        nodes = [ir.node("MatMul", [y, weight])]
    nodes.append(ir.node("Softmax", nodes[-1].outputs, attributes={"axis": -1}))
    if rejected:
        nodes.append(ir.node("MatMul", [nodes[-1].outputs[0], y]))
    extra = nodes[-1].outputs[0]
    extra.name, extra.dtype = "extra", y.dtype
    graph.extend(nodes)
    graph.outputs.append(extra)
    return model


@pytest.mark.parametrize("rejected", [False, True], ids=["a router", "a rejected softmax"])
def test_require_fused_counts_refusals_and_not_what_is_no_attention(
    encoder: Path, tmp_path: Path, rejected: bool
) -> None:
    model = with_another_softmax(encoder, rejected=rejected)
    result = export_model(
        model,
        targets=["reference"],
        out=tmp_path / "out",
        settings=ExportSettings(require_fused=True),
    )
    verdicts = [site["verdict"] for site in result.document["sites"]]
    assert verdicts == ["attention", "rejected" if rejected else "not_attention"]
    assert result.exit_code == int(rejected)
    assert (tmp_path / "out").exists() is not rejected
    if rejected:
        (reason,) = (site["reason"] for site in result.document["sites"][1:])
        assert any(f"rejected: {reason['code']}" in notice for notice in result.notices)


def test_a_plan_of_other_targets_is_told(encoder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"targets": {"openvino": {"*": {"form": "onnx"}}}}')
    result = export_model(
        encoder, targets=["reference"], out=tmp_path / "out", settings=ExportSettings(plan=plan)
    )
    assert result.notices == ("--plan: it is of openvino, and says nothing of reference",)
