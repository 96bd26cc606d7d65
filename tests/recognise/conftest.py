"""The proof that a site says what the graph does: bound operands through the oracle.

For a recognised site, the recogniser's copy is run with every operand and the site's output as
extra graph outputs; the operands go through :mod:`mha_export.oracle` under the site's spec, and the
result must equal what the graph computed. Nothing of the recogniser takes part in that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from mha_export.operands import Heads, Layout
from mha_export.oracle import OracleInputs, RotaryInputs, attention
from mha_export.recognise import Recognition, Site

Arrays = Mapping[str, np.ndarray]

_PLAIN = (
    "keep", "bias", "key_padding", "kv_lengths", "prefix_lengths", "document_ids", "sinks",
    "q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias",
)  # fmt: skip


def values_of(model: ir.Model, names: list[str], feeds: Arrays) -> dict[str, np.ndarray]:
    """The named values of the main graph at ``feeds``."""
    runtime = pytest.importorskip("onnxruntime")
    proto = ir.to_proto(model)
    known = {output.name for output in proto.graph.output}
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    given = {value.name for value in proto.graph.input}
    fixed = {n: onnx.numpy_helper.to_array(stored[n]) for n in names if n in stored}
    fixed |= {n: feeds[n] for n in names if n in given}
    asked = [n for n in dict.fromkeys(names) if n not in fixed]
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in asked if n not in known)
    given_feeds = {n: a for n, a in feeds.items() if n in given}
    try:
        found = _on_runtime(runtime, proto, asked, given_feeds)
    except runtime.capi.onnxruntime_pybind11_state.Fail:
        # ONNX Runtime has no kernel for some legal Attention inputs; the reference has
        found = onnx.reference.ReferenceEvaluator(proto).run(asked, given_feeds)
    return {**fixed, **dict(zip(asked, found, strict=True))}


def _on_runtime(
    runtime: Any, proto: onnx.ModelProto, asked: list[str], feeds: Arrays
) -> list[np.ndarray]:
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = runtime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[np.ndarray] = session.run(asked, feeds)
    return found


def bhsd(heads: Heads, arrays: Arrays) -> np.ndarray:
    array = arrays[heads.value.name or ""]
    if heads.layout is Layout.BSM:
        assert array.ndim == 3, (heads, array.shape)
        assert array.shape[2] == heads.heads * heads.dim, (heads, array.shape)
        array = array.reshape(*array.shape[:2], heads.heads, heads.dim)
    if heads.layout is not Layout.BHSD:
        array = array.transpose(0, 2, 1, 3)
    assert array.shape[1::2] == (heads.heads, heads.dim), (heads, array.shape)
    return array


def oracle_inputs(site: Site, arrays: Arrays) -> OracleInputs:
    """The site's operands as the oracle reads them."""
    operands = site.operands
    changes: dict[str, Any] = {}
    for name in ("past_key", "past_value"):
        heads = getattr(operands, name)
        if heads is not None:
            changes[name] = bhsd(heads, arrays)
    for name in _PLAIN:
        value = getattr(operands, name)
        if value is not None:
            changes[name] = arrays[value.name]
    if operands.rotary is not None:
        tables = {
            field.name: arrays[value.name]
            for field in dataclasses.fields(operands.rotary)
            if isinstance(value := getattr(operands.rotary, field.name), ir.Value)
        }
        changes["rotary"] = RotaryInputs(**tables)
    return OracleInputs(
        query=bhsd(operands.query, arrays),
        key=bhsd(operands.key, arrays),
        value=None if site.spec.value_source == "key_prefix" else bhsd(operands.value, arrays),
        **changes,
    )


def check_site(recognition: Recognition, site: Site, feeds: Arrays, tolerance: float) -> None:
    """Raise where the oracle, over the site's operands, does not give the graph's values."""
    heads = [h for h in (site.output, site.present_key, site.present_value) if h is not None]
    names = [value.name for _, value in site.operands.values() if value.name]
    names += [h.value.name for h in heads if h.value.name]
    if site.qk_output is not None:
        names.append(site.qk_output.name or "")
    arrays = values_of(recognition.model, names, feeds)
    result = attention(site.spec, oracle_inputs(site, arrays))
    found = arrays[site.output.value.name or ""]
    expected = result.output
    if site.spec.combine == "concat":
        found = bhsd(site.output, arrays)
    _close(found, expected, tolerance, f"{site.id} output")
    if site.present_key is not None:
        _close(bhsd(site.present_key, arrays), result.present_key, tolerance, "present_key")
    if site.present_value is not None and result.present_value is not None:
        _close(bhsd(site.present_value, arrays), result.present_value, tolerance, "present_value")
    if site.qk_output is not None and site.spec.qk_output is not None:
        scores = result.scores(site.spec.qk_output)
        _close(arrays[site.qk_output.name or ""], scores, tolerance, "qk_output")


def _close(found: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, oracle {expected.shape}"
    assert np.array_equal(np.isnan(found), np.isnan(expected)), f"{what}: NaN in other places"
    hidden = np.isinf(expected)  # scores behind a mask
    assert np.array_equal(found[hidden], expected[hidden]), f"{what}: infinities in other places"
    found, expected = found[~hidden], expected[~hidden]
    scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
    error = float(np.nanmax(np.abs(found - expected), initial=0.0)) / scale
    assert error < tolerance, f"{what}: {error:.3g} away from the oracle"


def assert_in_order(graph: ir.Graph) -> None:
    """Raise where a node reads what a later one makes."""
    seen: set[ir.Node] = set()
    for node in graph:
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if maker is not None and maker.graph is graph:
                assert maker in seen, f"{node.name} comes before {maker.name}"
        seen.add(node)


@pytest.fixture
def assert_sound() -> Callable[..., None]:
    """``assert_sound(recognition, feeds)``: every site of the main graph against the oracle."""

    def check(recognition: Recognition, feeds: Arrays, *, tolerance: float = 2e-5) -> None:
        assert_in_order(recognition.model.graph)
        for site in recognition.sites:
            check_site(recognition, site, feeds, tolerance)

    return check


@pytest.fixture
def random_feeds() -> Callable[..., dict[str, np.ndarray]]:
    """``random_feeds(model, seed=0, **sizes)``: arrays for every graph input."""

    def make(model: ir.Model, *, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
        known = {"batch": 2, "seq": 5, "keys": 7, "past": 3, **sizes}
        random = np.random.default_rng(seed)
        return {value.name or "": _array(value, known, random) for value in model.graph.inputs}

    return make


def _array(value: ir.Value, sizes: Mapping[str, int], random: np.random.Generator) -> np.ndarray:
    assert value.shape is not None
    shape = [dim if isinstance(dim, int) else sizes[str(dim.value)] for dim in value.shape]
    if "padding" in (value.name or ""):
        kept = random.random(shape) < 0.7
        kept[..., 0] = True
        return kept if value.dtype == ir.DataType.BOOL else kept.astype(np.float32)
    if value.dtype == ir.DataType.INT64:
        return random.integers(0, 5, shape)
    if value.dtype == ir.DataType.BOOL:
        return random.random(shape) < 0.7
    return random.standard_normal(shape).astype(np.float32)
