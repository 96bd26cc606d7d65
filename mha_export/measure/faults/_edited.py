"""Faults put into a built graph: inputs misread, ops out of order, numbers rounded on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.measure.faults._bases import Base
from mha_export.measure.faults._change import Change, Edit, Fault

_INT64 = ir.DataType.INT64


class _Ahead:
    """Nodes that stand between one value and all that reads it."""

    def __init__(self, model: ir.Model, value: ir.Value) -> None:
        self._graph = model.graph
        self._value = value
        self._uses = list(value.uses())
        self._nodes: list[ir.Node] = []
        self._constants = 0

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes)
        node.outputs[0].name = f"fault.{self._value.name}.{len(self._nodes)}"
        self._nodes.append(node)
        return node.outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.array(numbers, np.int64)))

    def deliver(self, made: ir.Value) -> bool:
        """Everything that read the value reads ``made`` instead."""
        if made.type is None:
            made.type = self._value.type
        for user, index in self._uses:
            user.replace_input_with(index, made)
        producer = self._value.producer()
        if producer is not None:
            self._graph.insert_after(producer, self._nodes)
        else:
            first = next(iter(self._graph))
            self._graph.insert_before(first, self._nodes)
        return bool(self._uses)


def _input(model: ir.Model, name: str) -> ir.Value | None:
    return next((value for value in model.graph.inputs if value.name == name), None)


def _on_input(name: str, change: Callable[[_Ahead, ir.Value], ir.Value]) -> Edit:
    def edit(model: ir.Model) -> bool:
        value = _input(model, name)
        if value is None:
            return False
        ahead = _Ahead(model, value)
        return ahead.deliver(change(ahead, value))

    return edit


def _flipped(at: _Ahead, x: ir.Value) -> ir.Value:
    return at.op("Sub", at.ints(1), x)


def _rolled(axis: int) -> Callable[[_Ahead, ir.Value], ir.Value]:
    def change(at: _Ahead, x: ir.Value) -> ir.Value:
        end = at.ints(np.iinfo(np.int64).max)
        last = at.op("Slice", x, at.ints(-1), end, at.ints(axis))
        rest = at.op("Slice", x, at.ints(0), at.ints(-1), at.ints(axis))
        return at.op("Concat", last, rest, axis=axis)

    return change


def _end_index(at: _Ahead, x: ir.Value) -> ir.Value:
    """The keys that take part are counted, and that many first ones taken."""
    count = at.op("ReduceSum", x, at.ints(1), keepdims=1)
    ones = at.op("Add", at.op("Mul", x, at.ints(0)), at.ints(1))
    place = at.op("CumSum", ones, at.op("Constant", value=ir.tensor(np.array(1, np.int64))))
    return at.op("Cast", at.op("LessOrEqual", place, count), to=int(_INT64))


def mask_inverted(base: Base) -> Iterator[Change]:
    if base.spec.mask.padding:
        yield Change(detail="key_padding", edit=_on_input("key_padding", _flipped))
    if base.spec.mask.keep is not None:
        yield Change(detail="keep", edit=_on_input("keep", lambda at, x: at.op("Not", x)))
    if base.spec.mask.bias is not None:
        yield Change(detail="bias", edit=_on_input("bias", lambda at, x: at.op("Neg", x)))


def mask_shifted(base: Base) -> Iterator[Change]:
    for name, axis, stated in (
        ("key_padding", 1, base.spec.mask.padding),
        ("keep", 3, base.spec.mask.keep is not None),
        ("keep", 2, base.spec.mask.keep is not None),
        ("bias", 1, base.spec.mask.bias is not None),
        ("bias", 3, base.spec.mask.bias is not None),
        ("document_ids", 1, base.spec.mask.documents),
    ):
        if stated:
            yield Change(detail=f"{name}, axis {axis}", edit=_on_input(name, _rolled(axis)))


def mask_transposed(base: Base) -> Iterator[Change]:
    for name in ("keep", "bias"):
        if getattr(base.spec.mask, name) is not None:
            turned = _on_input(name, lambda at, x: at.op("Transpose", x, perm=[0, 1, 3, 2]))
            yield Change(detail=name, edit=turned)


def mask_of_first_row(base: Base) -> Iterator[Change]:
    """Every row of the batch gets the mask of the first."""

    def first(at: _Ahead, x: ir.Value) -> ir.Value:
        row = at.op("Slice", x, at.ints(0), at.ints(1), at.ints(0))
        return at.op("Expand", row, at.op("Shape", x))

    for name in ("key_padding", "keep", "kv_lengths", "document_ids", "prefix_lengths"):
        if name in _inputs(base):
            yield Change(detail=name, edit=_on_input(name, first))


def padding_as_end(base: Base) -> Iterator[Change]:
    if base.spec.mask.padding:
        yield Change(detail="holes closed", edit=_on_input("key_padding", _end_index))


def _inputs(base: Base) -> set[str]:
    """Names of the integer and boolean inputs of a layer."""
    spec, mask = base.spec, base.spec.mask
    stated = {
        "key_padding": mask.padding,
        "keep": mask.keep is not None,
        "kv_lengths": spec.uses_lengths,
        "prefix_lengths": mask.prefix,
        "document_ids": mask.documents,
        "position_ids": spec.rotary is not None and spec.rotary.positions == "input",
    }
    return {name for name, here in stated.items() if here}


def number_off(name: str, by: int) -> Fault:
    def fault(base: Base) -> Iterator[Change]:
        if name in _inputs(base):
            moved = _on_input(name, lambda at, x: at.op("Add", x, at.ints(by)))
            yield Change(detail=f"{by:+}", edit=moved)

    return fault


def past_reversed(base: Base) -> Iterator[Change]:
    def backwards(at: _Ahead, x: ir.Value) -> ir.Value:
        end = at.ints(np.iinfo(np.int64).min)
        return at.op("Slice", x, at.ints(-1), end, at.ints(2), at.ints(-1))

    if base.spec.cache is not None:
        for name in ("past_key", "past_value"):
            yield Change(detail=name, edit=_on_input(name, backwards))


def past_after_new(base: Base) -> Iterator[Change]:
    """present = new ++ past."""

    def edit(model: ir.Model) -> bool:
        done = False
        for name in ("past_key", "past_value"):
            value = _input(model, name)
            for node, index in () if value is None else tuple(value.uses()):
                if node.op_type == "Concat" and index == 0 and len(node.inputs) == 2:
                    first, second = node.inputs
                    node.replace_input_with(0, second)
                    node.replace_input_with(1, first)
                    done = True
        return done

    if base.spec.cache is not None and base.spec.cache.growth == "concat":
        yield Change(detail="keys and values", edit=edit)


def past_exchanged(base: Base) -> Iterator[Change]:
    """The cache of the keys is read for that of the values, and the other way round."""

    def edit(model: ir.Model) -> bool:
        key, value = (_input(model, name) for name in ("past_key", "past_value"))
        if key is None or value is None:
            return False
        uses = {key: list(value.uses()), value: list(key.uses())}
        for made, places in uses.items():
            for node, index in places:
                node.replace_input_with(index, made)
        return True

    if base.spec.cache is not None:
        yield Change(detail="keys for values", edit=edit)


def past_dropped(base: Base) -> Iterator[Change]:
    if base.spec.cache is not None:
        for name in ("past_key", "past_value"):
            zero = _on_input(name, lambda at, x: at.op("Sub", x, x))
            yield Change(detail=name, edit=zero)


def sine_negated(base: Base) -> Iterator[Change]:
    if base.spec.rotary is not None:
        yield Change(detail="tables", edit=lambda model: _table(model, "sin_cache", np.negative))


def tables_shifted(base: Base) -> Iterator[Change]:
    """Every new token is one position on: without a cache that is the same attention."""

    def edit(model: ir.Model) -> bool:
        found = [_table(model, n, lambda t: np.roll(t, -1, axis=0)) for n in ("cos_", "sin_")]
        return all(found)

    if base.spec.rotary is not None and base.spec.cache is not None:
        yield Change(detail="tables one row on", edit=edit)


def sine_for_cosine(base: Base) -> Iterator[Change]:
    def edit(model: ir.Model) -> bool:
        tables = {
            stem: value
            for value in model.graph.initializers.values()
            for stem in ("cos_", "sin_")
            if (value.name or "").startswith(f"{stem}cache")
        }
        if len(tables) != 2:
            return False
        cos, sin = tables["cos_"], tables["sin_"]
        cos.const_value, sin.const_value = sin.const_value, cos.const_value
        return True

    if base.spec.rotary is not None:
        yield Change(detail="tables", edit=edit)


def _table(model: ir.Model, stem: str, change: Callable[[np.ndarray], np.ndarray]) -> bool:
    done = False
    for value in model.graph.initializers.values():
        if (value.name or "").startswith(stem) and value.const_value is not None:
            value.const_value = ir.tensor(
                np.ascontiguousarray(change(value.const_value.numpy())), name=value.name
            )
            done = True
    return done


def _rounded(model: ir.Model, value: ir.Value, narrow: ir.DataType) -> bool:
    """A round trip through ``narrow``, back to what the value's graph computes in."""
    wide = model.graph.outputs[0].dtype
    assert wide is not None
    ahead = _Ahead(model, value)
    back = ahead.op("Cast", ahead.op("Cast", value, to=int(narrow)), to=int(wide))
    back.type = ir.TensorType(wide)
    return ahead.deliver(back)


def lower_precision(narrow: ir.DataType) -> Fault:
    def at_product(weights: Sequence[str], side: str) -> Edit:
        def edit(model: ir.Model) -> bool:
            for node in model.graph:
                read = {value.name for value in node.inputs if value is not None}
                if node.op_type in ("MatMul", "Gemm") and read & set(weights):
                    value = node.outputs[0] if side == "after" else node.inputs[0]
                    return value is not None and _rounded(model, value, narrow)
            return False

        return edit

    def at_softmax(side: str) -> Edit:
        def edit(model: ir.Model) -> bool:
            nodes = [node for node in model.graph if node.op_type == "Softmax"]
            values = [n.outputs[0] if side == "after" else n.inputs[0] for n in nodes]
            return bool(nodes) and all(_rounded(model, v, narrow) for v in values if v is not None)

        return edit

    def fault(base: Base) -> Iterator[Change]:
        yield Change(detail="queries", edit=at_product(("w_q", "w_qkv"), "after"))
        yield Change(detail="context", edit=at_product(("w_o",), "before"))
        yield Change(detail="scores", edit=at_softmax("before"), plain=True)
        yield Change(detail="probabilities", edit=at_softmax("after"), plain=True)

    return fault


def softmax_axis(base: Base) -> Iterator[Change]:
    def edit(model: ir.Model) -> bool:
        nodes = [node for node in model.graph if node.op_type == "Softmax"]
        for node in nodes:
            node.attributes["axis"] = ir.AttrInt64("axis", -2)
        return bool(nodes)

    yield Change(detail="over the queries", edit=edit, plain=True)


def softcap_late(base: Base) -> Iterator[Change]:
    """The cap is put on the masked scores: what was hidden comes back at ``-c``."""

    def edit(model: ir.Model) -> bool:
        done = False
        for tanh in [node for node in model.graph if node.op_type == "Tanh"]:
            divide, multiply = tanh.inputs[0], next(iter(tanh.outputs[0].uses()))[0]
            shrink = None if divide is None else divide.producer()
            softmax = _softmax_below(multiply)
            if shrink is None or softmax is None or softmax.inputs[0] is multiply.outputs[0]:
                continue
            raw, cap = shrink.inputs
            masked = softmax.inputs[0]
            assert raw is not None
            assert cap is not None
            assert masked is not None
            for user, index in tuple(multiply.outputs[0].uses()):
                user.replace_input_with(index, raw)
            ahead = _Ahead(model, masked)
            bent = ahead.op("Tanh", ahead.op("Div", masked, cap))
            done |= ahead.deliver(ahead.op("Mul", bent, cap))
        return done

    if base.spec.softcap is not None:
        yield Change(detail="after the mask", edit=edit, plain=True)


def _softmax_below(node: ir.Node) -> ir.Node | None:
    for _ in range(8):
        if node.op_type == "Softmax":
            return node
        users = [user for user, _ in node.outputs[0].uses()]
        if len(users) != 1:
            return None
        node = users[0]
    return None


EDITED: dict[str, Fault] = {
    "mask inverted": mask_inverted,
    "mask shifted": mask_shifted,
    "mask transposed": mask_transposed,
    "mask of the first row": mask_of_first_row,
    "padding as an end index": padding_as_end,
    "lengths one short": number_off("kv_lengths", -1),
    "prefix one long": number_off("prefix_lengths", 1),
    "position off by one": number_off("position_ids", 1),
    "rotary tables shifted": tables_shifted,
    "rotary sine negated": sine_negated,
    "rotary sine for cosine": sine_for_cosine,
    "past reversed": past_reversed,
    "past after new": past_after_new,
    "past keys for values": past_exchanged,
    "past dropped": past_dropped,
    "softcap after the mask": softcap_late,
    "softmax over the wrong axis": softmax_axis,
    "fp16 on the way": lower_precision(ir.DataType.FLOAT16),
    "bf16 on the way": lower_precision(ir.DataType.BFLOAT16),
}
