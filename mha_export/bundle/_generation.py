"""A decoder's known continuation: what it says next, greedily, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from mha_export.bundle._manifest import GenerationRecord
from mha_export.decode import CacheLayout
from mha_export.measure._input_roles import InputRole, input_roles
from mha_export.targets.reference import ReferenceSession

TOKENS = 16
PROMPT = 5
BUFFER = 64
"""Length of a static cache's buffers here: any that holds prompt and tokens does."""
MARGIN = 1e-3
"""The best score leads by at least this part of the largest one; else another rounding wins."""


def greedy_continuation(
    model: ir.Model, cache: CacheLayout, *, seed: int = 0
) -> GenerationRecord | None:
    """Continue a seeded prompt by up to ``TOKENS`` tokens, on onnx's reference evaluator.

    It ends where two scores are too close to say which is best, or a static cache is full. None:
    the decoder is not driven by token ids alone.
    """
    roles = {role.name: role for role in input_roles(model)}
    ids = roles[cache.tokens[0]]
    known = {*cache.tokens[:1], cache.positions, cache.mask, cache.total_length}
    known |= {tensor.past for tensor in cache.tensors}
    if ids.dtype.kind not in "iu" or ids.limit is None or set(roles) - known:
        return None
    stream = np.random.default_rng([seed, 5])
    prompt = [int(token) for token in stream.integers(0, ids.limit, PROMPT)]
    session = ReferenceSession(model)
    past = empty_cache(roles, cache)
    tokens: list[int] = []
    new, done = prompt, 0
    while len(tokens) < min(TOKENS, _room(past, cache) - PROMPT):
        outputs = session.run(step_inputs(roles, cache, past, new, done))
        scores = outputs[cache.logits].reshape(-1, outputs[cache.logits].shape[-1])[-1]
        scores = scores.astype(np.float64)
        second, best = np.sort(scores)[-2:]
        if best - second <= MARGIN * np.abs(scores).max():
            break
        done += len(new)
        new = [int(scores.argmax())]
        tokens += new
        past = {tensor.past: outputs[tensor.present] for tensor in cache.tensors}
    return GenerationRecord(prompt=tuple(prompt), tokens=tuple(tokens))


def empty_cache(roles: Mapping[str, InputRole], cache: CacheLayout) -> dict[str, np.ndarray]:
    """The cache of a batch of 1 before the first token."""
    length = 0 if cache.growth == "concat" else BUFFER
    empty = {}
    for tensor in cache.tensors:
        shape = [d if isinstance(d, int) else 1 for d in roles[tensor.past].shape]
        if not isinstance(roles[tensor.past].shape[tensor.axis], int):
            shape[tensor.axis] = length
        empty[tensor.past] = np.zeros(shape, roles[tensor.past].dtype)
    return empty


def _room(past: Mapping[str, np.ndarray], cache: CacheLayout) -> int:
    """Tokens there is room for: a graph may fix the length of its static cache."""
    if cache.growth == "concat":
        return PROMPT + TOKENS
    return int(min(past[tensor.past].shape[tensor.axis] for tensor in cache.tensors))


def step_inputs(
    roles: Mapping[str, InputRole],
    cache: CacheLayout,
    past: Mapping[str, np.ndarray],
    new: list[int],
    done: int,
) -> dict[str, np.ndarray]:
    """What one step is fed, for a batch of 1: ``done`` tokens are in the cache already."""
    total = done + len(new)
    feeds = dict(past)
    values = {cache.tokens[0]: [new]}
    if cache.positions is not None:
        values[cache.positions] = [list(range(done, total))]
    if cache.mask is not None:
        first = cache.tensors[0]
        width = total if cache.growth == "concat" else past[first.past].shape[first.axis]
        values[cache.mask] = [[int(place < total) for place in range(width)]]
    if cache.total_length is not None:
        feeds[cache.total_length] = np.array([total], roles[cache.total_length].dtype)
    return feeds | {name: np.array(v, roles[name].dtype) for name, v in values.items()}
