"""A form's windows at lengths that can be run.

A window of 4,095 keys hides nothing at the lengths a site is proven at; a form that dropped it
would pass. So where a window or block is beyond those lengths, the same form with the same
parameters is also asked for the same attention with small ones, on a graph of its own, and judged
by the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mha_export.bounds import Judgement, error_bounds, judge, numpy_dtype
from mha_export.cases import cases
from mha_export.evaluator import Evaluator
from mha_export.forms import Unsupported, build_model
from mha_export.oracle import OracleInputs, attention
from mha_export.rewrite._outcome import Choice
from mha_export.spec import AttentionSpec

_SMALL = {"left_window": 3, "right_window": 2, "block": 4}


def small_twin(spec: AttentionSpec, *, reach: int) -> AttentionSpec | None:
    """The spec with windows and blocks above ``reach`` made small; None where none is above.

    Projections, rotary and norms are left out: they are proven at the site.
    """
    beyond: dict[str, Any] = {
        name: small
        for name, small in _SMALL.items()
        if (size := getattr(spec.mask, name)) is not None and size > reach
    }
    if not beyond:
        return None
    shapes: dict[str, Any] = {
        name: ("batch", 1, "q_len", "kv_len")
        for name in ("keep", "bias")
        if getattr(spec.mask, name) is not None
    }
    square = spec.q_len == spec.kv_len and spec.cache is None
    return spec.replace(
        mask=dataclasses.replace(spec.mask, **beyond, **shapes),
        rotary=None,
        qk_norm=None,
        projections=None,
        latent=None,
        kv_source="own",
        batch="batch",
        q_len="q_len",
        kv_len="q_len" if square else "kv_len",
    )


def judge_twin(
    twin: AttentionSpec, choice: Choice, evaluator: Evaluator, *, seed: int
) -> Iterator[tuple[str, Judgement]]:
    """The judgement of each case of the twin's battery, by name.

    Errors:
        mha_export.errors.MhaExportError: the engine cannot run the form.
    """
    if isinstance(choice.form.supports(twin, choice.params), Unsupported):
        return
    model = build_model(choice.form, twin, choice.params)
    for case in cases(twin, seed=seed, battery="full"):
        exact = attention(twin, case.inputs)
        rows = error_bounds(twin, case.inputs, exact)
        output = evaluator.run(model, _feeds(twin, case.inputs))["output"]
        if twin.combine == "concat":
            b, s, m = output.shape
            output = output.reshape(b, s, twin.q_heads, m // twin.q_heads).swapaxes(1, 2)
        yield (
            f"{case.name}@small-window",
            judge(output, exact.output, rows.ensemble, rows.floor, coarse=rows.coarse),
        )


def _feeds(spec: AttentionSpec, inputs: OracleInputs) -> Mapping[str, np.ndarray]:
    """The inputs of a canonical graph by name."""
    dtype = numpy_dtype(spec.io_dtype)
    made: dict[str, np.ndarray] = {}
    for name, array in inputs.named():
        if name.startswith("past_") and spec.cache is not None and spec.cache.layout == "bshd":
            array = array.swapaxes(1, 2)
        made[name] = array
    for name in ("query", "key", "value"):
        array = getattr(inputs, name)
        if array is not None:
            b, h, s, d = array.shape
            made[name] = array.swapaxes(1, 2).reshape(b, s, h * d)
    return {
        name: np.ascontiguousarray(array, dtype if array.dtype.kind == "f" else array.dtype)
        for name, array in made.items()
    }
