"""What the inputs and outputs of a bundle's graphs are, for a program and for a person."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mha_export.bundle._manifest import ValueRecord
from mha_export.decode import CacheLayout
from mha_export.measure._input_roles import InputRole, input_roles

_MEANING: Mapping[str, str] = {
    "ids": "token ids",
    "positions": "position of each token: 0, 1, ... among the tokens that take part",
    "mask": "1 (true) where a token takes part, 0 where it is padding",
    "bias": "added to the attention scores: 0 to keep, a large negative number to hide",
    "past": "keys or values of earlier tokens",
    "lengths": "number of tokens of each row that take part",
    "prefix": "number of tokens at the start that see each other",
    "float": "values",
    "bool": "a flag",
    "integer": "integers",
}


def describe_interface(
    model: ir.Model, cache: CacheLayout | None
) -> tuple[tuple[ValueRecord, ...], tuple[ValueRecord, ...]]:
    """Inputs and outputs of ``model``.

    Errors:
        InputError: an input has no stated type or rank.
    """
    inputs = tuple(_input(role, cache) for role in input_roles(model))
    outputs = tuple(_output(value, cache) for value in model.graph.outputs)
    return inputs, outputs


def _input(role: InputRole, cache: CacheLayout | None) -> ValueRecord:
    kind: str = role.role
    meaning = _MEANING[role.role]
    if role.name.startswith("token_type"):
        meaning = "segment of each token: 0 for the first text, 1 for the second"
    if cache is not None:
        kind, meaning = _input_of_decoder(role, cache)
    return ValueRecord(
        name=role.name,
        dtype=role.dtype.name,
        shape=role.shape,
        role=kind,
        meaning=meaning,
        below=role.limit,
    )


def _input_of_decoder(role: InputRole, cache: CacheLayout) -> tuple[str, str]:
    static = cache.growth == "static"
    pairs = {tensor.past: tensor for tensor in cache.tensors}
    if role.name in pairs:
        tensor = pairs[role.name]
        at_first = (
            "a buffer of the longest length, zeros at first; bind it as "
            if static
            else f"0 tokens long (axis {tensor.axis}) at first; then the last step's "
        )
        return "past", f"cache of {tensor.heads} heads of {tensor.dim}: {at_first}{tensor.present}"
    if role.name == cache.mask:
        covers = "the whole buffer" if static else "cached and new tokens"
        return "mask", f"{covers}: {_MEANING['mask']}"
    if role.name == cache.positions:
        return "positions", "position of each new token: counts on after the cached ones"
    if role.name == cache.total_length:
        return "lengths", "tokens in all, the new ones counted"
    if role.name in cache.tokens:
        return role.role, "the new tokens alone"
    return role.role, _MEANING[role.role]


def _output(value: ir.Value, cache: CacheLayout | None) -> ValueRecord:
    name, role, meaning = value.name or "", "output", "values"
    if cache is not None and name == cache.logits:
        role, meaning = "logits", "scores of the next token, before softmax"
    elif cache is not None and name in {tensor.present for tensor in cache.tensors}:
        role, meaning = "present", "the cache with the new tokens: the next step's past"
    elif name == "logits":
        role, meaning = "logits", "scores, before softmax"
    elif name.endswith("hidden_state"):
        meaning = "one vector for each token"
    elif name.startswith(("pooler", "sentence")):
        meaning = "one vector for each row"
    shape = () if value.shape is None else tuple(value.shape)
    return ValueRecord(
        name=name,
        dtype="float32" if value.dtype is None else value.dtype.numpy().name,
        shape=tuple(d if isinstance(d, int) else str(d.value or "?") for d in shape),
        role=role,
        meaning=meaning,
    )
