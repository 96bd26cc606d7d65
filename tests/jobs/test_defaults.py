"""Which form comes first where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mha_export.jobs import SourceSettings, build_graph, export_model
from mha_export.jobs._defaults import faster_options, opset_for, preferred_forms
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment, EmptyRow, MaskSpec

ORDER = ("onnx", "primitive")
CAUSAL = MaskSpec(causal=CausalAlignment.TOP_LEFT)
PADDED = MaskSpec(padding=True, empty_row=EmptyRow.ZERO)
BIASED = MaskSpec(bias=(1, 2048))
STEP = {"q_len": 1, "kv_len": "t", "cache": CacheSpec(growth="concat")}


@pytest.mark.parametrize(
    ("target", "fields", "first"),
    [
        ("cpu", {"q_len": 2048, "kv_len": 2048, "mask": CAUSAL}, "tiled"),
        ("openvino", {"q_len": 2048, "kv_len": 2048, "mask": CAUSAL}, "tiled"),
        ("cpu", {"q_len": 512, "kv_len": 512, "mask": CAUSAL}, "onnx"),
        ("cpu", {"q_len": 2048, "kv_len": 2048}, "onnx"),
        ("cpu", {"q_len": 2048, "kv_len": 2048, "kv_heads": 4}, "ort-mha"),
        ("cpu", {"q_len": 512, "kv_len": 512, "kv_heads": 4}, "onnx"),
        ("cpu", {"q_len": 2048, "kv_len": "t", "kv_heads": 4}, "onnx"),
        ("cpu", {"q_len": 2048, "kv_len": 2048, "kv_heads": 4, "mask": PADDED}, "onnx"),
        ("cpu", {"q_len": 2048, "kv_len": 2048, "kv_heads": 4, "mask": BIASED}, "onnx"),
        ("openvino", {"q_len": 2048, "kv_len": 2048, "kv_heads": 4}, "onnx"),
        ("cpu", {"q_len": "s", "kv_len": "s", "mask": CAUSAL}, "onnx"),
        ("cuda", {"q_len": 2048, "kv_len": 2048, "mask": CAUSAL}, "onnx"),
        ("cpu", STEP, "grouped"),
        ("cuda", STEP, "onnx"),
        ("cpu", {"q_len": 1, "kv_len": "t"}, "onnx"),
    ],
)
def test_the_first_form(target: str, fields: dict[str, object], first: str) -> None:
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
    spec = AttentionSpec(**(sizes | fields))  # type: ignore[arg-type]
    order = preferred_forms(target, spec, ORDER)
    assert order[0] == first
    assert order[-2:] == ORDER


@pytest.mark.parametrize(
    ("target", "growth", "opset"),
    [
        ("cpu", None, 17),
        ("cpu", "concat", 17),
        ("cpu", "static", 24),
        ("cpu", "shared_buffer", 24),
        ("openvino", "static", 17),
    ],
)
def test_the_opset_that_is_wanted(target: str, growth: str | None, opset: int) -> None:
    cache = None if growth is None else CacheSpec(growth=growth, max_length=8)  # type: ignore[arg-type]
    spec = AttentionSpec(
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        cache=cache,
        mask=MaskSpec(empty_row=EmptyRow.ZERO) if growth in ("static", "shared_buffer") else CAUSAL,
    )
    assert opset_for(target, ("ort-mha", "onnx"), [spec], own=17, most=25) == opset
    assert opset_for(target, ("ort-mha", "onnx"), [spec], own=17, most=21) == min(opset, 21)
    assert opset_for(target, ("onnx",), [spec], own=17, most=25) == max(opset, 23)


@pytest.mark.parametrize(
    ("target", "form", "q_len", "told"),
    [
        ("openvino", "tiled", 2048, {"tiles": 32}),
        ("openvino", "tiled", 4033, {"tiles": 64}),
        ("openvino", "tiled", 16384, {"tiles": 64}),
        ("openvino", "tiled", "s", None),
        ("openvino", "grouped", 2048, None),
        ("cpu", "tiled", 2048, {"product": "attention"}),
        ("cpu", "tiled", "s", {"product": "attention"}),
        ("cuda", "tiled", 2048, None),
    ],
)
def test_what_a_form_is_told(
    target: str, form: str, q_len: int | str, told: dict[str, object] | None
) -> None:
    spec = AttentionSpec(q_heads=4, kv_heads=2, head_dim=16, q_len=q_len, kv_len=q_len, mask=CAUSAL)
    assert faster_options(target, form, spec) == told


@pytest.mark.parametrize(
    ("target", "opset", "softcap", "told"),
    [
        ("cpu", None, None, {"product": "attention"}),
        ("cpu", 17, None, {}),
        ("cpu", None, 5.0, {}),
        ("openvino", None, None, {"tiles": 1}),
        ("reference", None, None, None),
    ],
    ids=["op", "opset", "spec", "tiles", "target"],
)
def test_a_long_prompt_gets_an_op_a_tile_where_it_can(
    target: str,
    opset: int | None,
    softcap: float | None,
    told: dict[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mha_export.jobs._defaults.LONG", 64)
    mask = MaskSpec(causal=CausalAlignment.TOP_LEFT)
    sizes = {"batch": 1, "q_len": 64, "kv_len": 64}
    spec = AttentionSpec(q_heads=1, kv_heads=1, head_dim=4, mask=mask, softcap=softcap, **sizes)  # type: ignore[arg-type]
    source = tmp_path / "prompt.onnx"
    build_graph(spec, output=source, flags={"form": "primitive", "opset": 17})
    result = export_model(
        source,
        targets=[target],
        out=tmp_path / "out",
        source_settings=SourceSettings(opset=opset),
    )
    (site,) = result.document["variants"][0]["sites"].values()
    expected = "tiled" if told is not None else "onnx"
    assert (site["status"], site["form"]) == ("fused", expected), site["reason"]
    assert {k: v for k, v in site["params"].items() if k != "opset"} == (told or {})
