"""Spellings that real exports outside any list were seen to use: verdicts, and rewrites that run.

Each test is the smallest export that once was refused, misread, or rewritten into a file that did
not run. They are traced from torch, so that the nodes are an exporter's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from traced import (
    DIM,
    HEADS,
    MASKED,
    PLAIN,
    SCALE,
    WIDTH,
    Layer,
    check,
    drawn,
    exported,
    masked,
    only,
    plain,
)

from mha_export.recognise import NotAttention, Rejection, recognise

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")


def weigh(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.transpose(-1, -2) * SCALE).softmax(-1) @ v


def test_attention_over_one_of_two_open_image_axes() -> None:
    def body(own: Layer, x: Any) -> Any:
        b, r, c, _ = x.shape

        def cut(t: Any) -> Any:
            return t.view(b, r, c, HEADS, DIM).permute(0, 2, 3, 1, 4)

        made = weigh(cut(own.q(x)), cut(own.k(x)), cut(own.v(x)))
        return own.o(made.permute(0, 3, 1, 2, 4).reshape(b, r, c, WIDTH))

    samples = [(drawn(2, 5, 6, WIDTH),), (drawn(3, 7, 4, WIDTH),)]
    site = check(exported(body, samples, {"x": {0: "b", 1: "r", 2: "c"}}))
    assert site.spec.q_heads == HEADS


def test_packed_projection_cut_at_computed_places() -> None:
    """Slices whose ends are computed: ONNX infers no width, and Attention's inference made it 0."""

    def body(own: Layer, x: Any) -> Any:
        q, k, v = (own.split(part) for part in own.packed(x).chunk(3, -1))
        return own.merge(weigh(q, k, v))

    check(exported(body, plain(), PLAIN))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "flat"])
def test_causal_mask_sized_by_the_cache_it_is_read_with(layout: str) -> None:
    """The mask's size is that of past and new keys together, which the attention makes."""

    def body(own: Layer, x: Any, past_k: Any, past_v: Any) -> Any:
        b, s, _ = x.shape
        k, v = own.k(x), own.v(x)
        axis = 1
        if layout != "flat":
            k, v = k.view(b, s, HEADS, DIM), v.view(b, s, HEADS, DIM)
        if layout == "bhsd":
            k, v, axis = k.transpose(1, 2), v.transpose(1, 2), 2
        k, v = torch.cat([past_k, k], axis), torch.cat([past_v, v], axis)
        keys, values = k, v
        if layout == "flat":
            keys, values = own.split(k), own.split(v)
        if layout == "bshd":
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
        t = keys.shape[2]
        seen = torch.ones(s, t, dtype=torch.bool).tril(t - s)
        scores = own.split(own.q(x)) @ keys.transpose(-1, -2) * SCALE
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return own.merge(weights @ values), k, v

    shapes: dict[str, Callable[[int, int], tuple[int, ...]]] = {
        "bhsd": lambda b, p: (b, HEADS, p, DIM),
        "bshd": lambda b, p: (b, p, HEADS, DIM),
        "flat": lambda b, p: (b, p, WIDTH),
    }
    samples = [
        (drawn(b, s, WIDTH), drawn(*shapes[layout](b, p)), drawn(*shapes[layout](b, p)) + 1)
        for b, s, p in ((2, 3, 4), (3, 1, 6))
    ]
    place = 2 if layout == "bhsd" else 1
    axes = {"x": {0: "b", 1: "s"}, "past_k": {0: "b", place: "p"}, "past_v": {0: "b", place: "p"}}
    spec = check(exported(body, samples, axes)).spec
    assert spec.cache is not None
    assert spec.mask.causal == "bottom_right"
    assert not spec.cross


def test_rows_hidden_by_two_minima_keep_what_the_graph_makes_of_them() -> None:
    """Where both masks hide a key it is -inf beside minima: the row is not uniform."""

    def body(own: Layer, x: Any, m: Any) -> Any:
        q, k, v = own.heads(x)
        low = torch.finfo(torch.float32).min
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = torch.where(seen, q @ k.transpose(-1, -2) * SCALE, torch.tensor(low))
        scores = scores + (1.0 - m[:, None, None, :].float()) * low
        return own.merge(scores.softmax(-1) @ v)

    check(exported(body, masked(), MASKED))


def test_a_mask_whose_sizes_an_exporter_named_apart() -> None:
    """No proof at sizes at which the mask can't be added up."""

    def body(own: Layer, x: Any, m: Any) -> Any:
        q, k, v = own.heads(x)
        low = torch.finfo(torch.float32).min
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        kept = (m[:, None, None, :] > 0) & seen
        scores = torch.where(seen, q @ k.transpose(-1, -2) * SCALE, torch.tensor(low))
        return own.merge((scores + torch.where(kept, 0.0, low)).softmax(-1) @ v)

    axes = {"x": {0: "b", 1: "s"}, "m": {0: "rows", 1: "columns"}}
    assert check(exported(body, masked(), axes)).spec.mask.bias is not None


def test_weights_zeroed_where_the_same_mask_hid_them() -> None:
    def body(own: Layer, x: Any, m: Any) -> Any:
        q, k, v = own.heads(x)
        hidden = m[:, None, None, :] == 0
        scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(hidden, float("-inf"))
        again = m[:, None, None, :] == 0
        return own.merge(scores.softmax(-1).masked_fill(again, 0.0) @ v)

    assert check(exported(body, masked(), MASKED)).spec.mask.padding


def test_weights_zeroed_where_another_mask_holds_are_refused() -> None:
    def body(own: Layer, x: Any, m: Any) -> Any:
        q, k, v = own.heads(x)
        scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(m[:, None, None, :] == 0, -1e30)
        return own.merge(scores.softmax(-1).masked_fill(m[:, None, None, :] == 1, 0.0) @ v)

    verdict = only(recognise(exported(body, masked(), MASKED).model))
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "probabilities-masked"


def _talking(own: Layer, x: Any) -> Any:
    q, k, v = own.heads(x)
    scores = own.mix((q @ k.transpose(-1, -2) * SCALE).permute(0, 2, 3, 1))
    return own.merge(scores.permute(0, 3, 1, 2).softmax(-1) @ v)


def _talking_in_a_convolution(own: Layer, x: Any) -> Any:
    q, k, v = own.heads(x)
    scores = q @ k.transpose(-1, -2) * SCALE
    return own.merge(torch.conv2d(scores, own.mix.weight[..., None, None]).softmax(-1) @ v)


def _keeping_the_best(own: Layer, x: Any) -> Any:
    q, k, v = own.heads(x)
    scores = q @ k.transpose(-1, -2) * SCALE
    least = scores.topk(2, -1)[0][..., -1:]
    return own.merge(scores.masked_fill(scores < least, float("-inf")).softmax(-1) @ v)


def _differential(own: Layer, x: Any) -> Any:
    q, k, v = own.heads(x)
    weights = (q @ k.transpose(-1, -2) * SCALE).softmax(-1)
    other = (k @ q.transpose(-1, -2) * SCALE).softmax(-1)
    return own.merge((weights - 0.4 * other) @ v)


def _repaired(own: Layer, x: Any) -> Any:
    q, k, v = own.heads(x)
    return own.merge(torch.nan_to_num((q @ k.transpose(-1, -2) * SCALE).softmax(-1)) @ v)


def _renormed(own: Layer, x: Any) -> Any:
    q, k, v = own.heads(x)
    weights = (q @ k.transpose(-1, -2) * SCALE).softmax(-1) * (x[:, None, None, :, 0] > 0)
    return own.merge(weights / (weights.sum(-1, keepdim=True) + 1e-9) @ v)


@pytest.mark.parametrize("body", [_talking, _talking_in_a_convolution, _repaired, _renormed])
def test_attention_with_more_to_it_is_never_called_something_else(body: Any) -> None:
    """Refused or recognised, but not a pooling or a matching, which nobody would look at again."""
    verdict = only(recognise(exported(body, plain(), PLAIN).model))
    assert not isinstance(verdict, NotAttention), verdict.to_json()


def test_scores_mixed_over_heads_are_refused() -> None:
    verdict = only(recognise(exported(_talking, plain(), PLAIN).model))
    assert isinstance(verdict, Rejection)
    assert verdict.reason.code == "scores-mixed"


def test_noise_on_the_logits_of_a_codebook_makes_no_attention() -> None:
    def body(own: Layer, x: Any, g: Any) -> Any:
        return ((own.q(x)[..., :HEADS] + g) / 0.7).softmax(-1) @ own.codes

    def narrow(own: Layer, x: Any, g: Any) -> Any:
        return ((torch.nn.functional.linear(x, own.codes) + g) / 0.7).softmax(-1) @ own.codes

    samples = [(drawn(2, 7, WIDTH), drawn(2, 7, HEADS)), (drawn(3, 5, WIDTH), drawn(3, 5, HEADS))]
    axes = {"x": {0: "b", 1: "s"}, "g": {0: "b", 1: "s"}}
    for made in (body, narrow):
        verdict = only(recognise(exported(made, samples, axes).model))
        assert isinstance(verdict, NotAttention), verdict.to_json()


def test_router_on_top_of_an_attention_is_still_a_router() -> None:
    def body(own: Layer, x: Any) -> Any:
        made = own.merge(weigh(*own.heads(x)))
        return own.mix(made[..., :HEADS]).softmax(-1) @ own.codes

    verdicts = recognise(exported(body, plain(), PLAIN).model).verdicts
    assert [v.verdict for v in verdicts] == ["attention", "not_attention"]


def test_heads_merged_into_the_batch_of_rows_that_lie_one_after_another() -> None:
    """[length, batch, heads * channels] viewed as [length, batch * heads, channels]."""

    def body(own: Layer, x: Any) -> Any:
        n, b, _ = x.shape

        def cut(t: Any) -> Any:
            return t.view(n, b * HEADS, DIM).transpose(0, 1)

        made = weigh(cut(own.q(x)), cut(own.k(x)), cut(own.v(x)))
        return own.o(made.transpose(0, 1).reshape(n, b, WIDTH))

    spec = check(exported(body, plain(), {"x": {0: "s", 1: "b"}})).spec
    assert (spec.q_heads, spec.head_dim) == (HEADS, DIM)


def test_heads_merged_into_the_batch_of_channels_first() -> None:
    """[batch, heads * 3 * channels, pixels] viewed as [batch * heads, 3 * channels, pixels]."""

    def body(own: Layer, x: Any) -> Any:
        b, n, _ = x.shape
        q, k, v = own.packed(x).transpose(1, 2).reshape(b * HEADS, 3 * DIM, n).split(DIM, 1)
        weights = (q.transpose(1, 2) @ k * SCALE).softmax(-1)
        made = (v @ weights.transpose(1, 2)).reshape(b, WIDTH, n)
        return own.o(made.transpose(1, 2))

    spec = check(exported(body, plain(), PLAIN)).spec
    assert (spec.q_heads, spec.head_dim) == (HEADS, DIM)


def test_a_length_cut_in_blocks_is_read_at_more_than_one_block() -> None:
    """At one block the blocks would pass for the whole length, at every choice of sizes alike."""

    def body(own: Layer, x: Any) -> Any:
        batch, length, _ = x.shape
        cut = [t.reshape(batch, HEADS, length // 4, 4, DIM) for t in own.heads(x)]
        return own.merge(weigh(*cut).reshape(batch, HEADS, length, DIM))

    samples = [(drawn(2, 8, WIDTH),), (drawn(3, 12, WIDTH),)]
    check(exported(body, samples, PLAIN))


def test_heads_told_over_again_by_an_einsum() -> None:
    """Query head i reads key head i % 2: tiled, so four key heads, each of two spread over two."""

    def body(own: Layer, x: Any) -> Any:
        batch, length, _ = x.shape
        q = own.q(x).view(batch, length, 2, 2, DIM)
        k, v = (f(x)[..., : 2 * DIM].reshape(batch, length, 2, DIM) for f in (own.k, own.v))
        weights = (torch.einsum("bsgkd,btkd->bgkst", q, k) * SCALE).softmax(-1)
        return own.o(torch.einsum("bgkst,btkd->bsgkd", weights, v).reshape(batch, length, WIDTH))

    site = check(exported(body, plain(), PLAIN))
    assert site.spec.kv_heads == HEADS


def test_a_mask_of_batch_times_heads() -> None:
    """Its first axis must be a multiple that only a Reshape with a size left open tells."""

    def body(own: Layer, x: Any, m: Any) -> Any:
        q, k, v = own.heads(x)
        mask = m.view(x.shape[0], HEADS, -1, x.shape[1])
        return own.merge(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    samples = [(drawn(b, s, WIDTH), drawn(b * HEADS, s, s)) for b, s in ((2, 7), (3, 5))]
    check(exported(body, samples, {**PLAIN, "m": {0: "bh", 1: "s", 2: "s"}}))


def test_sizes_that_an_exporter_named_apart_are_one() -> None:
    """Each cache and each batch under a symbol of its own."""

    def body(own: Layer, x: Any, past_k: Any, past_v: Any) -> Any:
        q, k, v = own.heads(x)
        k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        return own.merge(weigh(q, k, v)), k, v

    samples = [
        (drawn(b, s, WIDTH), drawn(b, HEADS, p, DIM), drawn(b, HEADS, p, DIM))
        for b, s, p in ((2, 7, 4), (3, 1, 5))
    ]
    axes = {name: {0: f"b_{name}", 2: f"p_{name}"} for name in ("k", "v")}
    site = check(exported(body, samples, {"x": {0: "b", 1: "s"}, **axes}))
    assert site.spec.cache is not None


def test_two_lengths_written_into_the_graph() -> None:
    def body(own: Layer, x: Any, m: Any) -> Any:
        q = own.q(x).reshape(2, 5, HEADS, DIM).transpose(1, 2)
        k, v = (f(m).reshape(2, 6, HEADS, DIM).transpose(1, 2) for f in (own.k, own.v))
        return own.merge(weigh(q, k, v))

    samples = [(drawn(2, 5, WIDTH), drawn(2, 6, WIDTH))]
    check(exported(body, samples, {"x": {0: "b", 1: "s"}, "m": {0: "b", 1: "t"}}))


def test_queries_made_under_a_condition_that_sizes_decide() -> None:
    """``tile`` is traced as an If over its rank."""

    def body(own: Layer, x: Any) -> Any:
        q, k, v = own.heads(x)
        angles = torch.linspace(0, 1, 2 * 7).reshape(7, 2).tile(DIM // 2)
        q = torch.cat((q[:, :, :1], q[:, :, 1:] * angles[: x.shape[1] - 1]), dim=2)
        return own.merge(weigh(q, k, v))

    check(exported(body, plain(), PLAIN))


def test_weights_that_leave_by_way_of_a_reshape() -> None:
    """Batch and heads are one axis inside; the weights outside are told apart, then averaged."""

    def body(own: Layer, x: Any) -> tuple[Any, Any]:
        batch, length, _ = x.shape
        q, k, v = (t.reshape(batch * HEADS, length, DIM) for t in own.heads(x))
        weights = torch.bmm(q * SCALE, k.transpose(1, 2)).softmax(-1)
        context = torch.bmm(weights, v).view(batch, HEADS, length, DIM)
        return own.merge(context), weights.view(batch, HEADS, length, length).mean(1)

    site = check(exported(body, plain(), PLAIN))
    assert site.qk_output is not None


def test_a_mask_made_of_the_scores_themselves_is_kept_as_it_is() -> None:
    """The scores would be an output of the very node that reads what is made of them."""
    site = only(recognise(exported(_keeping_the_best, plain(), PLAIN).model))
    assert site.cannot_replace.code == "scores-used-elsewhere"
    assert site.cannot_replace.nodes


def test_weights_that_are_combined_before_they_weigh_are_named_so() -> None:
    verdicts = recognise(exported(_differential, plain(), PLAIN).model).verdicts
    assert [verdict.reason.code for verdict in verdicts] == ["probabilities-combined"] * 2
    assert all("subtracted" in verdict.reason.message for verdict in verdicts)


def test_flags_that_become_numbers_before_they_are_added_are_flags() -> None:
    """As ``nn.MultiheadAttention`` does with a boolean mask: a keep mask, no bias."""

    def body(own: Layer, x: Any, m: Any) -> Any:
        added = torch.zeros_like(m, dtype=x.dtype).masked_fill(m, float("-inf"))
        q, k, v = (t.reshape(-1, x.shape[1], DIM) for t in own.heads(x))
        scores = torch.baddbmm(added[None], q * SCALE, k.transpose(1, 2))
        return own.merge(torch.bmm(scores.softmax(-1), v).view(x.shape[0], HEADS, -1, DIM))

    samples = []
    for b, s in ((2, 7), (3, 5)):
        flags = drawn(s, s) > 0.5
        flags[:, 0] = False
        samples.append((drawn(b, s, WIDTH), flags))
    site = check(exported(body, samples, {**PLAIN, "m": {0: "s", 1: "s"}}))
    assert site.spec.mask.keep is not None
    assert site.spec.mask.bias is None
