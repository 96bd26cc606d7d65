"""Decoders get a cache where each step can be computed from the new tokens, and only there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from tiny_decoders import MASKED, PADDED, PLAIN, Decoder

from mha_export.caches import Cached, layout_of, prove_steps, with_cache
from mha_export.caches.steps import chunkings, empty_cache, step_feeds
from mha_export.decode import CacheLayout
from mha_export.recognise import Reason, recognise
from mha_export.targets import evaluator_of

GROWTHS = ("concat", "static")


def _parts(**parts: str) -> Decoder:
    return Decoder(parts=parts)


def _hidden(text: str) -> Decoder:
    return _parts(hidden=text)


_FAR = """thousand = Constant<value_int: int = 1000>()
          far = Max({count}, thousand)
          times = Div(far, thousand)
          real = Cast<to: int = 1>(times)
          last = Constant<value_ints: ints = [-1]>()
          factor = Unsqueeze(real, last)
          hidden = Mul(embedded, factor)"""
"""A factor that is one for the first thousand."""

LAST = {"output": "float[batch, 24] logits"}

POSITIVE = {
    "plain": Decoder(),
    "padding mask": MASKED,
    "positions as input": Decoder(
        inputs="int64[batch, seq] position_ids",
        parts={
            "positions": PLAIN["positions"].replace(
                "place_vectors = Gather(table, places)",
                "place_vectors = Gather(table, position_ids)",
            )
        },
    ),
    "positions counted by the mask": Decoder(
        inputs=MASKED.inputs,
        parts={
            "mask": PADDED,
            "positions": PLAIN["positions"].replace(
                "place_vectors = Gather(table, places)",
                """sums = CumSum(attention_mask, one)
                   before = Sub(sums, one)
                   counted = Max(before, zero)
                   place_vectors = Gather(table, counted)""",
            ),
        },
    ),
    "window": _parts(
        mask=PLAIN["mask"].replace(
            "allowed = Identity(sees)",
            """three = Constant<value_int: int = 3>()
               oldest = Sub(down, three)
               near = Greater(across, oldest)
               allowed = And(sees, near)""",
        )
    ),
    "lengths read from shapes": _parts(
        shape="""
            now = Shape<start: int = 0, end: int = 2>(embedded)
            parts = Constant<value_ints: ints = [2, 8]>()
            whole = Constant<value_ints: ints = [16]>()
            splits = Concat<axis: int = 0>(now, parts)
            merged = Concat<axis: int = 0>(now, whole)
        """
    ),
    "tokens of all rows in one axis": _hidden(
        """wide = Constant<value_ints: ints = [-1, 16]>()
           rows_of_all = Reshape(embedded, wide)
           squashed = Tanh(rows_of_all)
           shape_before = Shape(embedded)
           hidden = Reshape(squashed, shape_before)"""
    ),
    "sum along the channels": _hidden(
        "two = Constant<value_int: int = 2>()\n hidden = CumSum(embedded, two)"
    ),
    "mean over the channels": _hidden(
        """last = Constant<value_ints: ints = [2]>()
           mean = ReduceMean(embedded, last)
           hidden = Sub(embedded, mean)"""
    ),
    "factor of each position": _hidden(_FAR.format(count="places")),
    "matrix over one token": _hidden("hidden = MatMul(embedded, wo)"),
    "last token alone": Decoder(
        parts={
            "logits": """end = Constant<value_int: int = -1>()
                         final = Gather<axis: int = 1>(rows, end)
                         logits = MatMul(final, head)"""
        },
        **LAST,
    ),
    "last token by its place": Decoder(
        parts={
            "logits": """end = Sub(length, one)
                         final = Gather<axis: int = 1>(rows, end)
                         logits = MatMul(final, head)"""
        },
        **LAST,
    ),
}

REFUSED = {
    "one later token is seen": (
        "bidirectional",
        _parts(
            mask=PLAIN["mask"].replace(
                "sees = LessOrEqual(across, down)",
                "next = Add(down, one)\n sees = LessOrEqual(across, next)",
            )
        ),
    ),
    "a length in the shape": (
        "length-fixed",
        _parts(shape=PLAIN["shape"].replace("[0, 0, 2, 8]", "[0, 7, 2, 8]")),
    ),
    "sum along the tokens": (
        "token-mixing",
        _hidden("hidden = CumSum(embedded, one)"),
    ),
    "mean over the tokens": (
        "token-mixing",
        _hidden(
            """last = Constant<value_ints: ints = [1]>()
               mean = ReduceMean(embedded, last)
               hidden = Sub(embedded, mean)"""
        ),
    ),
    "convolution over three tokens": (
        "token-mixing",
        _hidden(
            """turned = Transpose<perm: ints = [0, 2, 1]>(embedded)
               folded = Conv<pads: ints = [2, 0]>(turned, kernel)
               hidden = Transpose<perm: ints = [0, 2, 1]>(folded)"""
        ),
    ),
    "one scale for all tokens": (
        "token-mixing",
        _hidden(
            """small, step, middle_point = DynamicQuantizeLinear(embedded)
               hidden = DequantizeLinear(small, step, middle_point)"""
        ),
    ),
    "first token alone": (
        "token-mixing",
        Decoder(
            parts={
                "logits": """final = Gather<axis: int = 1>(rows, zero)
                             logits = MatMul(final, head)"""
            },
            **LAST,
        ),
    ),
    "positions counted from the end": (
        "length-as-number",
        _parts(
            positions=PLAIN["positions"].replace(
                "place_vectors = Gather(table, places)",
                """left = Sub(length, places)
                   rest = Sub(left, one)
                   place_vectors = Gather(table, rest)""",
            )
        ),
    ),
    "a factor that grows from a thousand tokens on": (
        "length-as-number",
        _hidden(_FAR.format(count="length")),
    ),
    "angles that stretch from a thousand tokens on": (
        "length-as-number",
        _parts(
            positions=PLAIN["positions"].replace(
                "place_vectors = Gather(table, places)",
                """thousand = Constant<value_int: int = 1000>()
                   far = Max(length, thousand)
                   stretch = Div(far, thousand)
                   nearer = Div(places, stretch)
                   place_vectors = Gather(table, nearer)""",
            )
        ),
    ),
    "mask given by pairs": (
        "mask-is-an-input",
        Decoder(inputs="bool[seq, seq] pairs", parts={"mask": "allowed = Identity(pairs)"}),
    ),
    "padding read off the tokens": (
        "mask-from-tokens",
        _parts(
            mask=PADDED.replace(
                "kept = Cast<to: int = 9>(attention_mask)", "kept = Cast<to: int = 9>(input_ids)"
            )
        ),
    ),
}


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("name", POSITIVE)
def test_each_step_gives_what_the_whole_gives(name: str, growth: str) -> None:
    model = POSITIVE[name].model()
    cached = with_cache(recognise(model), growth)  # type: ignore[arg-type]
    assert isinstance(cached, Cached), cached
    proof = prove_steps(model, cached, evaluator=evaluator_of("cpu"))
    assert proof.status == "pass", proof.reason
    assert proof.steps == len(proof.cases) * sum(map(len, chunkings(proof.tokens)))
    assert cached.layout.growth == growth
    assert cached.recognition.sites[0].spec.cache is not None


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name: str, growth: str) -> None:
    code, decoder = REFUSED[name]
    found = with_cache(recognise(decoder.model()), growth)  # type: ignore[arg-type]
    assert isinstance(found, Reason)
    assert (found.code, bool(found.message)) == (code, True)


def test_the_last_token_added_to_each_fails_its_proof() -> None:
    """No op mixes tokens, and yet every step changes what earlier ones saw."""
    model = _hidden(
        """end = Constant<value_ints: ints = [-1]>()
           last = Gather<axis: int = 1>(embedded, end)
           hidden = Add(embedded, last)"""
    ).model()
    cached = with_cache(recognise(model), "concat")
    assert isinstance(cached, Cached)
    proof = prove_steps(model, cached, evaluator=evaluator_of("cpu"))
    assert proof.status == "fail"
    assert proof.reason is not None


def test_the_layout_travels_in_the_file() -> None:
    cached = with_cache(recognise(MASKED.model()), "static")
    assert isinstance(cached, Cached)
    read = CacheLayout.from_metadata(cached.model.metadata_props)
    assert read == cached.layout
    assert (read.mask, read.positions, read.total_length) == (
        "attention_mask",
        None,
        "total_length",
    )
    assert [t.past for t in read.tensors] == ["past_key_values.0.key", "past_key_values.0.value"]


def test_a_concat_cache_is_described_and_converted() -> None:
    model = MASKED.model()
    concat = with_cache(recognise(model), "concat")
    assert isinstance(concat, Cached)
    again = recognise(concat.model)
    assert layout_of(again) == concat.layout
    static = with_cache(again, "static")
    assert isinstance(static, Cached)
    assert [t.past for t in static.layout.tensors] == [t.past for t in concat.layout.tensors]
    proof = prove_steps(concat.model, static, evaluator=evaluator_of("cpu"))
    assert proof.status == "pass", proof.reason


def test_a_static_cache_is_not_made_a_concat_cache() -> None:
    static = with_cache(recognise(Decoder().model()), "static")
    assert isinstance(static, Cached)
    found = with_cache(static.recognition, "concat")
    assert isinstance(found, Reason)
    assert found.code == "static-cache"


def test_what_lies_beyond_a_static_cache_changes_nothing() -> None:
    cached = with_cache(recognise(MASKED.model()), "static")
    assert isinstance(cached, Cached)
    ids = np.arange(6, dtype=np.int64).reshape(2, 3)
    inputs = {"input_ids": ids, "attention_mask": np.ones((2, 3), np.int64)}
    feeds = step_feeds(cached.layout, inputs, 0, 3, room=8)
    clean = empty_cache(cached, 8, batch=2)
    dirty = {name: array + 1e3 for name, array in clean.items()}
    runs = [evaluator_of("cpu").run(cached.model, {**feeds, **c}) for c in (clean, dirty)]
    np.testing.assert_array_equal(runs[0]["logits"], runs[1]["logits"])


def test_the_source_is_not_changed() -> None:
    model = MASKED.model()
    before = ir.to_proto(model).SerializeToString()
    with_cache(recognise(model), "concat")
    assert ir.to_proto(model).SerializeToString() == before
