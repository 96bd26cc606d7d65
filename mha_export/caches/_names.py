"""Names and shapes of what a cached decoder reads and gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from mha_export.caches._refusal import Refused
from mha_export.caches._walk import Walk
from mha_export.decode import CacheLayout, CacheTensor
from mha_export.decode.layout import Growth
from mha_export.measure._input_roles import input_roles
from mha_export.operands import Layout

TOTAL_LENGTH = "total_length"


class Naming:
    """The interface of one cached decoder, as it is written into ``model`` (a copy)."""

    def __init__(self, model: ir.Model, found: Walk, growth: Growth) -> None:
        self._model = model
        self._found = found
        self._growth = growth
        taken = set(_names(model))
        self.prefix = next(p for p in _numbered("cache") if not any(t.startswith(p) for t in taken))
        symbols = {str(d) for v in model.graph.inputs for d in v.shape or () if not _is_int(d)}
        wanted = ("past_seq", "total_seq") if growth == "concat" else ("max_length", "max_length")
        self._past_symbol, self._whole_symbol = (
            next(name for name in _numbered(symbol) if name not in symbols) for symbol in wanted
        )
        self._taken = taken
        self._roles = {role.name: role.role for role in input_roles(model)}
        tokens, axis = next(iter(found.tokens.items()))
        assert tokens.shape is not None
        self._batch = tokens.shape[0] if axis > 0 else 1

    def past(self, layer: int, kind: str, given: str | None) -> ir.Value:
        """The input of a cache tensor: the one called ``given``, or a new one."""
        if given is not None:
            return next(value for value in self._model.graph.inputs if value.name == given)
        return self._input(f"past_key_values.{layer}.{kind}")

    def total_length(self) -> ir.Value:
        value = self._input(TOTAL_LENGTH)
        value.type = ir.TensorType(ir.DataType.INT64)
        value.shape = ir.Shape([1])
        return value

    def present(self, past: str, given: str | None) -> str:
        """The output that takes the place of input ``past``."""
        return given or past.replace("past_key_values", "present")

    def cache_shape(self, layout: Layout, heads: int, dim: int, *, grown: bool = False) -> ir.Shape:
        length = self._whole_symbol if grown else self._past_symbol
        ordered: list[int | str] = [length, heads]
        if layout is Layout.BHSD:
            ordered.reverse()
        return ir.Shape([self._batch, *ordered, dim])

    def state_lengths(self, tensors: Sequence[CacheTensor]) -> None:
        """Say of inputs and outputs which axes are as long as all tokens."""
        inputs = {value.name: value for value in self._model.graph.inputs}
        for value, axis in self._found.whole.items():
            _set_dim(inputs[value.name], axis, self._whole_symbol)
        caches = {tensor.present: tensor for tensor in tensors}
        look = self._found.look
        for value, new in zip(look.model.graph.outputs, self._model.graph.outputs, strict=False):
            tensor = caches.get(new.name or "")
            if tensor is not None:
                _set_dim(new, tensor.axis, self._whole_symbol)
                continue
            state = self._found.states.get(value)
            for axis in look.growing(value):
                if state is None or axis != state.axis:
                    _set_dim(new, axis, self._whole_symbol)

    def layout(self, tensors: tuple[CacheTensor, ...]) -> CacheLayout:
        names = [value.name or "" for value in self._found.tokens]
        positions = [name for name in names if self._roles.get(name) == "positions"]
        tokens = sorted(set(names) - set(positions), key=lambda n: self._roles.get(n) != "ids")
        masks = [value.name or "" for value in self._found.whole]
        if len(masks) > 1 or len(positions) > 1:
            raise Refused(
                "several-masks",
                f"more than one input speaks of all tokens: {', '.join(masks + positions)}",
            )
        return CacheLayout(
            growth=self._growth,
            tensors=tensors,
            tokens=tuple(tokens),
            positions=positions[0] if positions else None,
            mask=masks[0] if masks else None,
            total_length=None if self._growth == "concat" else TOTAL_LENGTH,
            logits=self._logits({tensor.present for tensor in tensors}),
        )

    def _logits(self, caches: set[str]) -> str:
        names = [value.name or "" for value in self._model.graph.outputs]
        rest = [name for name in names if name not in caches]
        return "logits" if "logits" in rest else rest[0]

    def _input(self, name: str) -> ir.Value:
        if name in self._taken:
            raise Refused("name-taken", f"the graph has a value called {name!r} already")
        value = ir.Value(name=name)
        self._model.graph.inputs.append(value)
        return value


def _set_dim(value: ir.Value, axis: int, symbol: str) -> None:
    if value.shape is not None:
        dims = list(value.shape)
        dims[axis] = ir.SymbolicDim(symbol)
        value.shape = ir.Shape(dims)


def _names(model: ir.Model) -> Iterator[str]:
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        yield value.name or ""
    for node in model.graph.all_nodes():
        yield node.name or ""
        for value in node.outputs:
            yield value.name or ""


def _numbered(name: str) -> Iterator[str]:
    yield name
    count = 1
    while True:
        count += 1
        yield f"{name}_{count}"


def _is_int(dim: object) -> bool:
    return isinstance(dim, int)
