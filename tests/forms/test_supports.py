"""What each form says of each feature: natively, by which other means, or not and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from features import FEATURES
from verdict_page import page

from mha_export.errors import InputError
from mha_export.forms import FormParams, Supported, Unsupported, all_forms, form_named
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    JointSpec,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
)

PAGE = Path(__file__).parents[2] / "docs" / "forms" / "features.md"
CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
SQUARE = {"q_len": "s", "kv_len": "s"}


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 4, "head_dim": 16} | fields)


MEANS = [
    # form, opset, feature, what is said by other means
    ("primitive", 13, "sinks-cache", {}),
    ("onnx", 23, "gqa", {}),
    ("onnx", 23, "causal-top-left", {}),
    ("onnx", 23, "causal-bottom-right", {"causal": "boolean mask"}),
    ("onnx", 23, "cache", {}),
    ("onnx", 23, "cache-top-left", {"causal": "boolean mask"}),
    ("onnx", 23, "cache-bshd", {"cache": "Concat", "causal": "boolean mask"}),
    ("onnx", 23, "window-both", {"left_window": "boolean mask", "right_window": "boolean mask"}),
    ("onnx", 25, "window-both", {}),
    ("onnx", 25, "cache-window", {}),
    ("onnx", 23, "lengths", {"lengths": "boolean mask"}),
    ("onnx", 24, "lengths", {}),
    ("onnx", 24, "lengths-causal", {}),
    ("onnx", 24, "lengths-top-left", {"lengths": "boolean mask"}),
    ("onnx", 24, "static", {"cache": "TensorScatter"}),
    (
        "onnx",
        23,
        "static",
        {"cache": "ScatterElements", "causal": "boolean mask", "lengths": "boolean mask"},
    ),
    ("onnx", 23, "keep-inf-zero", {}),
    ("onnx", 23, "keep-inf-nan", {"empty_row": "Where on the output"}),
    ("onnx", 23, "padding-min-uniform", {"padding": "additive mask"}),
    ("onnx", 23, "keep-finite-finite", {"keep": "additive mask"}),
    ("onnx", 23, "sinks", {"sinks": "an extra all-zero key whose bias is the sink"}),
    ("onnx", 23, "scale-negative", {"scale": "multiplied into the query"}),
    ("onnx", 23, "rotary", {"rotary": "RotaryEmbedding"}),
    ("onnx", 23, "rms", {"qk_norm": "RMSNormalization"}),
    ("onnx", 23, "layer", {"qk_norm": "plain ops before the op"}),
    (
        "onnx",
        24,
        "latent-absorbed",
        {
            "cache": "Concat",
            "causal": "boolean mask",
            "rotary": "plain ops before the op",
            "value_source": "Slice of the keys",
        },
    ),
    ("onnx", 23, "mean", {"combine": "ReduceMean after the op"}),
    ("onnx", 23, "key-prefix", {"value_source": "Slice of the keys"}),
    ("onnx", 23, "alibi", {"alibi": "additive mask"}),
    ("ort-mha", 17, "mha", {}),
    ("ort-mha", 17, "cache-mha", {}),
    ("ort-mha", 17, "causal-top-left", {"causal": "additive mask"}),
    (
        "ort-mha",
        17,
        "scale-0",
        {
            "kv_heads": "keys and values repeated per query head",
            "scale": "multiplied into the query",
        },
    ),
    ("ort-mha", 17, "cache-v-head-dim", {"cache": "Concat", "causal": "additive mask"}),
    ("ort-gqa", 17, "cache", {}),
    ("ort-gqa", 17, "cache-window", {}),
    ("ort-gqa", 17, "sinks-cache", {}),
    ("ort-gqa", 17, "softcap", {}),
    ("ort-gqa", 17, "rotary-cache", {}),
    ("ort-gqa", 17, "rotary-input", {"rotary": "plain ops before the op"}),
    ("ort-gqa", 24, "rotary-partial", {"rotary": "RotaryEmbedding"}),
    ("ort-gqa", 17, "static-shared", {}),
    ("ort-gqa", 17, "static", {"cache": "rows at and beyond kv_lengths are unspecified"}),
    ("ort-gqa", 17, "prefix", {"causal": "additive mask"}),
    ("trt", 17, "causal-top-left", {"causal": "additive mask"}),
    ("portable", 18, "cache-mha", {"cache": "Concat", "causal": "additive mask"}),
]


@pytest.mark.parametrize(
    ("form", "opset", "feature", "means"),
    MEANS,
    ids=[f"{form}-{opset}-{feature}" for form, opset, feature, _ in MEANS],
)
def test_other_means_are_recorded(
    form: str, opset: int, feature: str, means: dict[str, str]
) -> None:
    verdict = form_named(form).supports(FEATURES[feature], FormParams(opset=opset))
    assert isinstance(verdict, Supported)
    assert verdict.by_other_means == means


def test_the_page_of_features_is_what_the_forms_say() -> None:
    """A verdict that changes shows here: look whether it is meant."""
    text = PAGE.read_text(encoding="utf-8")
    made = page()
    changed = [line for line in made.splitlines() if line not in text.splitlines()]
    assert made == text, "run scripts/regenerate_goldens and look at:\n" + "\n".join(changed)


@pytest.mark.parametrize("form", list(all_forms()))
def test_the_precision_of_softmax_is_said_or_recorded(form: str) -> None:
    """fp16 scores, fp32 softmax: in plain ops, as an attribute, or as the op has it."""
    projections = ProjectionSpec(d_model=24, packing="packed")
    spec = _spec(io_dtype=DType.FP16, softmax_dtype=DType.FP32, projections=projections, **SQUARE)
    verdict = form_named(form).supports(spec, FormParams(opset=23))
    assert isinstance(verdict, Supported)
    recorded = {"ort-attention", "ort-gqa", "ort-mha", "portable"}
    assert ("softmax_dtype" in verdict.by_other_means) is (form in recorded)
    same = form_named(form).supports(spec.replace(softmax_dtype=None), FormParams(opset=23))
    assert isinstance(same, Supported)
    assert "softmax_dtype" not in same.by_other_means


REFUSALS = [
    # form, spec, the feature named
    ("onnx", _spec(), {"opset": 22}, "opset"),
    ("primitive", _spec(), {"opset": 12}, "opset"),
    (
        "primitive",
        _spec(
            io_dtype=DType.FP16, mask=MaskSpec(padding=True, fill=-1e9, empty_row=EmptyRow.FINITE)
        ),
        {},
        "fill",
    ),
    ("primitive", FEATURES["keep-inf-finite"], {}, "empty_row"),
    ("onnx", FEATURES["scores-raw"].replace(sinks=True), {}, "qk_output"),
    ("onnx", FEATURES["scores-masked-min"], {}, "qk_output"),
    (
        "onnx",
        FEATURES["scores-masked"].replace(mask=FEATURES["bias"].mask),
        {},
        "qk_output",
    ),
    (
        "onnx",
        FEATURES["scores-probabilities-keep"].replace(
            mask=MaskSpec(keep=("q_len", "kv_len"), empty_row=EmptyRow.NAN)
        ),
        {},
        "qk_output",
    ),
    ("ort-mha", FEATURES["softcap"], {}, "softcap"),
    ("ort-mha", FEATURES["scores-raw"].replace(softcap=None), {}, "qk_output"),
    ("ort-mha", _spec(io_dtype=DType.FP64), {}, "io_dtype"),
    ("ort-gqa", _spec(io_dtype=DType.FP64, **SQUARE), {}, "io_dtype"),
    ("ort-gqa", FEATURES["gqa"], {}, "kv_len"),
    ("ort-gqa", FEATURES["gqa-v-head-dim"], {}, "v_head_dim"),
    ("ort-gqa", FEATURES["head-dim-6"], {}, "head_dim"),
    ("ort-gqa", FEATURES["cache-bshd"], {}, "cache.layout"),
    ("ort-gqa", FEATURES["cache-prefix"], {}, "causal"),
    ("ort-gqa", FEATURES["cache-not-causal"], {}, "causal"),
    ("ort-gqa", FEATURES["key-prefix-whole"].replace(**SQUARE), {}, "value_source"),
    ("ort-gqa", _spec(cross=True, cache=CacheSpec(growth="static"), mask=CAUSAL), {}, "cross"),
    ("ort-gqa", FEATURES["scores-raw"].replace(**SQUARE), {}, "qk_output"),
    ("trt", FEATURES["cache"], {}, "cache"),
    ("trt", FEATURES["softcap"], {}, "softcap"),
    ("trt", FEATURES["sinks"], {}, "sinks"),
    ("trt", FEATURES["scores-raw"].replace(softcap=None), {}, "qk_output"),
    ("trt", _spec(io_dtype=DType.FP64), {}, "io_dtype"),
    ("portable", _spec(io_dtype=DType.BF16), {}, "io_dtype"),
    ("ort-attention", _spec(), {}, "projections"),
]
PROJECTED: dict[str, Any] = {"projections": ProjectionSpec(d_model=24)}
REFUSALS += [
    ("ort-attention", _spec(**PROJECTED | fields), {}, feature)
    for feature, fields in {
        "projections.packing": {"projections": ProjectionSpec(d_model=24, packing="interleaved")},
        "projections.joint": {
            "projections": ProjectionSpec(d_model=24, joint=JointSpec(lengths=("a", "b"))),
            **SQUARE,
        },
        "io_dtype": {"io_dtype": DType.FP64},
        "cross": {"cross": True},
        "kv_heads": {"kv_heads": 2},
        "value_source": {"value_source": "key_prefix"},
        "cache": {"cache": CacheSpec(), "mask": CAUSAL},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": True},
        "rotary": {"rotary": RotarySpec(dim=16, theta=1e4)},
        "qk_norm": {"qk_norm": QkNormSpec(kind="rms")},
        "scale": {"scale": 0.0},
    }.items()
]


@pytest.mark.parametrize(
    ("form", "spec", "params", "feature"),
    REFUSALS,
    ids=[f"{form}-{feature}-{at}" for at, (form, _, _, feature) in enumerate(REFUSALS)],
)
def test_a_refusal_names_the_first_feature_and_what_it_needs(
    form: str, spec: AttentionSpec, params: dict[str, Any], feature: str
) -> None:
    verdict = form_named(form).supports(spec, FormParams(**{"opset": 25} | params))
    assert isinstance(verdict, Unsupported)
    assert not verdict
    assert verdict.feature == feature
    assert str(verdict).startswith(f"{feature}: needs ")


def test_primitive_states_every_feature() -> None:
    refused = [
        name
        for name, spec in FEATURES.items()
        if not form_named("primitive").supports(spec, FormParams(opset=13))
    ]
    assert all(name.endswith("inf-finite") for name in refused)


def test_the_registry_knows_every_file() -> None:
    names = {"onnx", "ort-attention", "ort-gqa", "ort-mha", "portable", "primitive", "trt"}
    assert names <= set(all_forms())
    for name, form in all_forms().items():
        assert form.name == name
        assert form.summary


def test_an_unknown_form_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"choose one of: .*onnx, ort-attention"):
        form_named("flash")


def test_params_are_recorded_in_order() -> None:
    params = FormParams(opset=21, options={"b": 1, "a": True})
    assert list(params.to_json()) == ["opset", "a", "b"]
