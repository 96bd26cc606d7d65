"""A mask that has to be one additive tensor: its fill, its whole shape, what it leaves to ops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from emission import Bench

from mha_export.forms._additive import (
    absorbs,
    additive_fill,
    additive_mask,
    hides_by_infinity,
    means_of_mask,
)
from mha_export.forms._layout import Sizes
from mha_export.forms._mask import Mask
from mha_export.operands import Operands, ScoreMask
from mha_export.spec import AttentionSpec, CausalAlignment, DType, EmptyRow, MaskSpec

B, H, S, T, D = 2, 2, 3, 5, 4
ZERO, UNIFORM, FINITE = EmptyRow.ZERO, EmptyRow.UNIFORM, EmptyRow.FINITE
TOP_LEFT = CausalAlignment.TOP_LEFT
LEAST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng(5)


def _spec(**mask: Any) -> AttentionSpec:
    fields = {"q_heads": H, "kv_heads": H, "head_dim": D, "io_dtype": mask.pop("io_dtype", "fp32")}
    fields["io_dtype"] = DType(fields["io_dtype"])
    fields["sinks"] = mask.pop("sinks", False)
    return AttentionSpec(**fields, mask=MaskSpec(**mask))


@pytest.mark.parametrize(
    ("mask", "absorbed", "fill"),
    [
        ({"padding": True, "fill": "min", "empty_row": UNIFORM}, True, LEAST / 2),
        ({"padding": True, "fill": "min", "empty_row": FINITE}, True, LEAST / 2),
        ({"padding": True, "fill": "min", "empty_row": ZERO}, False, -math.inf),
        ({"padding": True, "fill": "-inf", "empty_row": UNIFORM}, False, -math.inf),
        (
            {"padding": True, "fill": "min", "empty_row": UNIFORM, "io_dtype": "fp16"},
            False,
            -math.inf,
        ),
        ({"padding": True, "fill": "min", "empty_row": UNIFORM, "bias": ("t",)}, False, -math.inf),
        ({"fill": "min"}, False, -math.inf),
        ({"padding": True, "fill": -9.0, "empty_row": UNIFORM}, False, -9.0),
    ],
)
def test_a_fill_that_absorbs_is_finite(mask: dict[str, Any], absorbed: bool, fill: float) -> None:
    """An empty row averages only by a finite fill; fp16 has no room for one."""
    spec = _spec(**mask)
    assert absorbs(spec) is absorbed
    assert additive_fill(spec) == fill
    assert hides_by_infinity(spec) is math.isinf(fill)


class Made:
    """The additive tensor of a spec whose batch row 1 pads its last two keys."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        native: tuple[str, ...] = (),
        source: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        **options: bool,
    ) -> None:
        self.bench = Bench()
        x = self.bench.heads("x", np.zeros((B, H, T, D), np.float32))
        query = self.bench.heads("q", np.zeros((B, H, S, D), np.float32))
        named: dict[str, Any] = {"query": query, "key": x, "value": x}
        if spec.mask.padding:
            padding = np.array([[1] * T, [1, 1, 1, 0, 0]])
            named["key_padding"] = self.bench.value("key_padding", padding)
        if bias is not None:
            named["bias"] = self.bench.value("bias", bias)
        self.sinks = np.array([0.5, -1.5], np.float32)
        if spec.sinks:
            named["sinks"] = self.bench.value("sinks", self.sinks)
        if source is not None:
            value = self.bench.value("source", source)
            named["score_mask"] = ScoreMask(value=value, kind="additive")
        operands = Operands(**named)
        sizes = Sizes(self.bench.scope, spec, operands)
        mask = Mask(self.bench.scope, spec, operands, sizes)
        self.value = additive_mask(
            self.bench.scope, spec, operands, sizes, mask, frozenset(native), **options
        )

    def array(self, *, width: int = T) -> np.ndarray:
        assert self.value is not None
        (found,) = self.bench.run(self.value)
        assert found.shape[-2:] == (S, width)
        return np.broadcast_to(found, (B, H, S, width))


PADDED = np.array([[0] * T, [0, 0, 0, 1, 1]], np.bool_)[:, None, None]


def test_what_the_op_says_itself_is_left_out() -> None:
    spec = _spec(padding=True, causal=TOP_LEFT, empty_row=ZERO)
    future = np.triu(np.ones((S, T), np.bool_), 1)
    for native, hidden in (
        ((), PADDED | future),
        (("causal",), PADDED),
        (("padding",), future),
    ):
        found = Made(spec, native=native).array()
        np.testing.assert_array_equal(found, np.where(hidden, -np.inf, 0) + np.zeros((B, H, S, T)))
    nothing = Made(spec, native=("causal", "padding"))
    assert nothing.value is None
    assert nothing.bench.types == []


@pytest.mark.parametrize("fill", ["-inf", -9.0])
def test_a_bias_and_a_rule_in_one(fill: Any) -> None:
    bias = RNG.normal(size=(S, T)).astype(np.float32)
    spec = _spec(padding=True, bias=("q_len", "kv_len"), fill=fill, empty_row=ZERO)
    expected = np.where(PADDED, -np.inf if fill == "-inf" else bias + fill, bias)
    found = Made(spec, bias=bias).array()
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-6)


UNIFORM_PADDING = {"padding": True, "fill": "min", "empty_row": UNIFORM}


def test_an_absorbing_source_is_raised_to_half_of_the_minimum() -> None:
    """A kernel may take its dtype's minimum for -inf; half of it absorbs every score as well."""
    source = np.where(PADDED, LEAST, 0.0).astype(np.float32)
    raised = Made(_spec(**UNIFORM_PADDING), source=source)
    np.testing.assert_array_equal(raised.array()[:, :1, :1], np.where(PADDED, LEAST / 2, 0.0))
    assert raised.bench.types.count("Max") == 1
    # Its own fill is half of the minimum already, and a rule that the op has needs no mask.
    assert "Max" not in Made(_spec(**UNIFORM_PADDING)).bench.types
    assert Made(_spec(**UNIFORM_PADDING), source=source, native=("padding",)).value is None
    zero = _spec(padding=True, fill="min", empty_row=ZERO)
    kept = Made(zero, source=source)
    assert "Max" not in kept.bench.types
    np.testing.assert_array_equal(kept.array()[:, :1, :1], source)


def test_an_absorbing_source_beside_alibi_is_raised_where_it_is_read() -> None:
    source = np.where(PADDED, LEAST, 0.0).astype(np.float32)
    spec = _spec(**UNIFORM_PADDING, alibi_slopes=(0.5, 1.0))
    assert "Max" in Made(spec, source=source).bench.types
    assert "Max" not in Made(spec, source=source, native=("padding",)).bench.types


@pytest.mark.parametrize("hides", [True, False], ids=["minimum hides", "minimum is a number"])
def test_a_bias_of_the_minimum_is_halved_where_the_op_takes_it_for_infinity(hides: bool) -> None:
    bias = np.array([[0.0, LEAST, -1.0, LEAST / 2, 2.0]] * S, np.float32)
    spec = _spec(bias=("q_len", "kv_len"), empty_row=ZERO)
    found = Made(spec, bias=bias, minimum_hides=hides).array()
    expected = np.where(bias == LEAST, LEAST / 2, bias) if hides else bias
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_no_bias_holds_no_minimum() -> None:
    spec = _spec(padding=True, empty_row=ZERO)
    assert "Equal" not in Made(spec, minimum_hides=True).bench.types
    alone = Made(_spec(), minimum_hides=True)
    assert alone.value is None
    assert alone.bench.types == []


@pytest.mark.parametrize("padding", [True, False])
def test_a_sink_is_one_more_column(padding: bool) -> None:
    spec = _spec(padding=padding, sinks=True, empty_row=ZERO)
    found = Made(spec, sink_column=True).array(width=T + 1)
    hidden = PADDED if padding else np.zeros_like(PADDED)
    np.testing.assert_array_equal(found[..., :T], np.where(hidden, -np.inf, np.zeros((B, H, S, T))))
    sinks = np.array([0.5, -1.5])[None, :, None]
    np.testing.assert_array_equal(found[..., T], np.broadcast_to(sinks, (B, H, S)))


def test_sinks_of_an_op_that_has_a_word_for_them_are_no_column() -> None:
    assert Made(_spec(sinks=True)).value is None
    assert Made(_spec(), sink_column=True).value is None


def test_how_each_part_is_said() -> None:
    mask = {
        "causal": TOP_LEFT,
        "padding": True,
        "keep": ("kv_len",),
        "bias": ("t",),
        "empty_row": ZERO,
        "alibi_slopes": (1.0, 2.0),
    }
    spec, native = _spec(**mask), frozenset({"causal"})
    tensor = "additive mask"
    assert means_of_mask(spec, native) == {"keep": tensor, "padding": tensor, "alibi": tensor}
    # A boolean mask is what a keep is already; ALiBi is no boolean.
    assert means_of_mask(spec, native, boolean=True) == {
        "padding": "boolean mask",
        "alibi": tensor,
    }
    assert means_of_mask(_spec(causal=TOP_LEFT), native) == {}
    assert means_of_mask(_spec(causal=TOP_LEFT), native, boolean=True) == {}
