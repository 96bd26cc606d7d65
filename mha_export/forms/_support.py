"""Refusals that several forms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mha_export.forms._form import Form, FormParams, Supported, Unsupported
from mha_export.forms._layout import lowest
from mha_export.spec import AttentionSpec, EmptyRow


def verdict(
    form: Form,
    spec: AttentionSpec,
    params: FormParams,
    *refusals: Unsupported | None,
    means: Callable[[], Mapping[str, str]] = dict,
) -> Supported | Unsupported:
    """What :meth:`Form.supports` answers: the first refusal, else what is said by other means."""
    refusal = first_refusal(common_refusal(form, spec, params), *refusals)
    return Supported(by_other_means=means()) if refusal is None else refusal


def first_refusal(*checks: Unsupported | None) -> Unsupported | None:
    """The first check that refused. (``or`` would skip it: an ``Unsupported`` is false.)"""
    return next((check for check in checks if check is not None), None)


def common_refusal(form: Form, spec: AttentionSpec, params: FormParams) -> Unsupported | None:
    """What no form can state: an opset below its least, or a mask that contradicts itself."""
    if params.opset < form.min_opset:
        return Unsupported(feature="opset", needs=f"opset {form.min_opset} or above")
    mask = spec.mask
    if not isinstance(mask.fill, str) and abs(mask.fill) > -lowest(spec.io_dtype):
        return Unsupported(
            feature="fill", needs=f"an io_dtype that can hold {mask.fill:g}, or fill '-inf'"
        )
    if mask.fill == "-inf" and mask.empty_row is EmptyRow.FINITE:
        return Unsupported(
            feature="empty_row", needs="a finite fill: softmax of -inf alone is not a number"
        )
    return None


def means_around(spec: AttentionSpec, params: FormParams, *, cache_in_op: bool) -> dict[str, str]:
    """What every fused form leaves to nodes around it, and how they say it."""
    means: dict[str, str] = {}
    if spec.qk_norm is not None:
        fused = spec.qk_norm.kind == "rms" and not spec.qk_norm.bias and params.opset >= 23
        means["qk_norm"] = "RMSNormalization" if fused else "plain ops before the op"
    if spec.rotary is not None:
        fused = params.opset >= 23 and spec.rotary_offset == 0
        means["rotary"] = "RotaryEmbedding" if fused else "plain ops before the op"
    if spec.cache is not None and not cache_in_op:
        write = "TensorScatter" if params.opset >= 24 else "ScatterElements"
        means["cache"] = "Concat" if spec.cache.growth == "concat" else write
    if spec.value_source == "key_prefix" and spec.value_dim != spec.head_dim:
        means["value_source"] = "Slice of the keys"
    if spec.combine == "mean":
        means["combine"] = "ReduceMean after the op"
    return means


def means_of_softmax(spec: AttentionSpec) -> dict[str, str]:
    """Ops without a word for the precision of softmax compute it as their kernels do."""
    if spec.effective_softmax_dtype is spec.io_dtype:
        return {}
    return {"softmax_dtype": "the op's own precision"}
