"""``trt``: what TensorRT's fused attention kernels accept.

    P = Softmax(MatMul(Q * scale, Kᵀ) + mask, -1) ; output = MatMul(P, V)

The scale stands on the query (NVIDIA's advice), the mask is additive and of the I/O dtype (a
boolean one adds kernels), keys and values are there once a query head. TensorRT fuses the pattern
in fp16 and bf16, also with its Softmax in fp32; in fp32 it runs it unfused.
"""

from __future__ import annotations

from dataclasses import dataclass

from mha_export.forms._additive import additive_mask, kernel_policy, means_of_mask
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._layout import Sizes, as_layout, cast, repeat_kv, transposed_keys
from mha_export.forms._mask import Mask
from mha_export.forms._prepare import finished, prepare, scaled
from mha_export.forms._rows import fixes_rows, policy_with_output
from mha_export.forms._scope import Scope
from mha_export.forms._support import means_around, verdict
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, DType

_NATIVE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TrtForm:
    name: str = "trt"
    min_opset: int = 13
    summary: str = "the plain pattern TensorRT fuses: scale on Q, additive mask in the I/O dtype"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        return verdict(
            self, spec, params, _refusal(spec), means=lambda: _by_other_means(spec, params)
        )

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        sizes = Sizes(scope, spec, operands)
        ready = prepare(scope, spec, operands, sizes, ops=True)
        mask = Mask(scope, spec, operands, sizes)
        dtype, wide = ir_dtype(spec.io_dtype), ir_dtype(spec.effective_softmax_dtype)
        query = as_layout(scope, ready.query, Layout.BHSD)
        if spec.effective_scale != 1.0:
            query = scaled(scope, spec, query, spec.effective_scale)
        k_bhdt = transposed_keys(scope, repeat_kv(scope, ready.key, spec.q_heads))
        scores = scope.op("MatMul", [query.value, k_bhdt], dtype=dtype)
        bias = additive_mask(scope, spec, operands, sizes, mask, _NATIVE)
        if bias is not None:
            scores = scope.op("Add", [scores, bias], dtype=dtype)
        weights = scope.op("Softmax", [cast(scope, scores, wide)], {"axis": -1}, dtype=wide)
        value = as_layout(scope, repeat_kv(scope, ready.value, spec.q_heads), Layout.BHSD)
        mixed = scope.op("MatMul", [cast(scope, weights, dtype), value.value], dtype=dtype)
        output = Heads(value=mixed, layout=Layout.BHSD, heads=spec.q_heads, dim=spec.value_dim)
        if fixes_rows(spec, kernel_policy(spec)):
            output = policy_with_output(scope, spec, mask, output, ready.value)
        return Emitted(output=finished(scope, spec, output))


def _by_other_means(spec: AttentionSpec, params: FormParams) -> dict[str, str]:
    means = means_of_mask(spec, _NATIVE) | means_around(spec, params, cache_in_op=True)
    if fixes_rows(spec, kernel_policy(spec)):
        means["empty_row"] = "Where on the output"
    if spec.kv_heads != spec.q_heads:
        means["kv_heads"] = "keys and values repeated per query head"
    return means


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    stated = {
        "io_dtype": spec.io_dtype is DType.FP64,
        "cache": spec.cache is not None,
        "softcap": spec.softcap is not None,
        "sinks": spec.sinks,
        "qk_output": spec.qk_output is not None,
    }
    for feature, here in stated.items():
        if here:
            return Unsupported(feature=feature, needs="form primitive: no fused kernel takes it")
    return None


FORM = TrtForm()
