"""How forbidden scores are hidden, and what a row of nothing else becomes by itself."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from emission import Bench

from mha_export.forms._hiding import Hiding
from mha_export.forms._layout import Sizes
from mha_export.forms._mask import Mask
from mha_export.forms._mask_parts import hiding_parts
from mha_export.operands import Operands, ScoreMask
from mha_export.oracle import OracleInputs, attention
from mha_export.spec import AttentionSpec, DType, EmptyRow, MaskSpec

B, H, S, T, D = 2, 2, 3, 5, 4
RNG = np.random.default_rng(4)
ZERO, NAN, UNIFORM, FINITE = EmptyRow.ZERO, EmptyRow.NAN, EmptyRow.UNIFORM, EmptyRow.FINITE
LEAST = float(np.finfo(np.float32).min)
NUMPY = {DType.FP16: np.float16, DType.FP32: np.float32}


def _spec(fill: Any = "-inf", policy: EmptyRow = ZERO, **fields: Any) -> AttentionSpec:
    mask = MaskSpec(
        padding=True,
        fill=fill,
        empty_row=policy,
        bias=("q_len", "kv_len") if fields.pop("bias", False) else None,
    )
    return AttentionSpec(**{"q_heads": H, "kv_heads": H, "head_dim": D, "mask": mask} | fields)


class Hidden:
    """Scores of a spec, and a mask that leaves the first batch row's queries without a key."""

    def __init__(
        self, spec: AttentionSpec, *, cuts: bool = False, source: str | None = None
    ) -> None:
        self.spec = spec
        self.bench = Bench()
        dtype = NUMPY[spec.io_dtype]
        x = RNG.normal(size=(B, H, T, D)).astype(dtype)
        heads = self.bench.heads("x", x)
        query = self.bench.heads("q", x[:, :, :S])
        self.padding = np.array([[0] * T, [1, 0, 1, 1, 0]])
        named: dict[str, Any] = {"query": query, "key": heads, "value": heads}
        named["key_padding"] = self.bench.value("key_padding", self.padding)
        self.bias = np.zeros((S, T), dtype)
        if spec.mask.bias is not None:
            self.bias = RNG.normal(size=(S, T)).astype(dtype)
            named["bias"] = self.bench.value("bias", self.bias)
        if source is not None:
            keep = (self.padding != 0)[:, None, None]
            fill = {"-inf": -np.inf, "min": np.finfo(dtype).min}.get(spec.mask.fill, -3.0)  # type: ignore[arg-type]
            array = keep if source == "keep" else np.where(keep, 0.0, fill).astype(dtype)
            value = self.bench.value("source", array)
            named["score_mask"] = ScoreMask(value=value, kind=source)  # type: ignore[arg-type]
        self.operands = Operands(**named)
        self.hiding = Hiding(spec=spec, operands=self.operands, cuts=cuts)
        self.scores = RNG.normal(size=(B, H, S, T)).astype(dtype)

    def applied(self, parts: frozenset[str] | None = None) -> np.ndarray:
        scores = self.bench.value("scores", self.scores)
        sizes = Sizes(self.bench.scope, self.spec, self.operands)
        mask = Mask(self.bench.scope, self.spec, self.operands, sizes)
        parts = hiding_parts(self.spec) if parts is None else parts
        (found,) = self.bench.run(self.hiding.apply(self.bench.scope, mask, scores, parts))
        return found


FILLS: list[tuple[dict[str, Any], bool, float]] = [
    # the spec, whether keys are cut, the fill
    ({"fill": "-inf"}, False, -math.inf),
    ({"fill": "-inf", "policy": UNIFORM}, False, -math.inf),
    ({"fill": -7.0}, False, -7.0),
    ({"fill": -7.0, "policy": UNIFORM}, True, -7.0),
    ({"fill": "min", "policy": UNIFORM}, False, LEAST / 2),
    ({"fill": "min", "policy": FINITE}, False, LEAST / 2),
    ({"fill": "min", "policy": ZERO}, False, -math.inf),
    ({"fill": "min", "policy": UNIFORM}, True, -math.inf),
    ({"fill": "min", "policy": UNIFORM, "sinks": True}, False, -math.inf),
    ({"fill": "min", "policy": UNIFORM, "bias": True}, False, -math.inf),
    ({"fill": "min", "policy": UNIFORM, "io_dtype": DType.FP16}, False, -65504.0),
    ({"fill": "-inf", "io_dtype": DType.FP16}, False, -math.inf),
]


@pytest.mark.parametrize(("fields", "cuts", "fill"), FILLS)
def test_infinity_hides_wherever_no_average_is_asked_for(
    fields: dict[str, Any], cuts: bool, fill: float
) -> None:
    assert Hidden(_spec(**fields), cuts=cuts).hiding.fill == fill


NATURAL: list[tuple[dict[str, Any], bool, str | None, EmptyRow | None]] = [
    ({"fill": "-inf"}, False, None, NAN),
    ({"fill": "-inf", "policy": UNIFORM}, False, None, NAN),
    ({"fill": -7.0}, False, None, FINITE),
    ({"fill": -7.0, "sinks": True}, False, None, FINITE),
    ({"sinks": True}, False, None, ZERO),
    ({"fill": "min", "policy": UNIFORM}, False, None, UNIFORM),
    ({"fill": "min", "policy": UNIFORM}, True, None, NAN),
    ({"fill": "min", "policy": UNIFORM, "bias": True}, False, None, NAN),
    ({"fill": "min", "policy": UNIFORM}, False, "keep", UNIFORM),
    ({"fill": "min", "policy": UNIFORM}, False, "additive", None),
    ({"fill": "-inf"}, False, "additive", NAN),
]


@pytest.mark.parametrize(("fields", "cuts", "source", "natural"), NATURAL)
def test_what_softmax_gives_a_row_without_a_key(
    fields: dict[str, Any], cuts: bool, source: str | None, natural: EmptyRow | None
) -> None:
    hidden = Hidden(_spec(**fields), cuts=cuts, source=source)
    assert hidden.hiding.natural is natural


@pytest.mark.parametrize(
    ("fields", "source", "fixes"),
    [
        ({"policy": ZERO}, None, True),
        ({"policy": NAN}, None, False),
        ({"policy": UNIFORM}, None, True),
        ({"fill": "min", "policy": UNIFORM}, None, False),
        ({"fill": "min", "policy": UNIFORM}, "additive", True),
        ({"fill": -7.0, "policy": FINITE}, None, False),
        ({"fill": -7.0, "policy": ZERO}, None, True),
        ({"sinks": True, "policy": ZERO}, None, False),
        ({"sinks": True, "policy": NAN}, None, True),
    ],
)
def test_a_policy_is_put_in_place_where_it_does_not_come_by_itself(
    fields: dict[str, Any], source: str | None, fixes: bool
) -> None:
    assert Hidden(_spec(**fields), source=source).hiding.fixes_rows is fixes


def test_no_policy_where_no_row_can_be_empty() -> None:
    spec = AttentionSpec(q_heads=H, kv_heads=H, head_dim=D)
    heads = Bench().heads("x", np.zeros((1, H, 1, D)))
    operands = Operands(query=heads, key=heads, value=heads)
    assert not Hiding(spec=spec, operands=operands, cuts=False).fixes_rows


APPLIED = [
    {"fill": fill, "io_dtype": dtype, "bias": bias}
    for fill, dtype, bias in itertools.product(
        ("-inf", "min", -3.0), (DType.FP32, DType.FP16), (False, True)
    )
]


@pytest.mark.parametrize("source", [None, "keep", "additive"])
@pytest.mark.parametrize("fields", APPLIED, ids=lambda f: " ".join(str(v) for v in f.values()))
def test_hidden_scores_weigh_nothing_and_the_others_stay(
    fields: dict[str, Any], source: str | None
) -> None:
    hidden = Hidden(_spec(**fields), source=source)
    found = hidden.applied()
    keep = np.broadcast_to((hidden.padding != 0)[:, None, None], found.shape)
    expected = hidden.scores + hidden.bias
    np.testing.assert_allclose(found[keep], expected[keep], rtol=1e-3, atol=1e-3)
    if isinstance(fields["fill"], str):
        # An additive source brings its own fill.
        least = -65504.0 if fields["io_dtype"] is DType.FP16 else LEAST
        own = source == "additive" and fields["fill"] == "min"
        limit = least * 0.9 if own else -np.inf
        assert (found[~keep] <= limit).all()
    else:
        np.testing.assert_allclose(found[~keep], expected[~keep] - 3.0, rtol=2e-3, atol=2e-3)
    half = fields["io_dtype"] is DType.FP16 and isinstance(fields["fill"], str)
    chooses = half and source != "additive"
    # Chosen directly: an fp16 score that overflowed and -inf are no number together.
    assert (hidden.bench.scope.nodes[-1].op_type == "Where") is chooses


def test_overflowed_scores_of_half_precision_hide_too() -> None:
    hidden = Hidden(_spec(io_dtype=DType.FP16))
    hidden.scores[:] = np.inf
    found = hidden.applied()
    assert np.isneginf(found[0]).all()


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("bias", [False, True])
def test_without_parts_nothing_is_hidden(bias: bool, dtype: DType) -> None:
    hidden = Hidden(_spec(bias=bias, io_dtype=dtype))
    found = hidden.applied(frozenset())
    np.testing.assert_allclose(found, hidden.scores + hidden.bias, rtol=1e-3)
    assert hidden.bench.types == (["Unsqueeze", "Add"] if bias else [])


@pytest.mark.parametrize(("policy", "number"), [(ZERO, 0.0), (NAN, math.nan)])
def test_a_stated_row_is_a_number(policy: EmptyRow, number: float) -> None:
    hidden = Hidden(_spec(policy=policy))
    row = hidden.hiding.stated_row(hidden.bench.scope, hidden.operands.value)
    assert row.const_value is not None
    np.testing.assert_array_equal(row.const_value.numpy(), number)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_stated_row_is_the_mean_of_all_values(kv_heads: int) -> None:
    mask = MaskSpec(padding=True, empty_row=UNIFORM)
    spec = AttentionSpec(q_heads=4, kv_heads=kv_heads, head_dim=D, mask=mask)
    value = RNG.normal(size=(B, kv_heads, T, D)).astype(np.float32)
    bench = Bench()
    heads = bench.heads("v", value)
    hiding = Hiding(spec=spec, operands=Operands(query=heads, key=heads, value=heads), cuts=True)
    (row,) = bench.run(hiding.stated_row(bench.scope, heads))
    assert row.shape == (B, 4, 1, D)
    inputs = OracleInputs(
        query=np.zeros((B, 4, 1, D)), key=value, value=value, key_padding=np.zeros((B, T))
    )
    np.testing.assert_allclose(row, attention(spec, inputs).output, rtol=1e-5)
