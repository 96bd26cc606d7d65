"""ONNX's own node tests as specs: an outside judge of the oracle and of every form.

``from onnx_cases import attention_cases, read_case, verdicts`` (``tests/conformance`` is on the
``pythonpath`` of pytest). Each case carries the model it came from, so that the ``_expanded`` twin
of a case and the op form of it can be run as they are too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from mha_export.operands import Layout
from mha_export.oracle import OracleInputs
from mha_export.spec import (
    AttentionSpec,
    CacheSpec,
    CausalAlignment,
    DType,
    EmptyRow,
    MaskSpec,
    QkOutput,
)

DTYPES = {
    onnx.TensorProto.FLOAT: DType.FP32,
    onnx.TensorProto.FLOAT16: DType.FP16,
    onnx.TensorProto.BFLOAT16: DType.BF16,
    onnx.TensorProto.DOUBLE: DType.FP64,
}

QK_OUTPUTS = (QkOutput.RAW, QkOutput.CAPPED, QkOutput.MASKED, QkOutput.PROBABILITIES)
"""By ``qk_matmul_output_mode``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeCase:
    """One node test: the model, and its arrays by value name (bfloat16 as ml_dtypes has it).

    ``rtol`` and ``atol`` are what ONNX's own runner compares with: the test's numbers, and two
    units in the last place for bfloat16.
    """

    name: str
    model: onnx.ModelProto
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    rtol: float
    atol: float

    @property
    def opset(self) -> int:
        return next(o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx"))

    @property
    def expanded(self) -> bool:
        """Whether the op was replaced by its function body."""
        return "_expanded" in self.name


@dataclass(frozen=True, kw_only=True, eq=False)
class Expressed:
    """A case as a spec.

    ``expected`` holds ``output`` [b, h, s, e], ``present_key``, ``present_value`` [b, k, t, *] and
    ``qk_output`` [b, h, s, t], whichever the case stores, in the case's own dtype. ``layout`` is
    how the case passed query, key, value and output.
    """

    case: NodeCase
    spec: AttentionSpec
    inputs: OracleInputs
    expected: Mapping[str, np.ndarray]
    layout: Layout

    @property
    def rtol(self) -> float:
        return self.case.rtol

    @property
    def atol(self) -> float:
        return self.case.atol


@dataclass(frozen=True, kw_only=True, eq=False)
class Inexpressible:
    """A case that no spec states, and why."""

    case: NodeCase
    reason: str


@functools.cache
def _all_test_cases() -> tuple[object, ...]:
    from onnx.backend.test.loader import load_model_tests

    state = np.random.get_state()
    try:
        with warnings.catch_warnings():
            # Other operators' cases overflow on purpose while they are built.
            warnings.simplefilter("ignore")
            return tuple(load_model_tests(kind="node"))
    finally:
        np.random.set_state(state)


def node_cases(prefix: str) -> list[NodeCase]:
    """ONNX's node tests whose name begins with ``prefix`` (``test_rotary_embedding``)."""
    found = []
    for test in _all_test_cases():
        if not test.name.startswith(prefix):
            continue
        ((inputs, outputs),) = test.data_sets
        graph = test.model.graph
        brain = any(v.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16 for v in graph.output)
        found.append(
            NodeCase(
                name=test.name,
                model=test.model,
                inputs=_by_name(graph.input, inputs),
                outputs=_by_name(graph.output, outputs),
                rtol=max(test.rtol, 2.0**-6) if brain else test.rtol,
                atol=test.atol,
            )
        )
    return found


def _by_name(values: object, arrays: object) -> dict[str, np.ndarray]:
    return {
        value.name: numpy_helper.to_array(array) if isinstance(array, onnx.TensorProto) else array
        for value, array in zip(values, arrays, strict=True)
    }


def attention_cases(*, expanded: bool = False) -> list[NodeCase]:
    """The cases of ``ai.onnx`` Attention: in op form, or with the op's body in its place."""
    return [case for case in node_cases("test_attention") if case.expanded is expanded]


def read_case(case: NodeCase) -> Expressed | Inexpressible:
    """The spec, inputs and expected outputs of one case in op form."""
    if len(case.model.graph.node) != 1 or case.model.graph.node[0].op_type != "Attention":
        return Inexpressible(case=case, reason="not one Attention node")
    (node,) = case.model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    names = list(node.input) + [""] * (7 - len(node.input))
    query, key, value, mask, past_key, past_value, lengths = (
        case.inputs[name] if name else None for name in names
    )
    layout = Layout.BSM if query.ndim == 3 else Layout.BHSD
    q_heads = attributes.get("q_num_heads", query.shape[1])
    kv_heads = attributes.get("kv_num_heads", key.shape[1])
    query, key, value = (
        _split(x, heads) for x, heads in ((query, q_heads), (key, kv_heads), (value, kv_heads))
    )
    past = 0 if past_key is None else past_key.shape[2]
    precision = attributes.get("softmax_precision")
    outputs = list(node.output) + [""] * (4 - len(node.output))
    spec = AttentionSpec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        scale=attributes.get("scale"),
        softcap=attributes.get("softcap") or None,
        mask=_mask_spec(attributes, mask, past_key, lengths),
        cache=None if past_key is None else CacheSpec(),
        qk_output=QK_OUTPUTS[attributes.get("qk_matmul_output_mode", 0)] if outputs[3] else None,
        io_dtype=DTYPES[case.model.graph.input[0].type.tensor_type.elem_type],
        softmax_dtype=None if not precision else DTYPES[precision],
        batch=query.shape[0],
        q_len=query.shape[2],
        kv_len=past + key.shape[2],
    )
    is_keep = mask is not None and mask.dtype == np.bool_
    inputs = OracleInputs(
        query=_wide(query),
        key=_wide(key),
        value=_wide(value),
        past_key=_wide(past_key),
        past_value=_wide(past_value),
        keep=mask if is_keep else None,
        bias=None if is_keep else _wide(mask),
        kv_lengths=lengths,
    )
    expected = {
        name: case.outputs[output]
        for name, output in zip(
            ("output", "present_key", "present_value", "qk_output"), outputs, strict=True
        )
        if output
    }
    expected["output"] = _split(expected["output"], q_heads)
    return Expressed(case=case, spec=spec, inputs=inputs, expected=expected, layout=layout)


def _mask_spec(
    attributes: Mapping[str, int],
    mask: np.ndarray | None,
    past_key: np.ndarray | None,
    lengths: np.ndarray | None,
) -> MaskSpec:
    causal = None
    if attributes.get("is_causal", 0):
        offset_aware = past_key is not None or lengths is not None
        causal = CausalAlignment.BOTTOM_RIGHT if offset_aware else CausalAlignment.TOP_LEFT
    windows = {
        name: attributes[attribute]
        for name, attribute in (
            ("left_window", "left_window_size"),
            ("right_window", "right_window_size"),
        )
        if attributes.get(attribute, -1) >= 0
    }
    shape = None if mask is None else tuple(mask.shape)
    is_keep = mask is not None and mask.dtype == np.bool_
    hides = causal is not None or bool(windows) or mask is not None or lengths is not None
    return MaskSpec(
        causal=causal,
        keep=shape if is_keep else None,
        bias=None if is_keep else shape,
        lengths=lengths is not None,
        # The op gives zero to a query without a key, whatever emptied it.
        empty_row=EmptyRow.ZERO if hides else EmptyRow.NOT_APPLICABLE,
        **windows,
    )


def _split(x: np.ndarray, heads: int) -> np.ndarray:
    """[b, s, heads * dim] or [b, heads, s, dim] as the latter."""
    if x.ndim == 4:
        return x
    b, s, width = x.shape
    return x.reshape(b, s, heads, width // heads).swapaxes(1, 2)


def _wide(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else x.astype(np.float64)


def verdicts() -> Iterator[tuple[NodeCase, str]]:
    """Every attention case in op form with ``expressed`` or the reason why not: to print."""
    for case in attention_cases():
        reading = read_case(case)
        yield case, "expressed" if isinstance(reading, Expressed) else reading.reason
