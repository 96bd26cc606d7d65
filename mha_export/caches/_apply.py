"""The decoder with a cache: a copy of the graph in which what the walk found is carried out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from mha_export.caches._edits import Edit, FirstRows, SetEntry, TakeRows, WholeShape
from mha_export.caches._names import Naming
from mha_export.caches._rows import RowTaker
from mha_export.caches._strip import Pasts
from mha_export.caches._walk import Walk
from mha_export.decode import CacheLayout, CacheTensor
from mha_export.decode.layout import Growth
from mha_export.forms import FormParams, Scope, form_named
from mha_export.forms._layout import LENGTH_AXIS, as_layout, dimension, ints
from mha_export.operands import Heads, Layout, Operands, RotaryTables, ir_dtype
from mha_export.recognise import Recognition, Site, Verdict
from mha_export.rewrite._clone import ClonedModel
from mha_export.rewrite._emit import Emission
from mha_export.rewrite._splice import remove_dead_nodes, restore_order, splice
from mha_export.rewrite.opset import model_opset
from mha_export.spec import AttentionSpec, CacheSpec, CausalAlignment

_INT64 = ir.DataType.INT64


class CachedGraph:
    """Builds one cached decoder.

    Args:
        model: the decoder, its past inputs (if any) emptied; not changed.
        sites: its attentions.
        found: what :func:`mha_export.caches._walk.walk` says of it.
        growth: of the cache.
        pasts: inputs that held a cache before, by site: they become the new one's.
    """

    def __init__(
        self,
        model: ir.Model,
        sites: Sequence[Site],
        found: Walk,
        growth: Growth,
        pasts: Pasts,
    ) -> None:
        self._given = pasts
        self._found = found
        self._growth = growth
        self._sites = sites
        self._cloned = ClonedModel(model)
        self.model = self._cloned.model
        self._naming = Naming(self.model, found, growth)
        self._scope = Scope(self._naming.prefix, opset=model_opset(self.model))
        self._tensors: list[CacheTensor] = []
        self._made: dict[str, Site] = {}
        self._wholes: dict[ir.Value, ir.Value] = {}

    def build(self) -> CacheLayout:
        """Carry everything out; the model of the instance is then the cached decoder."""
        graph = self.model.graph
        self._open_inputs()
        self._count()
        self._taker = RowTaker(
            self._scope,
            look=self._found.look,
            image=self._image,
            positions=self._positions,
            new_tokens=self._new,
            entries_set=self._with_entry,
        )
        # Shapes first: what the other edits read of a shape speaks of all tokens.
        for edit in sorted(self._found.edits, key=lambda e: not isinstance(e, WholeShape)):
            self._carry_out(edit)
        emissions = [self._attention(index, site) for index, site in enumerate(self._sites)]
        graph.extend(self._scope.nodes)
        for value in self._scope.initializers:
            graph.register_initializer(value)
        for copy, emission in emissions:
            splice(self.model, copy, emission)
        graph.outputs.extend(self._presents)
        self._state_shapes()
        remove_dead_nodes(self.model)
        restore_order(self.model)
        return self._naming.layout(tuple(self._tensors))

    def recognition(self, verdicts: Sequence[Verdict]) -> Recognition:
        """What recognition says of the built model, without looking at it again.

        Args:
            verdicts: of the original.
        """
        found: list[Verdict] = []
        for verdict in verdicts:
            if isinstance(verdict, Site):
                found.append(self._made[verdict.id])
            else:
                anchor = self._node(verdict.anchor)
                found.append(dataclasses.replace(verdict, anchor=anchor))
        return Recognition(model=self.model, verdicts=tuple(found))

    # Inputs, and the numbers everything is counted from.

    def _open_inputs(self) -> None:
        """Past inputs of every attention, before anything reads them."""
        self._presents: list[ir.Value] = []
        self._heads: list[tuple[Heads, Heads | None]] = []
        owners: dict[tuple[ir.Value, ir.Value | None], int] = {}
        self._owner: list[int] = []
        for index, site in enumerate(self._sites):
            own = site.spec.value_source == "own"
            key = (site.operands.key.value, site.operands.value.value if own else None)
            owner = owners.setdefault(key, index)
            self._owner.append(owner)
            if owner != index:
                self._heads.append(self._heads[owner])
                continue
            layer = len(owners) - 1
            past_key = self._past(site, layer, "key")
            self._heads.append((past_key, self._past(site, layer, "value") if own else None))

    def _past(self, site: Site, layer: int, kind: str) -> Heads:
        """The input of one cache tensor: the source's own, or a new one."""
        given = self._given.get(site.id, (None, None))[0 if kind == "key" else 1]
        spec = site.spec
        dim = spec.head_dim if kind == "key" else spec.value_dim
        layout = Layout.BHSD if given is None else given.layout
        value = self._naming.past(layer, kind, None if given is None else given.value.name)
        value.type = ir.TensorType(ir_dtype(spec.io_dtype))
        value.shape = self._naming.cache_shape(layout, spec.kv_heads, dim)
        return Heads(value=value, layout=layout, heads=spec.kv_heads, dim=dim)

    def _count(self) -> None:
        """``new`` s, ``whole`` (all tokens; a buffer's length), ``positions`` of the new tokens."""
        scope = self._scope
        tokens, axis = next(iter(self._found.tokens.items()))
        tokens = self._cloned.value(tokens)
        self._new = dimension(scope, tokens, axis)
        past = self._heads[0][0]
        held = dimension(scope, past.value, LENGTH_AXIS[past.layout])
        if self._growth == "concat":
            start = held
            self._whole = scope.op("Add", [held, self._new], dtype=_INT64, shape=[1])
            self._lengths = None
        else:
            total = self._naming.total_length()
            start = scope.op("Sub", [total, self._new], dtype=_INT64, shape=[1])
            self._whole = held
            batch = dimension(scope, tokens, 0)
            self._lengths = scope.op("Expand", [total, batch], dtype=_INT64)
        zero, one = (scope.constant(np.array(n, np.int64), hint="int") for n in (0, 1))
        count = scope.op("Squeeze", [self._new, ints(scope, 0)], dtype=_INT64, shape=[])
        steps = scope.op("Range", [zero, count, one], dtype=_INT64)
        self._positions = scope.op("Add", [start, steps], dtype=_INT64)

    # Edits outside the attentions.

    def _carry_out(self, edit: Edit) -> None:
        node = self._node(edit.node)
        if isinstance(edit, WholeShape):
            self._tell_whole(edit, node)
            return
        original = edit.node.inputs[edit.index]
        assert original is not None
        if isinstance(edit, TakeRows):
            value = self._taker.rows(original, edit.axis)
        elif isinstance(edit, FirstRows):
            inputs = [self._image(original), ints(self._scope, 0), self._new]
            inputs.append(ints(self._scope, edit.axis))
            value = self._scope.op("Slice", inputs, dtype=_INT64)
        elif isinstance(edit, SetEntry):
            number = None if edit.number is None else ints(self._scope, edit.number)
            value = self._with_entry(original, edit.entry, number)
        else:
            last = ints(self._scope, -1)
            current = node.inputs[edit.index]
            assert current is not None
            if edit.entry is not None:
                value = self._with_entry(original, edit.entry, last)
            else:
                value = self._scope.constant(
                    np.full(self._found.look.shapes(original)[0], -1, np.int64), hint="last"
                )
        node.replace_input_with(edit.index, value)

    def _with_entry(self, shape: ir.Value, entry: int, number: ir.Value | None) -> ir.Value:
        """A shape vector with one entry another; None: what it is, per new token."""
        scope, image = self._scope, self._image(shape)
        count = self._found.look.shapes(shape)[0][0]
        if number is None:
            own = scope.op("Gather", [image, ints(scope, entry)], {"axis": 0}, dtype=_INT64)
            per = scope.op("Div", [own, self._whole], dtype=_INT64)
            number = scope.op("Mul", [per, self._new], dtype=_INT64)
        pieces = [(0, entry), (entry, entry + 1), (entry + 1, count)]
        parts: list[ir.Value | None] = []
        for start, end in pieces:
            if (start, end) == (entry, entry + 1):
                parts.append(number)
            elif start < end:
                inputs = [image, *(ints(scope, n) for n in (start, end, 0))]
                parts.append(scope.op("Slice", inputs, dtype=_INT64))
        if len(parts) == 1:
            return number
        return scope.op("Concat", parts, {"axis": 0}, dtype=_INT64)

    def _tell_whole(self, edit: WholeShape, node: ir.Node) -> None:
        """Readers of a shape of new tokens get the length of all of them."""
        scope, output = self._scope, node.outputs[0]
        count = self._found.look.shapes(edit.node.outputs[0])[0][0]
        readers = list(output.uses())
        if edit.whole and count == 1:
            number = self._whole
        else:
            own = scope.op("Gather", [output, ints(scope, edit.entry)], {"axis": 0}, dtype=_INT64)
            per = scope.op("Div", [own, self._new], dtype=_INT64)
            number = (
                self._whole if edit.whole else scope.op("Mul", [per, self._whole], dtype=_INT64)
            )
        whole = self._replaced(output, count, edit.entry, number)
        self._wholes[edit.node.outputs[0]] = whole
        for reader, index in readers:
            picked = self._picked_entry(reader, index)
            if picked is None or picked == edit.entry:
                reader.replace_input_with(index, whole)

    def _picked_entry(self, reader: ir.Node, index: int) -> int | None:
        """The one entry a Gather takes of a shape."""
        indices = reader.inputs[1] if reader.op_type == "Gather" and index == 0 else None
        tensor = None if indices is None else ir.convenience.get_const_tensor(indices)
        if tensor is None or tensor.size != 1:
            return None
        entry = int(tensor.numpy().reshape(-1)[0])
        return entry if entry >= 0 else None

    def _replaced(self, shape: ir.Value, count: int, entry: int, number: ir.Value) -> ir.Value:
        scope = self._scope
        parts: list[ir.Value | None] = []
        for start, end in ((0, entry), (entry + 1, count)):
            if start == entry + 1:
                parts.append(number)
            if start < end:
                inputs = [shape, *(ints(scope, n) for n in (start, end, 0))]
                parts.append(scope.op("Slice", inputs, dtype=_INT64))
        if len(parts) == 1:
            return number
        return scope.op("Concat", parts, {"axis": 0}, dtype=_INT64)

    # The attentions.

    def _attention(self, index: int, site: Site) -> tuple[Site, Emission]:
        copy = self._cloned.site(site)
        spec = _cached_spec(site.spec, self._growth, self._heads[index][0].layout)
        operands = self._operands(index, site, copy.operands)
        scope = Scope(f"{self._naming.prefix}.{site.id}", opset=self._scope.opset)
        params = FormParams(opset=scope.opset)
        emitted = form_named("primitive").emit(scope, spec, params, operands)
        output = as_layout(scope, emitted.output, copy.output.layout).value
        pairs = [(copy.output.value, output)]
        if copy.qk_output is not None and emitted.qk_output is not None:
            pairs.append((copy.qk_output, emitted.qk_output))
        for kind, made in (("key", emitted.present_key), ("value", emitted.present_value)):
            if made is not None and self._owner[index] == index:
                pairs += self._present(index, kind, made, copy)
        self._made[site.id] = dataclasses.replace(
            copy,
            spec=spec,
            operands=operands,
            output=dataclasses.replace(copy.output, value=output),
            qk_output=emitted.qk_output,
            present_key=emitted.present_key if self._owner[index] == index else None,
            present_value=emitted.present_value if self._owner[index] == index else None,
            anchor=next(node for node in scope.nodes if node.op_type == "Softmax"),
            nodes=tuple(scope.nodes),
            fused_as=None,
        )
        return copy, Emission(
            nodes=tuple(scope.nodes),
            initializers=tuple(scope.initializers),
            functions=dict(scope.functions),
            replacements=tuple(pairs),
        )

    def _present(
        self, index: int, kind: str, made: Heads, copy: Site
    ) -> list[tuple[ir.Value, ir.Value]]:
        """Note the output of a cache tensor; what it takes the place of, where there was one."""
        past = self._heads[index][0 if kind == "key" else 1]
        old: Heads | None = getattr(copy, f"present_{kind}")
        assert past is not None
        name = self._naming.present(past.value.name or "", None if old is None else old.value.name)
        tensor = CacheTensor(
            past=past.value.name or "",
            present=name,
            axis=LENGTH_AXIS[past.layout],
            heads=past.heads,
            dim=past.dim,
        )
        self._tensors.append(tensor)
        if old is not None:
            return [(old.value, made.value)]
        made.value.name = name
        made.value.type = past.value.type
        made.value.shape = self._naming.cache_shape(past.layout, past.heads, past.dim, grown=True)
        self._presents.append(made.value)
        return []

    def _operands(self, index: int, site: Site, own: Operands) -> Operands:
        """The site's operands with a past; tables and masks for the new tokens alone."""
        before = site.operands
        past_key, past_value = self._heads[index]
        return dataclasses.replace(
            own,
            past_key=past_key,
            past_value=past_value,
            score_mask=None,
            kv_lengths=self._lengths,
            projection=None,
            keep=self._by_query(before.keep),
            bias=self._by_query(before.bias),
            rotary=self._tables(before.rotary),
        )

    def _by_query(self, value: ir.Value | None) -> ir.Value | None:
        if value is None or self._found.look.rank(value) < 2:
            return None if value is None else self._cloned.value(value)
        return self._along(value, self._found.look.rank(value) - 2)

    def _along(self, value: ir.Value, axis: int) -> ir.Value:
        """The value, cut to the new tokens where it holds all of them."""
        held = value in self._found.states or axis not in self._found.look.growing(value)
        return self._cloned.value(value) if held else self._taker.rows(value, axis)

    def _tables(self, tables: RotaryTables | None) -> RotaryTables | None:
        if tables is None:
            return None
        ids = tables.position_ids
        image = self._cloned.value
        keys = (tables.key_cos, tables.key_sin)
        key_cos, key_sin = (None if value is None else image(value) for value in keys)
        return dataclasses.replace(
            tables,
            cos=image(tables.cos) if ids is not None else self._along(tables.cos, 1),
            sin=image(tables.sin) if ids is not None else self._along(tables.sin, 1),
            position_ids=None if ids is None else self._along(ids, 1),
            key_cos=key_cos,
            key_sin=key_sin,
        )

    # Shapes.

    def _state_shapes(self) -> None:
        """Inputs and outputs say how long they are; what lies between said so of all tokens."""
        kept = {*self.model.graph.inputs, *self.model.graph.outputs}
        for node in self.model.graph.all_nodes():
            for value in node.outputs:
                if value not in kept:
                    value.shape = None
        self._naming.state_lengths(self._tensors)

    def _image(self, value: ir.Value) -> ir.Value:
        """A value of the original, speaking of all tokens, in the copy."""
        return self._wholes.get(value, self._cloned.value(value))

    def _node(self, node: ir.Node) -> ir.Node:
        producer = self._cloned.value(node.outputs[0]).producer()
        assert producer is not None
        return producer


def _cached_spec(spec: AttentionSpec, growth: Growth, layout: Layout) -> AttentionSpec:
    """The same attention of the last tokens of a sequence, the earlier ones cached."""
    mask = spec.mask
    static = growth == "static"
    if mask.causal is not None:
        mask = dataclasses.replace(mask, causal=CausalAlignment.BOTTOM_RIGHT)
    cache = CacheSpec(
        growth=growth,
        layout="bshd" if layout is Layout.BSHD else "bhsd",
        max_length="max_length" if static else None,
    )
    return spec.replace(mask=mask, cache=cache, q_len="q_len", kv_len="kv_len")
