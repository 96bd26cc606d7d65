"""Plain attentions of one precision: what a correct implementation may look like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from mha_export.spec import DType

NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FP64: np.dtype(np.float64),
    DType.FP32: np.dtype(np.float32),
    DType.FP16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
}


def numpy_dtype(dtype: DType) -> np.dtype:
    """The numpy type that holds ``dtype`` (bf16 by ``ml_dtypes``)."""
    return NUMPY[dtype]


def unit_roundoff(dtype: DType) -> float:
    """Half the distance from 1 to the next number: 2^-24 fp32, 2^-11 fp16, 2^-8 bf16."""
    return {DType.FP64: 2.0**-53, DType.FP32: 2.0**-24, DType.FP16: 2.0**-11, DType.BF16: 2.0**-8}[
        dtype
    ]


_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class ScoreProblem:
    """The arithmetic every implementation shares, in float64: after norm, rotary, cache and masks.

    ``additive_bhst`` is everything that is added to the capped scores (bias, ALiBi, fill; -inf
    where a pair is excluded outright).
    """

    q_bhsd: np.ndarray
    k_bktd: np.ndarray
    v_bkte: np.ndarray
    additive_bhst: np.ndarray
    scale: float
    softcap: float | None = None
    sinks_h: np.ndarray | None = None
    q_lost: np.ndarray | float = 0.0
    """What cancelled in each query channel before the product, in units of u: a mean taken off, the
    partner of a rotated pair. Absolute, broadcastable to [b,h,s,d]."""
    k_lost: np.ndarray | float = 0.0
    """The same of the keys: broadcastable to [b,k,t,d]."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """One legitimate way to order the arithmetic."""

    scale: Literal["after", "before", "split"] = "after"
    order: Literal["library", "forward", "backward"] = "library"
    softmax: Literal["io", "fp32"] = "io"
    normalise: Literal["before", "after"] = "before"


ENSEMBLE = (
    Plain(),
    Plain(scale="before"),
    Plain(scale="split", normalise="after"),
    Plain(order="forward", softmax="fp32"),
    Plain(scale="before", order="backward", normalise="after"),
    Plain(scale="split", order="forward"),
)


def plain_outputs(problem: ScoreProblem, dtype: DType) -> Iterator[np.ndarray]:
    """Each ensemble member's output [b, h, s, e], in float64."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for variant in ENSEMBLE:
            yield _attend(problem, NUMPY[dtype], variant)


def _attend(problem: ScoreProblem, dtype: np.dtype, variant: Plain) -> np.ndarray:
    group = problem.q_bhsd.shape[1] // problem.k_bktd.shape[1]
    q = problem.q_bhsd.astype(dtype)
    k = np.repeat(problem.k_bktd.astype(dtype), group, axis=1)
    v = np.repeat(problem.v_bkte.astype(dtype), group, axis=1)
    scores = plain_scores(q, np.swapaxes(k, -1, -2), problem.scale, variant)
    if problem.softcap is not None:
        cap = dtype.type(problem.softcap)
        scores = (cap * np.tanh((scores / cap).astype(dtype))).astype(dtype)
    low = float(np.finfo(np.float32).min) if dtype.itemsize == 4 else _lowest(dtype)
    additive = np.where(
        np.isinf(problem.additive_bhst),
        problem.additive_bhst,
        np.maximum(problem.additive_bhst, low),
    ).astype(dtype)
    scores = np.asarray(scores + additive).astype(dtype)
    return _mix(scores, v, problem.sinks_h, dtype, variant).astype(np.float64)


def _lowest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]


def plain_scores(q: np.ndarray, kt: np.ndarray, scale: float, variant: Plain) -> np.ndarray:
    number = q.dtype.type
    if variant.scale == "before":
        return _product(q * number(scale), kt, variant)
    if variant.scale == "split":
        root = abs(scale) ** 0.5
        sign = -1.0 if scale < 0 else 1.0
        return _product(q * number(sign * root), kt * number(root), variant)
    return np.asarray(_product(q, kt, variant) * number(scale))


def _mix(
    scores: np.ndarray,
    v: np.ndarray,
    sinks: np.ndarray | None,
    dtype: np.dtype,
    variant: Plain,
) -> np.ndarray:
    wide = np.dtype(np.float32) if variant.softmax == "fp32" and dtype.itemsize < 4 else dtype
    x = scores.astype(wide)
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = sinks.astype(wide).reshape(1, -1, 1, 1)
        top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, np.zeros_like(top))
    weights = np.exp((x - top).astype(wide)).astype(wide)
    total = _sum(weights, variant)
    if sinks is not None:
        total = (total + np.exp((sink - top).astype(wide))).astype(wide)
    if variant.normalise == "after":
        mixed = _product(weights.astype(dtype), v, variant)
        return np.asarray(mixed / total.astype(dtype)).astype(dtype)
    return _product((weights / total).astype(dtype), v, variant)


def _product(a: np.ndarray, b: np.ndarray, variant: Plain) -> np.ndarray:
    """Matrix product with the accumulator hardware uses: fp32, or fp64 for fp64."""
    wide = np.float64 if a.dtype.itemsize == 8 else np.float32
    left, right = a.astype(wide), b.astype(wide)
    length = left.shape[-1]
    if variant.order == "library" or length <= 1:
        whole: np.ndarray = np.matmul(left, right).astype(a.dtype)
        return whole
    step = 1 if length <= 8 * _BLOCK else _BLOCK
    starts = range(0, length, step)
    if variant.order == "backward":
        starts = starts[::-1]
    acc: Any = None
    for at in starts:
        part = np.matmul(left[..., at : at + step], right[..., at : at + step, :])
        acc = part if acc is None else (acc + part).astype(wide)
    total: np.ndarray = acc.astype(a.dtype)
    return total


def _sum(weights: np.ndarray, variant: Plain) -> np.ndarray:
    wide = weights.astype(np.float64 if weights.dtype.itemsize == 8 else np.float32)
    if variant.order == "library":
        total: np.ndarray = wide.sum(axis=-1, keepdims=True).astype(weights.dtype)
        return total
    ordered = wide if variant.order == "forward" else wide[..., ::-1]
    running: np.ndarray = np.cumsum(ordered, axis=-1)[..., -1:].astype(weights.dtype)
    return running
