"""One attention in many spellings: small graphs built op by op.

A :class:`Sketch` writes ONNX nodes with plain calls; :func:`attention` writes a whole attention
steered by :class:`Choices`, each a place where real exports differ. Positives and near-misses are
both made of it, so that they differ by exactly the choice that is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

BATCH, QUERIES, KEYS, PAST = "batch", "seq", "keys", "past"
FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


class Sketch:
    """Collects nodes, weights, inputs and outputs; every call returns a value."""

    def __init__(self, opset: int = 18, seed: int = 0) -> None:
        self.opset = opset
        self.random = np.random.default_rng(seed)
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.weights: list[ir.Value] = []
        self.functions: list[ir.Function] = []
        self._count = 0

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    def input(self, name: str, shape: Sequence[int | str], dtype: ir.DataType = FLOAT) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str | None = None) -> ir.Value:
        if name is not None:
            value.name = name
        value.type = value.type or ir.TensorType(FLOAT)
        self.outputs.append(value)
        return value

    def const(self, array: Any, dtype: Any = None) -> ir.Value:
        """An initializer; Python numbers become float32, lists of ints int64."""
        array = np.asarray(array, dtype)
        if dtype is None:
            array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
            if array.dtype.kind == "b":
                array = array.astype(np.bool_)
        name = self._name("const")
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(array.shape),
            const_value=tensor,
        )
        self.weights.append(value)
        return value

    def bools(self, array: Any) -> ir.Value:
        return self.const(array, np.bool_)

    def weight(self, *shape: int) -> ir.Value:
        return self.const(self.random.standard_normal(shape) / np.sqrt(shape[0]), np.float32)

    def op(self, op_type: str, *inputs: Any, domain: str = "", **attributes: Any) -> ir.Value:
        return self.multi(1, op_type, *inputs, domain=domain, **attributes)[0]

    def multi(
        self, count: int, op_type: str, *inputs: Any, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        given = [x if x is None or isinstance(x, ir.Value) else self.const(x) for x in inputs]
        name = self._name(op_type)
        node = ir.Node(
            domain,
            op_type,
            given,
            ir.convenience.convert_attributes(attributes),
            outputs=[ir.Value(name=f"{name}:{index}") for index in range(count)],
            name=name,
        )
        self.nodes.append(node)
        return list(node.outputs)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=self.weights,
            opset_imports={"": self.opset, "com.microsoft": 1},
            name="sketch",
        )
        return ir.Model(graph, ir_version=10, functions=self.functions)

    # the ops that are written most

    def matmul(self, left: Any, right: Any) -> ir.Value:
        return self.op("MatMul", left, right)

    def add(self, left: Any, right: Any) -> ir.Value:
        return self.op("Add", left, right)

    def mul(self, left: Any, right: Any) -> ir.Value:
        return self.op("Mul", left, right)

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        return self.op("Reshape", value, list(shape))

    def transpose(self, value: ir.Value, *perm: int) -> ir.Value:
        return self.op("Transpose", value, perm=list(perm))

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        return self.op("Unsqueeze", value, list(axes))

    def squeeze(self, value: ir.Value, *axes: int) -> ir.Value:
        return self.op("Squeeze", value, list(axes))

    def concat(self, *values: ir.Value, axis: int) -> ir.Value:
        return self.op("Concat", *values, axis=axis)

    def slice(self, value: ir.Value, start: int, end: int, axis: int, step: int = 1) -> ir.Value:
        return self.op("Slice", value, [start], [end], [axis], [step])

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        return self.op("Shape", value, start=axis, end=axis + 1)

    def linear(self, value: ir.Value, width_in: int, width: int, bias: bool = True) -> ir.Value:
        found = self.matmul(value, self.weight(width_in, width))
        return self.add(found, self.weight(width)) if bias else found


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Where spellings differ. Names of functions below, or plain numbers."""

    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    value_dim: int = 8
    opset: int = 18
    projection: str = "separate"
    split: str = "plain"
    key_split: str | None = None
    merge: str = "plain"
    product: str = "matmul"
    key_order: str = "transpose"
    share: str = "none"
    value_share: str | None = None
    scale: str = "after"
    factor: float | None = None
    key_factor: float | None = None
    mask: str = "none"
    softcap: float | None = None
    uncapped: float | None = None
    softmax: str = "op"
    axis: int = -1
    guard: str = "none"
    sink: str = "none"
    cache: str = "none"
    cross: bool = False
    weighted: str = "matmul"
    value_from: str = "value"
    extra: str = "none"
    seed: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.dim

    def but(self, **changes: Any) -> Choices:
        return dataclasses.replace(self, **changes)


def attention(choices: Choices) -> ir.Model:
    """A model of one attention with projections, spelled as ``choices`` say."""
    return _Writer(choices).write()


class _Writer:
    def __init__(self, choices: Choices) -> None:
        self.c = choices
        self.g = Sketch(choices.opset, choices.seed)
        self.total: ir.Value | None = None
        """The sum of exponentials, where the division comes after the values."""

    def write(self) -> ir.Model:
        g, c = self.g, self.c
        x = g.input("x", [BATCH, QUERIES, c.width])
        memory = g.input("memory", [BATCH, KEYS, c.width]) if c.cross else x
        query, key, value = self.heads(x, memory)
        if c.cache != "none":
            key, value = self.cached("key", key), self.cached("value", value)
        if c.value_from == "key":
            value = key
        if c.value_from == "scaled":
            value = g.mul(value, 0.5)
        key, value = self.shared(key, c.share), self.shared(value, c.value_share or c.share)
        scores = self.scores(query, key)
        weights = self.softmax(scores)
        context = self.weighted(weights, value)
        g.output(self.merged(context), "y")
        return g.model()

    # projections and head splits

    def heads(self, x: ir.Value, memory: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Query [b, h, s, d], key [b, k, t, d], value [b, k, t, e]."""
        g, c = self.g, self.c
        if c.projection == "separate":
            query = self.split(g.linear(x, c.width, c.width), c.heads, c.dim, c.split)
            key_split = c.key_split or c.split
            key = self.split(
                g.linear(memory, c.width, c.kv_heads * c.dim), c.kv_heads, c.dim, key_split
            )
            value = self.split(
                g.linear(memory, c.width, c.kv_heads * c.value_dim),
                c.kv_heads,
                c.value_dim,
                c.split,
            )
            return query, key, value
        packed = g.linear(x, c.width, 3 * c.width)
        if c.projection == "split":
            parts = g.multi(3, "Split", packed, [c.width] * 3, axis=2)
            return tuple(self.split(part, c.heads, c.dim, c.split) for part in parts)  # type: ignore[return-value]
        if c.projection == "slice":
            parts = [g.slice(packed, i * c.width, (i + 1) * c.width, 2) for i in range(3)]
            return tuple(self.split(part, c.heads, c.dim, c.split) for part in parts)  # type: ignore[return-value]
        if c.projection == "five":
            whole = g.op("Reshape", packed, [0, 0, 3, c.heads, c.dim])
            whole = g.transpose(whole, 2, 0, 3, 1, 4)
            return tuple(g.op("Gather", whole, np.int64(i), axis=0) for i in range(3))  # type: ignore[return-value]
        if c.projection == "five-slice":
            whole = g.op("Reshape", packed, [0, 0, 3, c.heads, c.dim])
            whole = g.transpose(whole, 2, 0, 3, 1, 4)
            return tuple(g.squeeze(g.slice(whole, i, i + 1, 0), 0) for i in range(3))  # type: ignore[return-value]
        if c.projection == "neox":
            whole = g.op("Reshape", packed, [0, 0, c.heads, 3 * c.dim])
            whole = g.transpose(whole, 0, 2, 1, 3)
            return tuple(g.multi(3, "Split", whole, [c.dim] * 3, axis=3))  # type: ignore[return-value]
        if c.projection == "einsum":
            parts = [
                g.op("Einsum", x, g.weight(c.width, c.heads, c.dim), equation="abc,cde->abde")
                for _ in range(3)
            ]
            parts = [g.add(part, g.weight(c.heads, c.dim)) for part in parts]
            return tuple(g.transpose(part, 0, 2, 1, 3) for part in parts)  # type: ignore[return-value]
        raise ValueError(c.projection)

    def split(self, value: ir.Value, heads: int, dim: int, how: str) -> ir.Value:
        g = self.g
        if how == "plain":
            return g.transpose(g.reshape(value, 0, 0, heads, dim), 0, 2, 1, 3)
        if how == "merged":
            value = g.transpose(g.reshape(value, 0, 0, heads, dim), 0, 2, 1, 3)
            shape = g.concat(g.const([-1]), g.size(value, 2), g.const([dim]), axis=0)
            return g.op("Reshape", value, shape)
        if how == "transposed":
            return g.transpose(g.reshape(value, 0, 0, dim, heads), 0, 3, 1, 2)
        if how == "untransposed":
            shape = g.concat(
                g.size(value, 0), g.const([heads]), g.size(value, 1), g.const([dim]), axis=0
            )
            return g.op("Reshape", value, shape)
        if how == "stacked":
            parts = [g.slice(value, i * dim, (i + 1) * dim, 2) for i in range(heads)]
            return g.concat(*(g.unsqueeze(part, 1) for part in parts), axis=1)
        if how == "reversed":
            parts = [g.slice(value, i * dim, (i + 1) * dim, 2) for i in reversed(range(heads))]
            return g.concat(*(g.unsqueeze(part, 1) for part in parts), axis=1)
        if how == "swapped-batch":
            value = g.transpose(value, 1, 0, 2)
            return g.transpose(g.reshape(value, 0, 0, heads, dim), 0, 2, 1, 3)
        raise ValueError(how)

    # caches and sharing

    def cached(self, name: str, new: ir.Value) -> ir.Value:
        g, c = self.g, self.c
        dim = c.dim if name == "key" else c.value_dim
        if c.cache == "concat":
            past = g.input(f"past_{name}", [BATCH, c.kv_heads, PAST, dim])
            whole = g.concat(past, new, axis=2)
            g.output(whole, f"present_{name}")
            return whole
        if c.cache == "bshd":
            past = g.input(f"past_{name}", [BATCH, PAST, c.kv_heads, dim])
            whole = g.concat(past, g.transpose(new, 0, 2, 1, 3), axis=1)
            g.output(whole, f"present_{name}")
            return g.transpose(whole, 0, 2, 1, 3)
        if c.cache == "reversed":
            past = g.input(f"past_{name}", [BATCH, c.kv_heads, PAST, dim])
            whole = g.concat(new, past, axis=2)
            g.output(whole, f"present_{name}")
            return whole
        if c.cache == "scaled-past":
            past = g.input(f"past_{name}", [BATCH, c.kv_heads, PAST, dim])
            whole = g.concat(g.mul(past, 0.5), new, axis=2)
            g.output(whole, f"present_{name}")
            return whole
        if c.cache == "no-present":
            past = g.input(f"past_{name}", [BATCH, c.kv_heads, PAST, dim])
            return g.concat(past, new, axis=2)
        if c.cache == "only-key":
            if name == "value":
                past = g.input("memory_value", [BATCH, c.kv_heads, PAST, dim])
                return g.concat(g.op("Neg", past), new, axis=2)
            past = g.input(f"past_{name}", [BATCH, c.kv_heads, PAST, dim])
            whole = g.concat(past, new, axis=2)
            g.output(whole, f"present_{name}")
            return whole
        raise ValueError(c.cache)

    def shared(self, value: ir.Value, how: str) -> ir.Value:
        g, c = self.g, self.c
        group = c.heads // c.kv_heads
        if how in ("none", "broadcast", "rows"):
            return value
        if how == "expand":
            wide = g.unsqueeze(value, 2)
            shape = g.concat(
                g.size(value, 0), g.const([c.kv_heads, group]), g.size(value, 2),
                g.size(value, 3), axis=0,
            )  # fmt: skip
            wide = g.op("Expand", wide, shape)
            merged = g.concat(
                g.size(value, 0), g.const([c.heads]), g.size(value, 2), g.size(value, 3), axis=0
            )
            return g.op("Reshape", wide, merged)
        if how == "tile":
            return g.op("Tile", value, [1, group, 1, 1])
        if how == "tile-inner":
            wide = g.op("Tile", g.unsqueeze(value, 2), [1, 1, group, 1, 1])
            merged = g.concat(
                g.size(value, 0), g.const([c.heads]), g.size(value, 2), g.size(value, 3), axis=0
            )
            return g.op("Reshape", wide, merged)
        if how == "gather":
            return g.op("Gather", value, list(np.repeat(np.arange(c.kv_heads), group)), axis=1)
        if how == "gather-tiled":
            return g.op("Gather", value, list(np.tile(np.arange(c.kv_heads), group)), axis=1)
        if how == "concat":
            wide = g.unsqueeze(value, 2)
            wide = g.concat(*([wide] * group), axis=2)
            merged = g.concat(
                g.size(value, 0), g.const([c.heads]), g.size(value, 2), g.size(value, 3), axis=0
            )
            return g.op("Reshape", wide, merged)
        if how == "concat-heads":
            parts = [g.slice(value, i, i + 1, 1) for i in range(c.kv_heads)]
            return g.concat(*(part for part in parts for _ in range(group)), axis=1)
        if how == "concat-tiled":
            return g.concat(*([value] * group), axis=1)
        raise ValueError(how)

    # scores

    @property
    def number(self) -> float:
        return self.c.factor if self.c.factor is not None else self.c.dim**-0.5

    def scores(self, query: ir.Value, key: ir.Value) -> ir.Value:
        g, c = self.g, self.c
        rank = 3 if c.split == "merged" else 4
        if c.scale == "query":
            query = g.mul(query, self.number)
        elif c.scale == "both":
            root = float(np.sqrt(self.number))
            query, key = g.mul(query, root), g.mul(key, root)
        elif c.scale == "one-of-two":
            query = g.mul(query, float(np.sqrt(self.number)))
        elif c.scale == "runtime":
            size = g.op("Cast", g.op("Gather", g.op("Shape", query), np.int64(-1)), to=1)
            root = g.op("Sqrt", g.op("Div", 1.0, g.op("Sqrt", size)))
            query, key = g.mul(query, root), g.mul(key, root)
        if c.key_factor is not None:
            key = g.mul(key, c.key_factor)
        scores = self.product(query, key, rank)
        if c.scale == "after":
            scores = g.mul(scores, self.number)
        elif c.scale == "divide":
            scores = g.op("Div", scores, 1.0 / self.number)
        if c.extra == "negated":
            scores = g.op("Neg", scores)
        if c.extra == "clamped":
            scores = g.op("Clip", scores, -1.0, 1.0)
        if c.extra == "scores-output":
            g.output(g.op("Identity", scores), "scores")
        if c.softcap is not None and not c.mask.startswith("inside:"):
            scores = self.capped(scores)
        if c.mask != "none":
            scores = self.masked(scores, query, c.mask.removeprefix("inside:"))
        if c.softcap is not None and c.mask.startswith("inside:"):
            scores = self.capped(scores)
        if c.scale == "last":
            scores = g.mul(scores, self.number)
        if c.extra == "head-scale":
            scores = g.mul(scores, g.const(np.linspace(0.5, 2.0, c.heads).reshape(1, -1, 1, 1)))
        if c.extra == "key-weight":
            weight = g.op("ReduceMean", key, [3], keepdims=0)
            scores = g.mul(scores, g.unsqueeze(weight, 2))
        return scores

    def capped(self, scores: ir.Value) -> ir.Value:
        g, cap = self.g, self.c.softcap
        return g.mul(g.op("Tanh", g.op("Div", scores, cap)), self.c.uncapped or cap)

    def product(self, query: ir.Value, key: ir.Value, rank: int) -> ir.Value:
        g, c = self.g, self.c
        if c.share == "broadcast":
            query = g.reshape(query, 0, c.kv_heads, c.heads // c.kv_heads, -1, c.dim)
            key = g.transpose(g.unsqueeze(key, 2), 0, 1, 2, 4, 3)
            return g.matmul(query, key)
        if c.share == "rows":
            query = g.reshape(query, 0, c.kv_heads, -1, c.dim)
            return g.matmul(query, g.transpose(key, 0, 1, 3, 2))
        if c.product == "einsum":
            return g.op("Einsum", query, key, equation="bhqd,bhkd->bhqk")
        if c.product == "einsum-all-heads":
            return g.op("Einsum", query, key, equation="bhqd,bgkd->bhqk")
        if c.product == "swapped":
            scores = g.matmul(key, g.transpose(query, 0, 1, 3, 2))
            return g.transpose(scores, 0, 1, 3, 2)
        if c.product == "fused":
            return g.op("FusedMatMul", query, key, domain="com.microsoft", transB=1, alpha=1.0)
        if c.product == "query-twice":
            return g.matmul(query, g.transpose(query, 0, 1, 3, 2))
        if c.key_order == "through-3d":
            flat = g.op(
                "Reshape", key, g.concat(g.const([-1]), g.size(key, 2), g.const([c.dim]), axis=0)
            )
            flat = g.transpose(flat, 0, 2, 1)
            shape = g.concat(
                g.size(key, 0), g.size(key, 1), g.const([c.dim]), g.size(key, 2), axis=0
            )
            return g.matmul(query, g.op("Reshape", flat, shape))
        perm = [0, 2, 1] if rank == 3 else [0, 1, 3, 2]
        return g.matmul(query, g.transpose(key, *perm))

    # masks

    def masked(self, scores: ir.Value, query: ir.Value, how: str) -> ir.Value:
        g, c = self.g, self.c
        name, _, number = how.partition(":")
        lowest = float(np.finfo(np.float32).min)
        if name == "causal":
            keep = self.positions(scores, query, 0, int(number or 0))
            return g.op("Where", keep, scores, -np.inf)
        if name == "window":
            left = int(number)
            later = self.positions(scores, query, 0, 0)
            near = g.op("Not", self.positions(scores, query, left + 1, 0))
            return g.op("Where", g.op("And", later, near), scores, lowest)
        if name == "open-window":
            near = g.op("Not", self.positions(scores, query, int(number) + 1, 0))
            return g.op("Where", near, scores, lowest)
        if name == "multiplied":
            padding = g.input("padding", [BATCH, KEYS if c.cross else QUERIES])
            return g.mul(scores, g.unsqueeze(padding, 1, 2))
        if name == "added":
            padding = g.input("padding", [BATCH, KEYS if c.cross else QUERIES])
            return g.add(scores, g.unsqueeze(padding, 1, 2))
        if name == "padding":
            padding = g.input("padding", [BATCH, KEYS if c.cross else QUERIES], BOOL)
            keep = g.unsqueeze(padding, 1, 2)
            return g.op("Where", keep, scores, lowest)
        if name == "hidden-padding":
            padding = g.input("padding", [BATCH, KEYS if c.cross else QUERIES], BOOL)
            return g.op("Where", g.unsqueeze(padding, 1, 2), lowest, scores)
        if name == "query-padding":
            padding = g.input("padding", [BATCH, QUERIES], BOOL)
            return g.op("Where", g.unsqueeze(padding, 1, 3), scores, lowest)
        if name == "bias":
            bias = g.input("bias", [c.heads, QUERIES, KEYS if c.cross else QUERIES])
            return g.add(scores, bias)
        if name == "subtracted":
            padding = g.input("padding", [BATCH, QUERIES])
            return g.op("Sub", scores, g.mul(g.unsqueeze(g.op("Sub", 1.0, padding), 1, 2), 1e9))
        if name == "blend":
            padding = g.unsqueeze(g.input("padding", [BATCH, QUERIES]), 1, 2)
            flags = g.op("Sub", 1.0, padding)
            if number == "inverted":
                flags = padding
            if number == "other":
                flags = g.op(
                    "Sub", 1.0, g.unsqueeze(g.input("other_padding", [BATCH, QUERIES]), 1, 2)
                )
            return g.add(g.mul(scores, padding), g.mul(flags, -1e9))
        if name == "weak":
            padding = g.input("padding", [BATCH, QUERIES], BOOL)
            return g.op("Where", g.unsqueeze(padding, 1, 2), scores, float(number))
        if name == "two":
            return self.masked(self.masked(scores, query, "bias"), query, "causal")
        raise ValueError(how)

    def positions(self, scores: ir.Value, query: ir.Value, behind: int, ahead: int) -> ir.Value:
        """[s, t] bool: key position <= query position - behind + ahead."""
        g = self.g
        rows = g.squeeze(g.size(scores, 2), 0)
        columns = g.squeeze(g.size(scores, 3), 0)
        i = g.op("Range", np.int64(0), rows, np.int64(1))
        j = g.op("Range", np.int64(0), columns, np.int64(1))
        i = g.add(i, g.const(np.int64(ahead - behind)))
        return g.op("LessOrEqual", g.unsqueeze(j, 0), g.unsqueeze(i, 1))

    # softmax and after

    def softmax(self, scores: ir.Value) -> ir.Value:
        g, c = self.g, self.c
        if c.sink != "none":
            scores = self.with_sink(scores)
        if c.softmax == "op":
            weights = g.op("Softmax", scores, axis=c.axis)
        elif c.softmax == "default":
            weights = g.op("Softmax", scores)
        elif c.softmax == "half":
            weights = g.op("Cast", g.op("Softmax", g.op("Cast", scores, to=1), axis=-1), to=1)
        else:
            shifted = scores
            if "max" in c.softmax:
                along = -2 if c.softmax == "max-of-queries" else c.axis
                fold = "ReduceMin" if c.softmax == "max-is-min" else "ReduceMax"
                shifted = g.op("Sub", scores, g.op(fold, scores, [along], keepdims=1))
            if "logsumexp" in c.softmax:
                shifted = g.op("Sub", scores, g.op("ReduceLogSumExp", scores, [c.axis], keepdims=1))
            if "log-softmax" in c.softmax:
                shifted = g.op("LogSoftmax", scores, axis=c.axis)
            powers = g.op("Exp", shifted)
            axis = -2 if c.softmax == "sum-other-axis" else c.axis
            total = g.op("ReduceSum", powers, [axis], keepdims=1)
            if "plus-one" in c.softmax:
                total = g.add(total, 1.0)
            if "late" in c.softmax:
                self.total = g.op("Reciprocal", total) if "reciprocal" in c.softmax else total
                weights = powers
            elif "log" in c.softmax:
                weights = powers
            elif "reciprocal" in c.softmax:
                weights = g.mul(powers, g.op("Reciprocal", total))
            else:
                weights = g.op("Div", powers, total)
        if c.sink in ("last", "of-scores"):
            weights = g.op("Slice", weights, [0], [-1], [3])
        elif c.sink in ("cut-first", "first"):
            weights = g.op("Slice", weights, [1], [1 << 40], [3])
        if c.guard == "nan":
            weights = g.op("Where", g.op("IsNaN", weights), 0.0, weights)
        if c.guard == "nan-is-one":
            weights = g.op("Where", g.op("IsNaN", weights), 1.0, weights)
        if c.guard == "masked":
            padding = g.input("dropped", [BATCH, KEYS if c.cross else QUERIES], BOOL)
            weights = g.op("Where", g.unsqueeze(padding, 1, 2), 0.0, weights)
        if c.guard == "biased":
            weights = g.add(weights, g.const(np.linspace(0.0, 0.1, c.heads).reshape(1, -1, 1, 1)))
        if c.guard == "halved":
            weights = g.mul(weights, 0.5)
        if c.extra == "weights-output":
            g.output(g.op("Identity", weights), "weights")
        if c.extra == "weights-mean":
            g.output(g.op("ReduceMean", weights, [1], keepdims=0), "weights")
        return weights

    def with_sink(self, scores: ir.Value) -> ir.Value:
        g, c = self.g, self.c
        sink = g.const(self.g.random.standard_normal((1, c.heads, 1, 1)), np.float32)
        shape = g.concat(
            g.size(scores, 0), g.const([c.heads]), g.size(scores, 2), g.const([1]), axis=0
        )
        column = g.op("Expand", sink, shape)
        if c.sink == "of-scores":
            column = g.op("ReduceMean", scores, [-1], keepdims=1)
        both = (column, scores) if c.sink == "first" else (scores, column)
        return g.concat(*both, axis=-1)

    def weighted(self, weights: ir.Value, value: ir.Value) -> ir.Value:
        g, c = self.g, self.c
        if c.share == "broadcast":
            context = g.matmul(weights, g.unsqueeze(value, 2))
            return g.reshape(context, 0, c.heads, -1, c.value_dim)
        if c.share == "rows":
            return g.reshape(g.matmul(weights, value), 0, c.heads, -1, c.value_dim)
        if c.weighted == "einsum":
            return g.op("Einsum", weights, value, equation="bhqk,bhkd->bqhd")
        if self.total is not None:
            op_type = "Mul" if "reciprocal" in c.softmax else "Div"
            return g.op(op_type, g.matmul(weights, value), self.total)
        if c.weighted == "transposed-weights":
            return g.matmul(g.transpose(weights, 0, 1, 3, 2), value)
        if c.weighted == "twice":
            return g.matmul(weights, g.matmul(weights, value))
        return g.matmul(weights, value)

    def merged(self, context: ir.Value) -> ir.Value:
        g, c = self.g, self.c
        width = c.heads * c.value_dim
        if c.split == "merged":
            context = g.reshape(context, -1, c.heads, 0, c.value_dim) if False else context
            shape = g.concat(
                g.const([-1, c.heads]), g.size(context, 1), g.const([c.value_dim]), axis=0
            )
            context = g.op("Reshape", context, shape)
        if c.merge == "sum":
            return g.op("ReduceSum", context, [1], keepdims=0)
        if c.merge == "mean":
            return g.op("ReduceMean", context, [1], keepdims=0)
        if c.merge == "none":
            return context
        if c.weighted == "einsum":
            return g.linear(g.reshape(context, 0, 0, width), width, c.width)
        if c.merge == "untransposed":
            shape = g.concat(g.size(context, 0), g.size(context, 2), g.const([width]), axis=0)
            return g.linear(g.op("Reshape", context, shape), width, c.width)
        if c.merge == "channels-first":
            context = g.transpose(context, 0, 2, 3, 1)
            return g.linear(g.reshape(context, 0, 0, width), width, c.width)
        context = g.transpose(context, 0, 2, 1, 3)
        if c.merge == "stacked":
            parts = [g.op("Gather", context, np.int64(i), axis=2) for i in range(c.heads)]
            return g.linear(g.concat(*parts, axis=2), width, c.width)
        return g.linear(g.reshape(context, 0, 0, width), width, c.width)


PLAIN = Choices()
SHARED = Choices(kv_heads=2, share="expand")

POSITIVES: Mapping[str, Choices] = {
    "plain": PLAIN,
    "scale-on-query": PLAIN.but(scale="query"),
    "scale-on-both": PLAIN.but(scale="both"),
    "scale-divided": PLAIN.but(scale="divide"),
    "scale-runtime": PLAIN.but(scale="runtime"),
    "scale-one": PLAIN.but(scale="none"),
    "scale-eighth": PLAIN.but(dim=16, value_dim=16, factor=0.125),
    "einsum": PLAIN.but(product="einsum", weighted="einsum"),
    "einsum-projection": PLAIN.but(projection="einsum"),
    "key-times-query": PLAIN.but(product="swapped"),
    "key-through-3d": PLAIN.but(key_order="through-3d"),
    "fused-matmul": PLAIN.but(product="fused"),
    "packed-split": PLAIN.but(projection="split"),
    "packed-slice": PLAIN.but(projection="slice"),
    "packed-five-axes": PLAIN.but(projection="five"),
    "packed-five-axes-slice": PLAIN.but(projection="five-slice"),
    "packed-head-by-head": PLAIN.but(projection="neox"),
    "stacked-slices": PLAIN.but(split="stacked"),
    "merged-batch-heads": PLAIN.but(split="merged"),
    "value-wider": PLAIN.but(value_dim=12),
    "cross": PLAIN.but(cross=True),
    "cross-padding": PLAIN.but(cross=True, mask="padding"),
    "shared-expand": SHARED,
    "shared-tile-inner": SHARED.but(share="tile-inner"),
    "shared-gather": SHARED.but(share="gather"),
    "shared-concat": SHARED.but(share="concat"),
    "shared-concat-heads": SHARED.but(share="concat-heads"),
    "shared-broadcast": SHARED.but(share="broadcast"),
    "shared-rows": SHARED.but(share="rows"),
    "one-key-head": Choices(kv_heads=1, share="expand"),
    "one-key-head-plain": Choices(kv_heads=1),
    "causal": PLAIN.but(mask="causal"),
    "window": PLAIN.but(mask="window:2"),
    "padding": PLAIN.but(mask="padding"),
    "padding-hidden": PLAIN.but(mask="hidden-padding"),
    "padding-subtracted": PLAIN.but(mask="subtracted"),
    "bias": PLAIN.but(mask="bias"),
    "bias-and-causal": PLAIN.but(mask="two"),
    "softcap": PLAIN.but(softcap=2.0),
    "softcap-causal": PLAIN.but(softcap=2.0, mask="causal"),
    "sink": PLAIN.but(sink="last"),
    "sink-causal": PLAIN.but(sink="last", mask="causal"),
    "decomposed": PLAIN.but(softmax="max"),
    "decomposed-no-max": PLAIN.but(softmax="exp"),
    "decomposed-reciprocal": PLAIN.but(softmax="max-reciprocal"),
    "divided-late": PLAIN.but(softmax="max-late"),
    "divided-late-no-max": PLAIN.but(softmax="exp-late"),
    "divided-late-reciprocal": PLAIN.but(softmax="max-late-reciprocal", mask="causal"),
    "exp-of-log-softmax": PLAIN.but(softmax="log-softmax"),
    "exp-minus-logsumexp": PLAIN.but(softmax="logsumexp"),
    "blended-flags": PLAIN.but(mask="blend"),
    "softmax-default-axis": PLAIN.but(softmax="default"),
    "softmax-axis-3": PLAIN.but(axis=3),
    "nan-guard": PLAIN.but(guard="nan", mask="padding"),
    "casts": PLAIN.but(softmax="half"),
    "cache": PLAIN.but(cache="concat"),
    "cache-bshd": PLAIN.but(cache="bshd"),
    "cache-no-present": PLAIN.but(cache="no-present"),
    "cache-shared": SHARED.but(cache="concat"),
    "mean-of-heads": PLAIN.but(merge="mean"),
    "heads-stay": PLAIN.but(merge="none"),
    "merge-stacked": PLAIN.but(merge="stacked"),
    "head-scale": PLAIN.but(extra="head-scale"),
}  # fmt: skip

Builder = Callable[[], ir.Model]
