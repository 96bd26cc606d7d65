"""Sizes along which windows slide: large enough that each window fits, more than once."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from mha_export.recognise._assignment import assignments
from mha_export.recognise._sliding import places_of_window

SOUND = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[batch,1,samples] x, float[4,1,10] first, float[4,4,4] second)
  => (float[batch,4,frames] y)
{
  a = Conv<strides = [5]>(x, first)
  y = Conv<strides = [4]>(a, second)
}"""


def test_sound_is_long_enough_for_more_than_one_frame() -> None:
    graph = ir.from_onnx_text(SOUND).graph
    for shapes in assignments(graph):
        found = shapes.dims(graph.outputs[0])
        assert found is not None
        assert found[2] > 1


@pytest.mark.parametrize(
    ("size", "attributes", "places"),
    [
        (10, {}, 1),
        (9, {}, 0),
        (9, {"pads": (0, 1)}, 1),
        (14, {"strides": (5,)}, 1),
        (15, {"strides": (5,)}, 2),
        (18, {"dilations": (2,)}, 0),
        (19, {"dilations": (2,)}, 1),
    ],
)
def test_places_of_a_window(size: int, attributes: dict[str, tuple[int, ...]], places: int) -> None:
    assert places_of_window([(2, 1, size), (4, 1, 10)], attributes) == [(places, size)]
