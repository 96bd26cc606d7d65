"""Casting a model's weights and arithmetic to another floating type.

What changes: floating weights and constants, floating graph inputs and outputs (a caller of an fp16
export feeds and reads fp16), element types written into nodes. What does not:

* **Positions and masks.** Whatever is computed from integers, shapes and constants alone (rotary
  angles, relative positions, mask arithmetic) stays fp32 up to where it meets an activation: at
  position 3000 an fp16 angle is off by a whole radian.
* **Minima.** Where fp32's minimum is added to scores, up to the softmax: fp16's absorbs none.
* **Sums of squares.** A norm spelled out in small nodes stays fp32 from the power to the reciprocal
  root: 256 squared is infinite in fp16.
* **Operators without the type.** Where the schema of an operator does not take the new type it is
  put between casts.

Constants beyond the new range become its largest number of that sign (a mask of -3.4e38 becomes
-65504, not -inf: a row that is masked throughout stays a mean and does not become NaN); tiny
non-zero ones stay non-zero (an epsilon of 1e-12).
"""

from __future__ import annotations

from collections.abc import Collection

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from mha_export.errors import InputError
from mha_export.operands import ir_dtype
from mha_export.rewrite._absorbing import absorbing
from mha_export.rewrite._clone import subgraphs_of
from mha_export.rewrite._splice import remove_dead_nodes
from mha_export.rewrite.opset import model_opset
from mha_export.spec import DType

_NAMES = {
    ir.DataType.FLOAT: "tensor(float)",
    ir.DataType.FLOAT16: "tensor(float16)",
    ir.DataType.BFLOAT16: "tensor(bfloat16)",
}
_FLOATS = frozenset(_NAMES)

_LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND"})
_SQUARES = frozenset({"Pow", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare"})
_FOLLOWS_SQUARES = frozenset({"Add", "Div", "Mul", "Reciprocal", "Sqrt", "Sub"})
_LIKE_INPUT = frozenset({"CastLike", "Constant", "ConstantOfShape", "Identity", "Cast"})


def with_dtype(model: ir.Model, dtype: DType) -> ir.Model:
    """A copy of ``model`` that stores and computes in ``dtype``, as the module says.

    Functions are inlined. Double-precision values stay as they are.

    Errors:
        InputError: a dtype that is not fp32, fp16 or bf16.
    """
    if ir_dtype(dtype) not in _FLOATS:
        raise InputError(f"a model cannot be cast to {dtype}", fix="choose fp32, fp16 or bf16")
    copy = model.clone()
    InlinePass()(copy)
    ShapeInferencePass()(copy)
    _Caster(copy, ir_dtype(dtype)).run()
    remove_dead_nodes(copy)
    return copy


class _Caster:
    def __init__(self, model: ir.Model, to: ir.DataType) -> None:
        self._model = model
        self._to = to
        self._opset = model_opset(model)
        self._narrowing = to is not ir.DataType.FLOAT
        self._active: set[ir.Value] = set()
        """Values that hold (or are computed from) activations: they change type."""
        self._wide: set[ir.Value] = set()
        """Values that stay fp32 for their own sake: sums of squares, and what follows them."""
        self._unclamped: Collection[ir.Value] = frozenset()
        """Minima that only such values are computed from."""
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        graph = self._model.graph
        self._mark(graph)
        if self._to is ir.DataType.FLOAT16:
            found = absorbing(graph.all_nodes(), self._active)
            self._wide |= found.wide
            self._unclamped = found.constants
        for value in graph.inputs:
            if value.dtype in _FLOATS:
                value.type = ir.TensorType(self._to)
        self._convert(graph)
        for value in graph.outputs:
            if value.dtype in _FLOATS:
                value.type = ir.TensorType(self._to)

    # Which values change.

    def _mark(self, graph: ir.Graph) -> None:
        for value in graph.inputs:
            if value.dtype in _FLOATS:
                self._active.add(value)
        for node in graph:
            for body in subgraphs_of(node):
                self._mark(body)
            if self._is_active(node):
                # Lengths, positions and comparisons of an activation are no activations.
                self._active.update(v for v in node.outputs if v.dtype is None or _is_float(v))
            if self._narrowing and self._stays_wide(node):
                self._wide.update(node.outputs)

    def _is_active(self, node: ir.Node) -> bool:
        if not self._narrowing or any(True for _ in subgraphs_of(node)):
            return True
        if any(value in self._active for value in node.inputs if value is not None):
            return True
        table = node.inputs[0] if node.inputs else None
        return node.op_type in _LOOKUPS and table is not None and _is_float_weight(table)

    def _stays_wide(self, node: ir.Node) -> bool:
        if node.domain != "":
            return False
        if node.op_type in _SQUARES:
            return _is_float(node.outputs[0])
        if node.op_type not in _FOLLOWS_SQUARES:
            return False
        computed = [v for v in node.inputs if v is not None and not _is_weight(v)]
        return bool(computed) and all(value in self._wide for value in computed)

    # The conversion.

    def _convert(self, graph: ir.Graph) -> None:
        for node in tuple(graph):
            for body in subgraphs_of(node):
                self._convert(body)
            if any(True for _ in subgraphs_of(node)):
                self._convert_outputs(node)
            elif node.op_type == "Constant":
                continue
            elif any(value in self._active for value in (*node.inputs, *node.outputs)):
                self._convert_node(node)
            elif self._narrowing:
                self._clamp_constants(node)
        for index, value in enumerate(graph.outputs):
            if _is_float(value) and not self._is_converted(value):
                graph.outputs[index] = self._cast_output(graph, value)

    def _is_converted(self, value: ir.Value) -> bool:
        return value.dtype == self._to or value.is_graph_input()

    def _convert_node(self, node: ir.Node) -> None:
        wide = any(value in self._wide for value in node.outputs)
        allowed = None if wide else self._accepted(node)
        for index, value in enumerate(node.inputs):
            if value is None or not _is_float(value):
                continue
            narrow = not wide and (allowed is None or self._takes(allowed, index))
            wanted = self._to if narrow else ir.DataType.FLOAT
            node.replace_input_with(index, self._as(value, wanted, node))
        if not wide:
            self._convert_attributes(node)
        for index, output in enumerate(node.outputs):
            if _is_float(output) or (output.dtype is None and node.domain != ""):
                narrow = not wide and (allowed is None or self._gives(allowed, index))
                output.type = ir.TensorType(self._to if narrow else ir.DataType.FLOAT)

    def _convert_outputs(self, node: ir.Node) -> None:
        for output in node.outputs:
            if _is_float(output) or (output.dtype is None and node.domain != ""):
                output.type = ir.TensorType(self._to)

    def _as(self, value: ir.Value, wanted: ir.DataType, reader: ir.Node) -> ir.Value:
        """``value`` in the wanted type: itself, a converted constant, or behind one shared Cast."""
        if value.dtype == wanted and not _is_weight(value):
            return value
        key = (value, wanted)
        if key not in self._casts:
            self._casts[key] = (
                self._converted_weight(value, wanted, reader)
                if _is_weight(value)
                else self._inserted_cast(value, wanted, reader)
            )
        return self._casts[key]

    def _converted_weight(self, value: ir.Value, wanted: ir.DataType, reader: ir.Node) -> ir.Value:
        tensor = ir.convenience.get_const_tensor(value)
        assert tensor is not None
        if tensor.dtype == wanted:
            return value
        name = f"{value.name}.{wanted.name.lower()}"
        new = ir.Value(
            name=name,
            type=ir.TensorType(wanted),
            shape=value.shape,
            const_value=_lazily_cast(tensor, wanted, name),
        )
        self._model.graph.register_initializer(new)
        return new

    def _inserted_cast(self, value: ir.Value, wanted: ir.DataType, reader: ir.Node) -> ir.Value:
        name = f"{value.name}.{wanted.name.lower()}"
        node = ir.node("Cast", [value], attributes={"to": int(wanted)}, name=name)
        result = node.outputs[0]
        result.name, result.type, result.shape = name, ir.TensorType(wanted), value.shape
        producer = value.producer()
        if producer is not None and producer.graph is not None:
            producer.graph.insert_after(producer, node)
        else:
            graph = value.graph if value.graph is not None else reader.graph
            assert graph is not None
            first = next(iter(graph))
            graph.insert_before(first, node)
        return result

    def _cast_output(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """A graph output that was computed wide, under its own name in the new type."""
        name = value.name
        value.name = f"{name}.wide"
        node = ir.node("Cast", [value], attributes={"to": int(self._to)}, name=f"{name}.cast")
        result = node.outputs[0]
        result.name, result.type, result.shape = name, ir.TensorType(self._to), value.shape
        result.metadata_props.update(value.metadata_props)
        graph.append(node)
        return result

    def _convert_attributes(self, node: ir.Node) -> None:
        for name in ("to", "dtype"):
            attribute = node.attributes.get(name)
            if attribute is not None and ir.DataType(attribute.as_int()) in _FLOATS:
                node.attributes[name] = ir.AttrInt64(name, int(self._to))
        value = node.attributes.get("value")
        if value is not None and node.op_type == "ConstantOfShape":
            tensor = value.as_tensor()
            if tensor.dtype in _FLOATS:
                cast = ir.tensor(_fitted(tensor.numpy(), self._to), name=tensor.name)
                node.attributes["value"] = ir.AttrTensor("value", cast)

    def _clamp_constants(self, node: ir.Node) -> None:
        """Constants of the parts that stay fp32 must still fit the type their result ends in."""
        for index, value in enumerate(node.inputs):
            if value is None or value in self._unclamped or not _is_float_weight(value):
                continue
            tensor = ir.convenience.get_const_tensor(value)
            assert tensor is not None
            if tensor.size > 1 << 16:
                continue
            array = tensor.numpy()
            fitted = _within(array, self._to)
            if np.array_equal(array, fitted, equal_nan=True):
                continue
            name = f"{value.name}.fitted"
            new = self._model.graph.initializers.get(name)
            if new is None:
                new = ir.Value(
                    name=name,
                    type=value.type,
                    shape=value.shape,
                    const_value=ir.tensor(fitted, name=name),
                )
                self._model.graph.register_initializer(new)
            node.replace_input_with(index, new)
        attribute = node.attributes.get("value")
        if node.outputs[0] in self._unclamped:
            return
        if attribute is not None and node.op_type == "ConstantOfShape":
            tensor = attribute.value
            if tensor.dtype in _FLOATS:
                fitted = _within(tensor.numpy(), self._to)
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(fitted))

    # What operators take.

    def _accepted(self, node: ir.Node) -> onnx.defs.OpSchema | None:
        """The operator's schema; None for other domains, which are taken to accept the type."""
        if node.domain != "" or not self._narrowing or node.op_type in _LIKE_INPUT:
            return None
        try:
            return onnx.defs.get_schema(node.op_type, self._opset, "")
        except onnx.defs.SchemaError:
            return None

    def _takes(self, schema: onnx.defs.OpSchema, index: int) -> bool:
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        return _NAMES[self._to] in formal.types

    def _gives(self, schema: onnx.defs.OpSchema, index: int) -> bool:
        formal = schema.outputs[min(index, len(schema.outputs) - 1)]
        return _NAMES[self._to] in formal.types


def _is_float(value: ir.Value) -> bool:
    return value.dtype in _FLOATS


def _is_weight(value: ir.Value) -> bool:
    if value.is_graph_input():
        return False
    return ir.convenience.get_const_tensor(value) is not None


def _is_float_weight(value: ir.Value) -> bool:
    return _is_float(value) and _is_weight(value)


def _fitted(array: np.ndarray, to: ir.DataType) -> np.ndarray:
    """``array`` in the new type: finite stays finite, non-zero stays non-zero."""
    result: np.ndarray = _within(array, to).astype(to.numpy())
    return result


def _within(array: np.ndarray, to: ir.DataType) -> np.ndarray:
    """``array`` in its own type, moved into the range of another."""
    limits = ml_dtypes.finfo(to.numpy())  # type: ignore[no-untyped-call]
    wide = array.astype(np.float32)
    finite = np.isfinite(wide)
    clipped = np.clip(wide, float(limits.min), float(limits.max))
    tiny = float(limits.smallest_subnormal)
    lost = finite & (wide != 0) & (np.abs(wide) < tiny)
    kept = np.where(lost, np.copysign(np.float32(tiny), wide), clipped)
    result: np.ndarray = np.where(finite, kept, wide).astype(array.dtype)
    return result


def _lazily_cast(tensor: ir.TensorProtocol, to: ir.DataType, name: str) -> ir.TensorProtocol:
    """The cast tensor, computed when it is written: weights are not held twice."""

    def make() -> ir.TensorProtocol:
        return ir.tensor(_fitted(tensor.numpy(), to), name=name)

    return ir.LazyTensor(make, dtype=to, shape=ir.Shape(tensor.shape.numpy()), name=name)
