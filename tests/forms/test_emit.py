"""Emission into someone else's graph: any layout, values of unknown shape, masks as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emission import emitted_model, graph_input, run_model

from mha_export.cases import cases
from mha_export.forms import FormParams, Scope, all_forms, form_named
from mha_export.operands import Heads, Layout, Operands, Projection, RotaryTables, ScoreMask
from mha_export.oracle import OracleInputs, attention, rotary_tables
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    ProjectionSpec,
    QkNormSpec,
    RotarySpec,
    RotaryStyle,
)

Arrays = dict[str, np.ndarray]
CAUSAL = MaskSpec(causal=CausalAlignment.BOTTOM_RIGHT)
SQUARE = {"q_len": "s", "kv_len": "s"}
FORMS = tuple(form for form in all_forms() if form != "ort-attention")
ONE_MASK = ("onnx", "ort-gqa", "ort-mha", "portable", "primitive", "trt")
"""Forms that put the whole mask in one place; others may cut it up as they like."""


def _spec(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{"q_heads": 4, "kv_heads": 2, "head_dim": 16} | fields)


def laid_out(x_bhsd: np.ndarray, layout: Layout) -> np.ndarray:
    b, h, s, d = x_bhsd.shape
    if layout is Layout.BHSD:
        return x_bhsd
    bshd = x_bhsd.swapaxes(1, 2)
    return bshd if layout is Layout.BSHD else bshd.reshape(b, s, h * d)


class Bound:
    """Operands over graph inputs, and the arrays that feed them."""

    def __init__(self, spec: AttentionSpec, inputs: OracleInputs, layouts: list[Layout]) -> None:
        self.arrays: Arrays = {}
        named: dict[str, Any] = {}
        for name, layout in zip(("query", "key", "value"), layouts, strict=True):
            array = getattr(inputs, name)
            named[name] = self.heads(name, array, layout)
        if spec.cache is not None:
            for name in ("past_key", "past_value"):
                named[name] = self.heads(name, getattr(inputs, name), Layout(spec.cache.layout))
        for name in ("keep", "bias", "key_padding", "kv_lengths", "sinks", "q_norm_weight"):
            array = getattr(inputs, name)
            if array is not None:
                named[name] = self.value(name, array)
        if inputs.k_norm_weight is not None:
            named["k_norm_weight"] = self.value("k_norm_weight", inputs.k_norm_weight)
        self.operands = Operands(**named)

    def heads(self, name: str, array: np.ndarray, layout: Layout) -> Heads:
        value = self.value(name, laid_out(array, layout))
        return Heads(value=value, layout=layout, heads=array.shape[1], dim=array.shape[3])

    def value(self, name: str, array: np.ndarray) -> ir.Value:
        typed = array.astype(np.float32) if array.dtype == np.float64 else array
        self.arrays[name] = np.ascontiguousarray(typed)
        return graph_input(name, self.arrays[name], shaped=False)

    def with_mask(self, array: np.ndarray, kind: Any) -> None:
        mask = ScoreMask(value=self.value("score_mask", array), kind=kind)
        self.operands = replace(self.operands, score_mask=mask)

    def with_rotary(self, **tables: Any) -> None:
        given = {
            name: self.value(name, array) if isinstance(array, np.ndarray) else array
            for name, array in tables.items()
        }
        self.operands = replace(self.operands, rotary=RotaryTables(**given))


def emitted_output(
    form: str, spec: AttentionSpec, bound: Bound, *, opset: int = 23
) -> tuple[np.ndarray, Arrays, ir.Model]:
    model, heads = emitted_model(form, spec, bound.operands, opset=opset)
    found = run_model(model, bound.arrays)
    output = found["output"]
    if heads.layout is Layout.BSM:
        b, s, _ = output.shape
        output = output.reshape(b, s, heads.heads, heads.dim).swapaxes(1, 2)
    elif heads.layout is Layout.BSHD:
        output = output.swapaxes(1, 2)
    return output, found, model


def first_case(spec: AttentionSpec, **dims: int) -> OracleInputs:
    return next(iter(cases(spec, battery="quick", dims=dims or None))).inputs


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


LAYOUTS = {
    "bsm": [Layout.BSM] * 3,
    "bshd": [Layout.BSHD] * 3,
    "bhsd": [Layout.BHSD] * 3,
    "mixed": [Layout.BHSD, Layout.BSHD, Layout.BSM],
    "query-apart": [Layout.BHSD, Layout.BSM, Layout.BSM],
}
LAID_OUT = {
    "cached": _spec(mask=CAUSAL, cache=CacheSpec()),
    "square": _spec(mask=CAUSAL, **SQUARE),
    "norm": _spec(qk_norm=QkNormSpec(kind="rms"), **SQUARE),
    "norm-hidden": _spec(qk_norm=QkNormSpec(kind="rms", over="hidden"), **SQUARE),
    "sinks": _spec(sinks=True, mask=CAUSAL, **SQUARE),
    "uniform": _spec(mask=MaskSpec(padding=True, empty_row=EmptyRow.UNIFORM), **SQUARE),
}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "ort-gqa"])
def test_a_bias_of_another_type_is_cast(form: str) -> None:
    """An fp16 graph may compute its positions in fp32."""
    spec = _spec(mask=MaskSpec(bias=(1, 4, "s", "s")), io_dtype=DType.FP16, kv_heads=4, **SQUARE)
    inputs = first_case(spec)
    bound = Bound(spec, inputs, [Layout.BSM] * 3)
    for name in ("query", "key", "value"):
        bound.arrays[name] = bound.arrays[name].astype(np.float16)
        getattr(bound.operands, name).value.type = ir.TensorType(ir.DataType.FLOAT16)
    output, _, _ = emitted_output(form, spec, bound)
    np.testing.assert_allclose(output, attention(spec, inputs).output, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize("form", FORMS)
def test_any_layout_and_no_shapes(form: str, name: str, layouts: list[Layout]) -> None:
    spec = LAID_OUT[name]
    if not form_named(form).supports(spec, FormParams(opset=23)):
        assert form == "trt"
        return
    inputs = first_case(spec)
    exact = attention(spec, inputs)
    output, found, _ = emitted_output(form, spec, Bound(spec, inputs, layouts))
    close(output, exact.output)
    if spec.cache is not None:
        close(found["present_key"], exact.present_key)


@pytest.mark.parametrize(("layout", "moves"), [("bsm", 0), ("bhsd", 0), ("mixed", 1)])
def test_onnx_moves_as_few_tensors_as_it_can(layout: str, moves: int) -> None:
    spec = _spec()
    _, _, model = emitted_output("onnx", spec, Bound(spec, first_case(spec), LAYOUTS[layout]))
    types = [node.op_type for node in model.graph]
    assert types.count("Transpose") <= moves
    assert types[-1] == "Attention"


def _hidden_causal(s: int, t: int) -> np.ndarray:
    return np.arange(t)[None] > np.arange(s)[:, None] + t - s


MASK_SHAPES = {
    "b1st": lambda hidden: hidden[:, None],
    "11st": lambda hidden: hidden[:1, None],
    "st": lambda hidden: hidden[0],
    "b11t": lambda hidden: hidden[:, None, :1],
}


@pytest.mark.parametrize("kind", ["additive", "keep"])
@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_bound_mask_is_used_as_it_is(form: str, shape: str, kind: str) -> None:
    """The spec says a window that few forms have a word for; the graph's own mask says it too."""
    mask = MaskSpec(left_window=1, right_window=1)
    if shape == "b11t":
        mask = MaskSpec(padding=True, empty_row=EmptyRow.ZERO)
    spec = _spec(mask=mask, **SQUARE)
    inputs = first_case(spec, batch=2)
    s = inputs.query.shape[2]
    hidden = np.abs(np.arange(s)[:, None] - np.arange(s)[None]) > 1
    hidden = np.broadcast_to(hidden, (2, s, s))
    if shape == "b11t":
        hidden = np.broadcast_to((inputs.key_padding == 0)[:, None], (2, s, s))
    hidden = MASK_SHAPES[shape](hidden)
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    array = np.where(hidden, -np.inf, 0.0).astype(np.float32) if kind == "additive" else ~hidden
    bound.with_mask(array, kind)
    output, _, model = emitted_output(form, spec, bound)
    close(output, attention(spec, inputs).output)
    # tiled compares positions itself: a tile's mask is smaller than a cut of the whole one.
    compares = form == "tiled" and shape != "b11t"
    assert ("Range" in [node.op_type for node in model.graph]) is compares


READS_A_MASK = {
    "grouped": True, "onnx": False, "ort-gqa": False, "ort-mha": False, "portable": True,
    "primitive": True, "tiled": False, "trt": True,
}  # fmt: skip
"""Whether a form reads a bound mask that it has a word for; a form that is added may do either."""


@pytest.mark.parametrize("form", FORMS)
def test_a_bound_mask_is_ignored_where_the_form_has_the_word(form: str) -> None:
    spec = _spec(mask=MaskSpec(causal=CausalAlignment.TOP_LEFT), **SQUARE)
    inputs = first_case(spec)
    s = inputs.query.shape[2]
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    bound.with_mask(np.where(_hidden_causal(s, s), -np.inf, 0.0).astype(np.float32), "additive")
    output, _, model = emitted_output(form, spec, bound)
    close(output, attention(spec, inputs).output)
    read = {value.name for node in model.graph for value in node.inputs if value is not None}
    reads = "score_mask" in read
    assert reads is READS_A_MASK.get(form, reads)


@pytest.mark.parametrize(
    ("fill", "policy"),
    [("min", EmptyRow.UNIFORM), (-10000.0, EmptyRow.FINITE), ("-inf", EmptyRow.NAN)],
    ids=["min", "finite", "nan"],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_bound_mask_keeps_its_fill(form: str, fill: Any, policy: EmptyRow) -> None:
    """The row without a key is what tells one fill from another."""
    spec = _spec(mask=MaskSpec(padding=True, fill=fill, empty_row=policy), **SQUARE)
    inputs = first_case(spec, batch=2)
    padding = inputs.key_padding.copy()
    padding[0] = 0
    inputs = inputs.replace(key_padding=padding)
    number = {"min": np.finfo(np.float32).min, "-inf": -np.inf}.get(fill, fill)
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    added = np.where(padding == 0, number, 0.0).astype(np.float32)[:, None, None]
    bound.with_mask(added, "additive")
    output, _, _ = emitted_output(form, spec, bound)
    exact = attention(spec, inputs).output
    assert np.array_equal(np.isnan(output), np.isnan(exact))
    # A finite fill of 1e4 leaves the scores three digits.
    np.testing.assert_allclose(output, exact, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("form", FORMS)
def test_bias_and_bound_mask_add_up(form: str) -> None:
    mask = MaskSpec(bias=(1, 4, "s", "s"), padding=True, empty_row=EmptyRow.ZERO)
    spec = _spec(mask=mask, **SQUARE)
    inputs = first_case(spec, batch=2)
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    hidden = (inputs.key_padding == 0)[:, None, None]
    bound.with_mask(np.where(hidden, -np.inf, 0.0).astype(np.float32), "additive")
    output, _, _ = emitted_output(form, spec, bound)
    close(output, attention(spec, inputs).output)


def test_a_full_bound_mask_is_not_expanded_again() -> None:
    spec = _spec(mask=MaskSpec(left_window=1, right_window=1), **SQUARE)
    inputs = first_case(spec)
    s = inputs.query.shape[2]
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    bound.with_mask(np.zeros((1, 1, s, s), np.float32), "additive")
    assert bound.operands.score_mask is not None
    bound.operands.score_mask.value.shape = ir.Shape([1, 1, "s", "s"])
    _, _, model = emitted_output("onnx", spec, bound)
    assert [node.op_type for node in model.graph] == ["Attention"]


ROTARY_TABLES = ["shared", "per-row", "position-ids", "full-width", "keys-after-cache"]


@pytest.mark.parametrize("style", list(RotaryStyle), ids=lambda style: style.value)
@pytest.mark.parametrize("tables", ROTARY_TABLES)
@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("form", ["primitive", "onnx", "ort-mha", "ort-gqa"])
def test_rotary_tables_of_every_kind(
    form: str, opset: int, tables: str, style: RotaryStyle
) -> None:
    if form == "onnx" and opset < 23:
        opset = 24
    positions = "input" if tables == "position-ids" else "sequence"
    rotary = RotarySpec(dim=16, style=style, positions=positions)
    spec = _spec(mask=CAUSAL, cache=CacheSpec(), rotary=rotary)
    inputs = first_case(spec, batch=2, q_len=3, past_len=2)
    source = RotarySpec(dim=16, style=style, theta=1e4)
    where = np.arange(2, 5)[None] + (np.array([[0], [3]]) if tables == "per-row" else 0)
    cos, sin = rotary_tables(source, where)
    given: Arrays = {"cos": cos, "sin": sin}
    if tables == "position-ids":
        cos, sin = rotary_tables(source, np.arange(9))
        given = {"cos": cos, "sin": sin, "position_ids": np.broadcast_to(np.arange(2, 5), (2, 3))}
    elif tables == "keys-after-cache":
        key_cos, key_sin = rotary_tables(source, np.arange(5)[None])
        given |= {"key_cos": key_cos, "key_sin": key_sin}
    assert inputs.rotary is not None
    exact = attention(spec, inputs.replace(rotary=replace(type(inputs.rotary)(), **given)))
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    half = tables != "full-width"
    if not half:
        double = np.concatenate if style is RotaryStyle.HALF else _twice
        given = {name: double([table, table], axis=-1) for name, table in given.items()}
    bound.with_rotary(**given, half_width=half)
    if form == "ort-gqa" and tables == "keys-after-cache":
        with pytest.raises(ValueError, match="rotates all keys after the cache"):
            emitted_output(form, spec, bound, opset=opset)
        return
    output, found, _ = emitted_output(form, spec, bound, opset=opset)
    close(output, exact.output)
    close(found["present_key"], exact.present_key)


def _twice(tables: list[np.ndarray], *, axis: int) -> np.ndarray:
    return np.repeat(tables[0], 2, axis=axis)


def test_whole_tables_rotate_inside_ort_gqa() -> None:
    """Where the positions are the sequence's own, the op gathers the rows by itself."""
    rotary = RotarySpec(dim=16)
    spec = _spec(mask=CAUSAL, cache=CacheSpec(), rotary=rotary)
    inputs = first_case(spec, batch=2, q_len=3, past_len=2)
    source = RotarySpec(dim=16, theta=1e4)
    cos, sin = rotary_tables(source, np.arange(2, 5)[None])
    exact = attention(spec, inputs.replace(rotary=replace(inputs.rotary, cos=cos, sin=sin)))
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    cos, sin = rotary_tables(source, np.arange(9))
    position_ids = np.broadcast_to(np.arange(2, 5), (2, 3)).copy()
    bound.with_rotary(cos=cos, sin=sin, position_ids=position_ids)
    bound.arrays.pop("position_ids")
    scope = Scope("x", opset=21)
    emitted = form_named("ort-gqa").emit(scope, spec, FormParams(opset=21), bound.operands)
    (node,) = (node for node in scope.nodes if node.op_type == "GroupQueryAttention")
    assert node.attributes["do_rotary"].as_int() == 1
    assert emitted.output.layout is Layout.BSM
    bound.arrays["position_ids"] = position_ids
    output, _, _ = emitted_output("ort-gqa", spec, bound)
    close(output, exact.output)


def test_ort_attention_without_a_packed_projection_says_what_it_needs() -> None:
    spec = _spec(kv_heads=4)
    bound = Bound(spec, first_case(spec), LAYOUTS["bsm"])
    with pytest.raises(ValueError, match=r"operands\.projection"):
        form_named("ort-attention").emit(Scope("", opset=21), spec, FormParams(), bound.operands)


def test_ort_attention_takes_a_bound_mask() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((2, 5, 12)), rng.standard_normal((12, 96)) / 4
    spec = AttentionSpec(
        q_heads=4,
        kv_heads=4,
        head_dim=8,
        mask=MaskSpec(left_window=1, right_window=1),
        projections=ProjectionSpec(d_model=12, packing="packed", output=False),
        **SQUARE,
    )
    query, key, value = (
        part.reshape(2, 5, 4, 8).swapaxes(1, 2) for part in np.split(x @ weight, 3, axis=-1)
    )
    inputs = OracleInputs(query=query, key=key, value=value)
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    hidden = np.abs(np.arange(5)[:, None] - np.arange(5)) > 1
    bound.with_mask(np.where(hidden, -np.inf, 0.0).astype(np.float32)[None, None], "additive")
    projection = Projection(value=bound.value("x", x), weight=bound.value("w", weight))
    bound.operands = replace(bound.operands, projection=projection)
    output, _, _ = emitted_output("ort-attention", spec, bound)
    close(output, attention(spec, inputs).output)


def test_half_precision_masks_are_of_the_io_dtype() -> None:
    """TensorRT refuses an fp32 mask beside fp16 scores."""
    spec = _spec(mask=CAUSAL, io_dtype=DType.FP16, **SQUARE)
    scope = Scope("", opset=18)
    inputs = first_case(spec)
    bound = Bound(spec, inputs, LAYOUTS["bsm"])
    form_named("trt").emit(scope, spec, FormParams(opset=18), bound.operands)
    (add,) = (node for node in scope.nodes if node.op_type == "Add")
    assert {value.dtype for value in add.inputs if value is not None} == {ir.DataType.FLOAT16}
