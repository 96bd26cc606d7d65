"""``ort-attention``: one ``com.microsoft`` Attention node that projects by itself.

    output = Attention(input, weights [m, h*d + h*d + h*e], bias, -, -, attention_bias)

For encoders: it needs the projections as one packed weight (three separate ones are joined), as
many key as query heads, and nothing between projection and product. The mask is always
``attention_bias``: ``mask_index`` adds a finite -10000, which a logit can outbid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mha_export.forms._additive import (
    additive_mask,
    hides_by_infinity,
    kernel_policy,
    means_of_mask,
)
from mha_export.forms._form import Emitted, FormParams, Supported, Unsupported
from mha_export.forms._layout import Sizes
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.forms._positions import Offset, offset_of
from mha_export.forms._prepare import finished
from mha_export.forms._rows import fixes_rows, policy_of, policy_with_output
from mha_export.forms._scope import MICROSOFT, Scope
from mha_export.forms._support import means_of_softmax, verdict
from mha_export.operands import Heads, Layout, Operands, ir_dtype
from mha_export.spec import AttentionSpec, DType, EmptyRow


@dataclass(frozen=True, kw_only=True)
class OrtAttentionForm:
    name: str = "ort-attention"
    min_opset: int = 13
    summary: str = "one com.microsoft Attention node with the packed QKV weight inside"

    def supports(self, spec: AttentionSpec, params: FormParams) -> Supported | Unsupported:
        return verdict(self, spec, params, _refusal(spec), means=lambda: _by_other_means(spec))

    def emit(
        self, scope: Scope, spec: AttentionSpec, params: FormParams, operands: Operands
    ) -> Emitted:
        packed = operands.projection
        if packed is None:
            raise ValueError("form ort-attention needs operands.projection: a packed QKV weight")
        sizes = Sizes(scope, spec, operands)
        mask = Mask(scope, spec, operands, sizes)
        native = _native(spec)
        if mask.bound and not hiding_parts(spec) <= native:
            native = frozenset()
        bias = additive_mask(scope, spec, operands, sizes, mask, native)
        made = scope.op(
            "Attention",
            [packed.value, packed.weight, packed.bias, None, None, bias],
            _attributes(spec, native),
            domain=MICROSOFT,
            dtype=ir_dtype(spec.io_dtype),
        )
        output = Heads(value=made, layout=Layout.BSM, heads=spec.q_heads, dim=spec.value_dim)
        if fixes_rows(spec, kernel_policy(spec)):
            output = policy_with_output(scope, spec, mask, output, operands.value)
        return Emitted(output=finished(scope, spec, output))


def _refusal(spec: AttentionSpec) -> Unsupported | None:
    projections = spec.projections
    if projections is None or spec.latent is not None or spec.kv_source != "own":
        return Unsupported(feature="projections", needs="the QKV projections of this attention")
    if projections.packing == "interleaved":
        return Unsupported(feature="projections.packing", needs="separate or packed weights")
    if projections.joint is not None:
        return Unsupported(feature="projections.joint", needs="one stream of tokens")
    stated = {
        "io_dtype": (spec.io_dtype is DType.FP64, "fp32, fp16 or bf16"),
        "cross": (spec.cross, "form ort-mha: keys come from the same input here"),
        "kv_heads": (spec.kv_heads != spec.q_heads, f"kv_heads = q_heads = {spec.q_heads}"),
        "value_source": (spec.value_source != "own", "a value projection of its own"),
        "cache": (spec.cache is not None, "form ort-mha or ort-gqa"),
        "softcap": (spec.softcap is not None, "form onnx, ort-gqa or primitive"),
        "sinks": (spec.sinks, "form onnx, ort-gqa or primitive"),
        "rotary": (spec.rotary is not None, "nothing between projection and product"),
        "qk_norm": (spec.qk_norm is not None, "nothing between projection and product"),
        "qk_output": (spec.qk_output is not None, "form onnx or primitive"),
        "scale": (spec.effective_scale == 0, "a scale other than 0, the op's word for no scale"),
    }
    for feature, (here, needs) in stated.items():
        if here:
            return Unsupported(feature=feature, needs=needs)
    return None


def _by_other_means(spec: AttentionSpec) -> dict[str, str]:
    means = means_of_mask(spec, _native(spec)) | means_of_softmax(spec)
    if spec.projections is not None and spec.projections.packing == "separate":
        means["projections"] = "the three weights joined by Concat"
    if fixes_rows(spec, kernel_policy(spec)):
        means["empty_row"] = "Where on the output"
    if spec.combine == "mean":
        means["combine"] = "ReduceMean after the op"
    return means


def _native(spec: AttentionSpec) -> frozenset[str]:
    """``unidirectional`` hides with the dtype's minimum: only where no row can be empty."""
    if not hides_by_infinity(spec) or spec.mask.prefix:
        return frozenset()
    if policy_of(spec) is not EmptyRow.NOT_APPLICABLE or offset_of(spec) is not Offset.ZERO:
        return frozenset()
    return hiding_parts(spec) & {"causal"}


def _attributes(spec: AttentionSpec, native: frozenset[str]) -> dict[str, object]:
    attributes: dict[str, object] = {"num_heads": spec.q_heads}
    if not math.isclose(spec.effective_scale, 1.0 / math.sqrt(spec.head_dim), rel_tol=1e-12):
        attributes["scale"] = spec.effective_scale
    if spec.value_dim != spec.head_dim:
        width = spec.q_heads * spec.head_dim
        attributes["qkv_hidden_sizes"] = [width, width, spec.q_heads * spec.value_dim]
    if "causal" in native:
        attributes["unidirectional"] = 1
    return attributes


FORM = OrtAttentionForm()
