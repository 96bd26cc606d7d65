"""Whole-model inputs: ranges read off the graph, consistent lengths, seeded, read from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mha_export.errors import InputError
from mha_export.measure._input_roles import input_roles
from mha_export.measure.model_inputs import (
    ModelCase,
    inputs_from_file,
    model_cases,
    ordinary_inputs,
)
from mha_export.measure.parity import save_case
from mha_export.measure.reference_run import ModelReference


def _named(model: ir.Model, name: str, **options: object) -> ModelCase:
    return next(case for case in model_cases(model, **options) if case.name == name)  # type: ignore[arg-type]


def test_roles_are_read_off_the_graph(cached_inputs: ir.Model) -> None:
    roles = {role.name: (role.role, role.limit) for role in input_roles(cached_inputs)}
    assert roles == {
        "input_ids": ("ids", 19),
        "attention_mask": ("mask", None),
        "position_ids": ("positions", 9),  # 11 rows, of which the offset takes 2
        "past_key_0": ("past", None),
    }


def test_ids_stay_below_the_rows_of_their_table(plain_encoder: ir.Model) -> None:
    for case in model_cases(plain_encoder, seed=3):
        ids = case.inputs["input_ids"]
        assert ids.min() >= 0
        assert ids.max() < 19


def test_masks_come_in_every_shape(plain_encoder: ir.Model) -> None:
    masks = {c.name: c.inputs["attention_mask"] for c in model_cases(plain_encoder)}
    assert masks["ordinary"].all()
    assert not masks["left padded"][:, 0].any()
    assert masks["left padded"][:, -1].all()
    assert not masks["right padded"][:, -1].any()
    holes = masks["holes"][1]
    first, last = np.flatnonzero(holes)[[0, -1]]
    assert not holes[first:last].all(), "a hole lies between keys that take part"
    assert not masks["empty row"][0].any()
    assert masks["empty row"][1].all()


def test_padding_differs_between_the_rows_of_a_batch(plain_encoder: ir.Model) -> None:
    mask = _named(plain_encoder, "left padded").inputs["attention_mask"]
    assert (mask[0] != mask[1]).any()


def test_a_cache_makes_consistent_lengths(cached_inputs: ir.Model) -> None:
    cases = {case.name: case for case in model_cases(cached_inputs)}
    assert cases["ordinary"].inputs["past_key_0"].shape[2] == 0
    past = cases["past"]
    assert past.inputs["past_key_0"].shape[2] == 5
    assert past.inputs["attention_mask"].shape == (2, 8)
    assert past.inputs["position_ids"].tolist() == [[5, 6, 7]] * 2


def test_positions_follow_left_padding(cached_inputs: ir.Model) -> None:
    case = _named(cached_inputs, "past, left padded")
    assert case.inputs["attention_mask"][1].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert case.inputs["position_ids"][1].tolist() == [2, 3, 4]


def test_positions_never_leave_their_table(cached_inputs: ir.Model) -> None:
    assert _named(cached_inputs, "longer").inputs["position_ids"].max() == 8


def test_the_same_seed_gives_the_same_bytes(plain_encoder: ir.Model) -> None:
    first, again = (model_cases(plain_encoder, seed=7) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert all(np.array_equal(a.inputs[n], b.inputs[n]) for n in a.inputs)
    other = _named(plain_encoder, "ordinary", seed=8).inputs["input_ids"]
    assert not np.array_equal(other, first[0].inputs["input_ids"])


def test_given_sizes_are_kept(plain_encoder: ir.Model) -> None:
    for case in model_cases(plain_encoder, dims={"batch": 3, "seq": 5}):
        assert case.inputs["input_ids"].shape == (3, 5)
    case = ordinary_inputs(plain_encoder, shapes={"input_ids": (4, 6)})
    assert case.inputs["attention_mask"].shape == (4, 6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dims": {"sequence": 3}}, "--dim sequence"),
        ({"shapes": {"ids": (1, 2)}}, "--shape ids"),
        ({"shapes": {"input_ids": (1, 2, 3)}}, "rank 3"),
        ({"shapes": {"input_ids": (1, 2), "attention_mask": (1, 3)}}, "'seq' is 3 here"),
    ],
    ids=["unknown dimension", "unknown input", "rank", "contradiction"],
)
def test_sizes_that_do_not_fit_are_named(
    plain_encoder: ir.Model, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        model_cases(plain_encoder, **options)  # type: ignore[arg-type]


def test_timing_falls_back_to_a_length_that_runs(plain_encoder: ir.Model) -> None:
    case = ordinary_inputs(plain_encoder, runs=lambda case: case.dims["seq"] <= 40)
    assert case.dims == {"batch": 1, "seq": 32}
    with pytest.raises(InputError, match="runs at none"):
        ordinary_inputs(plain_encoder, runs=lambda case: False)


def test_a_file_is_read_back(plain_encoder: ir.Model, tmp_path: Path) -> None:
    case = _named(plain_encoder, "holes")
    path = save_case(tmp_path / "kept" / "holes.npz", case.inputs)
    again = inputs_from_file(path, plain_encoder)
    assert again.dims == case.dims
    assert all(np.array_equal(again.inputs[n], case.inputs[n]) for n in case.inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_mask": None}, "no array for input 'attention_mask'"),
        ({"input_ids": np.zeros((2, 3), np.float32)}, "is float32 of rank 2"),
        ({"input_ids": np.zeros(3, np.int64)}, "of rank 1"),
    ],
    ids=["missing", "dtype", "rank"],
)
def test_a_file_that_does_not_fit_is_refused(
    plain_encoder: ir.Model, tmp_path: Path, change: dict[str, np.ndarray | None], words: str
) -> None:
    arrays = _named(plain_encoder, "ordinary").inputs | change
    path = save_case(tmp_path / "x.npz", {n: a for n, a in arrays.items() if a is not None})
    with pytest.raises(InputError, match=words):
        inputs_from_file(path, plain_encoder)


def test_inputs_that_the_model_does_not_take_are_refused(
    plain_encoder: ir.Model, tmp_path: Path
) -> None:
    arrays = _named(plain_encoder, "ordinary").inputs
    reference = ModelReference(plain_encoder)
    fitting = save_case(tmp_path / "fits.npz", arrays)
    assert reference.own_case(fitting).name == "fits"
    beyond = {"input_ids": np.full_like(arrays["input_ids"], 10**6)}
    with pytest.raises(InputError, match="the original does not run on it"):
        reference.own_case(save_case(tmp_path / "beyond.npz", arrays | beyond))
