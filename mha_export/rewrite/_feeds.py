"""What the inputs of a slice must hold so that a site's operands hold a case's arrays.

An operand the slice is cut at takes its array as it is. Any other is computed inside the slice from
sources: a packed projection from which q, k and v are split, an ``attention_mask`` from which
padding is derived. Those sources are solved for, and the operands then *read back* from what was
fed: the oracle sees the arrays the graph really computes with, whatever the solving achieved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.bounds import numpy_dtype
from mha_export.cases import Case
from mha_export.operands import Heads, RotaryTables
from mha_export.oracle import OracleInputs, RotaryInputs
from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context, SizedView
from mha_export.rewrite._heads import from_bhsd, to_bhsd
from mha_export.rewrite._sizes import SizedSite
from mha_export.spec import AttentionSpec

HEADS = ("query", "key", "value", "past_key", "past_value")
PLAIN = (
    "keep",
    "bias",
    "key_padding",
    "kv_lengths",
    "prefix_lengths",
    "document_ids",
    "sinks",
    "q_norm_weight",
    "k_norm_weight",
    "q_norm_bias",
    "k_norm_bias",
)

WEIGHTS = ("sinks", "q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias")
ROOT = "root of "
"""Before the name of an operand: the initializer that a reshaped weight comes from."""

_BOOLEAN = frozenset(
    {
        "And",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "Not",
        "Or",
        "Xor",
    }
)


class UnfeedableError(Exception):
    """No inputs were found that give the operands; the text says which."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Feeds:
    """Arrays by slice input, and the operands they give, as the oracle reads them."""

    arrays: Mapping[ir.Value, np.ndarray]
    spec: AttentionSpec
    inputs: OracleInputs


def oracle_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec with rotary tables as operands: they are read back from the graph."""
    if spec.rotary is None:
        return spec
    rotary = dataclasses.replace(spec.rotary, theta=None, scaling=None, positions="sequence")
    return spec.replace(rotary=rotary)


class Feeder:
    """Solves the inputs of one site's slice at one choice of sizes."""

    def __init__(
        self,
        site: Site,
        sized: SizedSite,
        context: Context,
        *,
        stops: Sequence[ir.Value],
        shape_only: frozenset[ir.Value],
        cuts: Mapping[ir.Value, str],
    ) -> None:
        self._site = site
        self._sized = sized
        self._context = context
        self._stops = stops
        self._shape_only = shape_only
        self._cuts = cuts
        self._float = numpy_dtype(site.spec.io_dtype)
        self._maps: dict[str, _IndexMap] = {}

    def feeds(self, case: Case) -> Feeds:
        """Arrays for one case.

        Errors:
            UnfeedableError: an operand or a stop has no known shape or content.
        """
        arrays: dict[ir.Value, np.ndarray] = {}
        rng = np.random.default_rng(0)
        for stop in self._stops:
            name = self._cuts.get(stop)
            arrays[stop] = (
                self._default(stop, rng) if name is None else self._operand_array(name, stop, case)
            )
        self._drive_heads(case, arrays)
        self._drive_data(case, arrays)
        inputs = self._read_back(arrays)
        return Feeds(arrays=arrays, spec=oracle_spec(self._site.spec), inputs=inputs)

    # Cut operands.

    def _operand_array(self, name: str, value: ir.Value, case: Case) -> np.ndarray:
        name = name.removeprefix(ROOT)
        array = getattr(case.inputs, name)
        assert array is not None, f"a case without operand {name}"
        if name in HEADS:
            heads: Heads = getattr(self._site.operands, name)
            return np.ascontiguousarray(from_bhsd(array, heads)).astype(self._float)
        shape = self._sized.view.shape(value)
        if shape is not None and shape != array.shape:
            if int(np.prod(shape)) != array.size:
                raise UnfeedableError(
                    f"operand {name} has shape {list(array.shape)} by the spec, {list(shape)} "
                    "in the graph"
                )
            array = array.reshape(shape)
        if array.dtype.kind == "f":
            return np.asarray(array, self._float)
        return np.asarray(array, input_dtype(value, name, self._float))

    def _default(self, stop: ir.Value, rng: np.random.Generator) -> np.ndarray:
        """Ordinary content: Gaussian floats, ones; zeros where only the shape counts."""
        shape = self._sized.view.shape(stop)
        if shape is None:
            raise UnfeedableError(f"the shape of {stop.name} is not known at any size")
        if stop in self._shape_only:
            return np.zeros(shape, input_dtype(stop, None, self._float))
        if stop.const_value is not None:
            return np.asarray(stop.const_value.numpy())
        dtype = input_dtype(stop, None, self._float)
        if dtype.kind in "biu":
            return np.ones(shape, dtype)
        return rng.standard_normal(shape).astype(dtype)

    # Operands computed inside the slice.

    def _drive_heads(self, case: Case, arrays: dict[ir.Value, np.ndarray]) -> None:
        for name in HEADS:
            heads: Heads | None = getattr(self._site.operands, name)
            if heads is None or heads.value in self._cuts:
                continue
            found = self._index_map(name, heads, arrays)
            if found is None:
                continue
            wanted = from_bhsd(getattr(case.inputs, name), heads).astype(np.float64)
            flat = arrays[found.source].astype(np.float64).reshape(-1)
            flat[found.index.reshape(-1)] = (wanted - found.offset).reshape(-1)
            shape, dtype = arrays[found.source].shape, arrays[found.source].dtype
            arrays[found.source] = flat.reshape(shape).astype(dtype)

    def _index_map(
        self, name: str, heads: Heads, arrays: Mapping[ir.Value, np.ndarray]
    ) -> _IndexMap | None:
        """Where in its only source each entry of an operand comes from, or None where unclear."""
        if name not in self._maps:
            sources = [v for v in self._context.sources(heads.value) if v in arrays]
            if len(sources) != 1:
                return None
            source = sources[0]
            shape = arrays[source].shape
            zero = self._view({**arrays, source: np.zeros(shape)}, wide=True).array(heads.value)
            count = np.arange(1, int(np.prod(shape)) + 1, dtype=np.float64).reshape(shape)
            counted = self._view({**arrays, source: count}, wide=True).array(heads.value)
            if zero is None or counted is None:
                return None
            position = counted - zero
            index = np.rint(position).astype(np.int64) - 1
            sound = np.abs(position - np.rint(position)).max(initial=0.0) < 1e-6
            if not sound or index.min(initial=0) < 0 or index.max(initial=0) >= count.size:
                return None
            self._maps[name] = _IndexMap(source=source, index=index, offset=zero)
        return self._maps[name]

    def _drive_data(self, case: Case, arrays: dict[ir.Value, np.ndarray]) -> None:
        for name in PLAIN:
            value = getattr(self._site.operands, name)
            wanted = getattr(case.inputs, name)
            if value is not None and wanted is not None and value not in self._cuts:
                self._drive(value, wanted, arrays)
        rotary = self._site.operands.rotary
        if rotary is not None:
            positions = self._positions(case)
            self._fill_tables(rotary, positions, arrays)
            carrier = rotary.position_ids if rotary.position_ids is not None else rotary.cos
            self._drive_positions(carrier, positions, arrays)

    def _drive(
        self, value: ir.Value, wanted: np.ndarray, arrays: dict[ir.Value, np.ndarray]
    ) -> None:
        """Try what a source may hold for ``value`` to be ``wanted``; keep the first that fits."""
        sources = [v for v in self._context.sources(value) if v in arrays]
        if len(sources) != 1 or value.const_value is not None:
            return
        source = sources[0]
        for candidate in _candidates(wanted, arrays[source]):
            found = self._view({**arrays, source: candidate}).array(value)
            if found is not None and _says(found, wanted):
                arrays[source] = candidate
                return
        if arrays[source].size == 1 < wanted.size and wanted.dtype.kind in "iu":
            # One number for all rows of the batch: the largest, which no row can be short of.
            arrays[source] = np.full(arrays[source].shape, wanted.max(), arrays[source].dtype)

    def _positions(self, case: Case) -> np.ndarray:
        given = case.inputs.rotary
        if given is not None and given.position_ids is not None:
            return np.asarray(given.position_ids)
        start = self._sized.p
        row = np.arange(start, start + self._sized.s, dtype=np.int64)
        return np.broadcast_to(row, (self._sized.b, self._sized.s))

    def _fill_tables(
        self, tables: RotaryTables, positions: np.ndarray, arrays: dict[ir.Value, np.ndarray]
    ) -> None:
        """Tables that are inputs and looked up by position: angles of as many rows as it takes."""
        spec = self._site.spec.rotary
        if tables.position_ids is None or tables.cos not in arrays or spec is None:
            return
        rows = int(positions.max(initial=0)) + 2
        width = spec.dim // 2
        angles = np.arange(rows)[:, None] * 10_000.0 ** -(np.arange(width) / width)
        for value, table in ((tables.cos, np.cos(angles)), (tables.sin, np.sin(angles))):
            if value in arrays:
                shaped = table if tables.half_width else np.concatenate([table, table], axis=1)
                arrays[value] = shaped.astype(arrays[value].dtype)

    def _drive_positions(
        self, carrier: ir.Value, positions: np.ndarray, arrays: dict[ir.Value, np.ndarray]
    ) -> None:
        plain = np.arange(self._sized.p, self._sized.p + self._sized.s, dtype=np.int64)
        for source in self._context.sources(carrier):
            current = arrays.get(source)
            if current is None or source in self._cuts or current.dtype.kind not in "iu":
                continue
            for candidate in (positions, np.broadcast_to(plain, positions.shape)):
                if current.shape == candidate.shape:
                    array = candidate.astype(current.dtype)
                elif current.ndim == 1 and current.shape == candidate.shape[1:]:
                    array = candidate[0].astype(current.dtype)
                else:
                    break
                if self._reaches_tables({**arrays, source: array}, carrier):
                    arrays[source] = array
                    break

    def _reaches_tables(self, arrays: Mapping[ir.Value, np.ndarray], carrier: ir.Value) -> bool:
        """Whether the positions can be computed, and have a row each in the tables."""
        view = self._view(arrays)
        found = view.array(carrier)
        tables = self._site.operands.rotary
        if found is None or tables is None or tables.position_ids is None:
            return found is not None
        shape = view.shape(tables.cos)
        return shape is None or int(found.max(initial=0)) < shape[0]

    # Reading back.

    def _read_back(self, arrays: Mapping[ir.Value, np.ndarray]) -> OracleInputs:
        view = self._view(arrays)
        operands = self._site.operands
        fields: dict[str, Any] = {}
        for name in HEADS:
            heads: Heads | None = getattr(operands, name)
            if heads is not None:
                fields[name] = to_bhsd(_content(view, heads.value, name), heads)
        if self._site.spec.value_source == "key_prefix":
            fields["value"] = fields["past_value"] = None
        for name in PLAIN:
            value = getattr(operands, name)
            if value is not None and _is_stated(self._site.spec, name):
                fields[name] = _content(view, value, name)
        if operands.rotary is not None and self._site.spec.rotary is not None:
            fields["rotary"] = self._tables(view)
        return OracleInputs(**fields)

    def _tables(self, view: SizedView) -> RotaryInputs:
        tables = self._site.operands.rotary
        assert tables is not None
        cos = _content(view, tables.cos, "rotary.cos")
        sin = _content(view, tables.sin, "rotary.sin")
        if tables.position_ids is not None:
            positions = _content(view, tables.position_ids, "rotary.position_ids")
            cos, sin = cos[positions], sin[positions]
        extra = {}
        if tables.key_cos is not None and tables.key_sin is not None:
            extra["key_cos"] = _content(view, tables.key_cos, "rotary.key_cos")
            extra["key_sin"] = _content(view, tables.key_sin, "rotary.key_sin")
        return RotaryInputs(cos=cos, sin=sin, **extra)

    def _view(self, arrays: Mapping[ir.Value, np.ndarray], *, wide: bool = False) -> SizedView:
        contents = {v: array for v, array in arrays.items() if v not in self._shape_only}
        return self._context.sized(self._sized.numbers, contents, wide=wide)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _IndexMap:
    """``operand = source.flat[index] + offset``."""

    source: ir.Value
    index: np.ndarray
    offset: np.ndarray


def _content(view: SizedView, value: ir.Value, name: str) -> np.ndarray:
    array = view.array(value)
    if array is None:
        raise UnfeedableError(f"operand {name} ({value.name}) cannot be computed from the inputs")
    return array


def _is_stated(spec: AttentionSpec, name: str) -> bool:
    mask, norm = spec.mask, spec.qk_norm
    stated = {
        "keep": mask.keep is not None,
        "bias": mask.bias is not None,
        "key_padding": mask.padding,
        "kv_lengths": spec.uses_lengths,
        "prefix_lengths": mask.prefix,
        "document_ids": mask.documents,
        "sinks": spec.sinks,
    }
    return stated.get(name, norm is not None)


def _candidates(wanted: np.ndarray, current: np.ndarray) -> Iterator[np.ndarray]:
    """Contents of a source of ``current``'s shape and type that may stand for ``wanted``."""
    if wanted.size != current.size:
        return
    shaped = wanted.reshape(current.shape)
    kind = current.dtype.kind
    if wanted.dtype.kind == "b" or kind == "b":
        truth = shaped != 0
        yield truth.astype(current.dtype)
        yield (~truth).astype(current.dtype)
        if kind == "f":
            yield np.where(truth, 0.0, -np.inf).astype(current.dtype)
            yield np.where(truth, 0.0, -1e4).astype(current.dtype)
    else:
        yield shaped.astype(current.dtype)
        if kind in "iu":
            yield (shaped != 0).astype(current.dtype)
            yield (shaped == 0).astype(current.dtype)
            yield (shaped - 1).astype(current.dtype)
        if kind == "f":
            yield np.where(shaped != 0, 0.0, -np.inf).astype(current.dtype)


def _says(found: np.ndarray, wanted: np.ndarray) -> bool:
    if found.shape != wanted.shape:
        return False
    if wanted.dtype.kind == "b" or found.dtype.kind == "b":
        return bool(np.array_equal(found != 0, wanted != 0))
    return bool(np.array_equal(found, wanted.astype(found.dtype)))


def input_dtype(value: ir.Value, name: str | None, io_dtype: np.dtype) -> np.dtype:
    """The element type of a slice input: as annotated, else what its role implies."""
    dtype = value.dtype
    node = value.producer()
    if dtype is None and node is not None and node.op_type == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
    if dtype is not None:
        return np.dtype(dtype.numpy())
    if name == "keep" or (node is not None and node.op_type in _BOOLEAN):
        return np.dtype(np.bool_)
    if name in ("key_padding", "kv_lengths", "prefix_lengths", "document_ids"):
        return np.dtype(np.int64)
    return io_dtype
