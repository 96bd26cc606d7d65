"""Which forms come first where nobody says: a target's own order, and what was measured to beat it.

On ONNX Runtime's CPU provider and on OpenVINO a long causal prompt of a known length takes four to
eight tenths of the time in query tiles that the op these targets are given first takes, and a step
of one query is fastest with the queries of a group as rows. ONNX Runtime's MultiHeadAttention keeps
no scores where nothing is masked: 0.85 of the time at 4096 queries, a quarter of the memory
(docs/speed.md).
Where the length is a symbol the workload is unknown, and the target's order stays: ``tune`` knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mha_export.forms import form_named
from mha_export.spec import AttentionSpec

MEASURED = ("cpu", "openvino")
LONG = 1024
"""Queries from which these were faster than the ops that the targets are given first."""
ROWS, MOST = 64, 64
"""Queries of a tile, and the most tiles, that were fastest on OpenVINO from 2048 queries on."""


def faster_options(target: str, form: str, spec: AttentionSpec) -> Mapping[str, str | int] | None:
    """What ``form`` is told on ``target`` where that was measured to be faster for ``spec``, or no
    slower with less memory; a spec or opset that cannot have it gets the form without."""
    if form != "tiled":
        return None
    if target == "cpu":
        return {"product": "attention"}
    if target == "openvino" and isinstance(spec.q_len, int):
        return {"tiles": min(math.ceil(spec.q_len / ROWS), MOST)}
    return None


def opset_for(
    target: str, forms: Sequence[str], specs: Iterable[AttentionSpec], *, own: int, most: int
) -> int:
    """The opset of a graph for ``target``: the model's own, or the later one that is worth it.

    That of the first of ``forms``; or 24, on ONNX Runtime's CPU provider, where a cache is written
    in place: TensorScatter needs no indices, which ScatterElements is given anew at each step.

    Args:
        target: its name.
        forms: the target's, best first.
        specs: of the attentions.
        own: the model's opset.
        most: the latest that the target takes.
    """
    in_place = any(spec.cache is not None and spec.cache.growth != "concat" for spec in specs)
    wanted = 24 if target == "cpu" and in_place else form_named(forms[0]).min_opset
    return max(own, min(wanted, most))


def preferred_forms(target: str, spec: AttentionSpec, forms: Sequence[str]) -> tuple[str, ...]:
    """``forms``, best first, with what was measured to be faster for ``spec`` before them."""
    if target not in MEASURED or not isinstance(spec.q_len, int):
        return tuple(forms)
    if spec.q_len == 1 and spec.cache is not None:
        return ("grouped", *forms)
    if spec.q_len < LONG:
        return tuple(forms)
    if spec.mask.causal is not None or spec.mask.left_window is not None:
        return ("tiled", *forms)
    if target == "cpu" and _all_see_all(spec) and isinstance(spec.kv_len, int):
        return ("ort-mha", *forms)
    return tuple(forms)


def _all_see_all(spec: AttentionSpec) -> bool:
    """Nothing masked or added, a key/value head of its own for each query head."""
    mask = spec.mask
    changed = mask.hides_keys or mask.bias is not None or mask.alibi_slopes is not None
    return not changed and not spec.sinks and spec.q_heads == spec.kv_heads
