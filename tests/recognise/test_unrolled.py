"""One module a head, and a Concat: one attention, where the heads say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from traced import DIM, HEADS, MASKED, PLAIN, SCALE, WIDTH, check, exported, masked, plain

from mha_export.recognise import recognise

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

Masked = Callable[..., Any]


class Head(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Projections of its own, and scores that ``masked`` changes."""

    def __init__(self, index: int, masked: Masked, *, bias: bool, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, DIM, bias=bias) for _ in range(3))
        self.register_buffer("tril", torch.ones(size, size).tril())
        self.table = torch.nn.Parameter(torch.randn(size, size))
        self.index, self.masked = index, masked

    def forward(self, x: Any, *masks: Any) -> Any:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * SCALE
        return self.masked(self, scores, *masks).softmax(-1) @ self.v(x)


class Heads(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, masked: Masked, *, bias: bool = False, size: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        heads = [Head(index, masked, bias=bias, size=size) for index in range(HEADS)]
        self.heads = torch.nn.ModuleList(heads)
        self.o = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: Any) -> Any:
        return self.o(torch.cat([head(*inputs) for head in self.heads], dim=-1))


def causal(head: Head, scores: Any) -> Any:
    length = scores.shape[-1]
    return scores.masked_fill(head.tril[:length, :length] == 0, float("-inf"))


def padded(head: Head, scores: Any, mask: Any) -> Any:
    return scores.masked_fill(mask[:, None, :] == 0, -1e30)


def biased(head: Head, scores: Any) -> Any:
    return scores + head.table[: scores.shape[-1], : scores.shape[-1]]


def sloped(head: Head, scores: Any) -> Any:
    place = torch.arange(scores.shape[-1])
    return causal(head, scores + 2.0 ** -(head.index + 1) * (place[None] - place[:, None]))


def one_sees_all(head: Head, scores: Any) -> Any:
    return scores if head.index == 2 else causal(head, scores)


def one_is_sharper(head: Head, scores: Any) -> Any:
    return causal(head, scores * 2 if head.index == 1 else scores)


@pytest.mark.parametrize(("mask", "bias", "size"), [(causal, False, 16), (causal, True, 128)])
def test_heads_with_a_causal_mask_each(mask: Masked, bias: bool, size: int) -> None:
    case = exported(Heads(mask, bias=bias, size=size), plain(), PLAIN)
    spec = check(case).spec
    assert (spec.q_heads, spec.kv_heads, spec.mask.causal) == (HEADS, HEADS, "top_left")


def test_projections_of_heads_become_one_product() -> None:
    model = recognise(exported(Heads(causal, bias=True), plain(), PLAIN).model)
    (site,) = model.sites
    for heads in (site.operands.query, site.operands.key, site.operands.value):
        add = heads.value.producer()
        assert add.op_type == "Add"
        assert add.inputs[0].producer().op_type == "MatMul"


def test_heads_with_the_same_padding() -> None:
    assert check(exported(Heads(padded), masked(), MASKED)).spec.mask.padding


def test_heads_with_a_bias_each() -> None:
    spec = check(exported(Heads(biased), plain(), PLAIN)).spec
    assert spec.q_heads == HEADS
    assert spec.mask.bias is not None
    assert spec.mask.bias[-3] == HEADS


def test_heads_with_a_slope_each() -> None:
    spec = check(exported(Heads(sloped), plain(), PLAIN)).spec
    assert spec.mask.alibi_slopes == (0.5, 0.25, 0.125, 0.0625)


@pytest.mark.parametrize("mask", [one_sees_all, one_is_sharper])
def test_heads_that_say_different_things_stay_apart(mask: Masked) -> None:
    check(exported(Heads(mask), plain(), PLAIN), sites=HEADS)
