"""The canonical statement of one multi-head attention.

Dimension legend, used in every docstring and in array names (``q_bhsd``, ``scores_bhst``):

====== =============================================================
letter meaning
====== =============================================================
b      batch
s      query length
t      key length, past included
p      past length
h      query heads (``q_heads``)
k      key/value heads (``kv_heads``); h is a multiple of k
g      query heads of one key/value head, ``h // k``
d      width of one query or key head (``head_dim``)
e      width of one value head (``v_head_dim``)
m      model width (``d_model``)
r      rotated channels of a head (``rotary.dim``)
====== =============================================================

The attention a spec states, per batch ``b`` and query head ``h`` with its key/value head
``k = h // g`` (heads *interleave*: query heads ``k*g .. k*g+g-1`` share key/value head ``k``)::

    q, key  = rotary(qk_norm(q)), rotary(qk_norm(key))
    x[s,t]  = scale * sum_d q[s,d] * key[t,d]
    x       = softcap * tanh(x / softcap)                  if softcap
    x[s,t]  = x[s,t] + bias[s,t] + alibi[h] * (t - (s + offset))
    x[s,t]  = fill                                          where a keep rule forbids (s, t)
    P       = softmax over t of x, a sink adding exp(sink[h]) to the denominator
    out     = sum_t P[s,t] * value[t,e]

where ``offset[b]`` is the position of query 0 among the keys. Every rule that speaks of positions
(causal, windows, block, documents, ALiBi) reads the *same* one, ``i = s + offset``:

========================================== ==================================================
the spec states                            offset
========================================== ==================================================
causal ``top_left``                        0
lengths, or a static cache                 ``kv_lengths[b] - q_len`` (negative: empty rows)
a concat cache                             the past length
causal ``bottom_right``                    ``kv_len - q_len``
none of these                              0
========================================== ==================================================

(first row that applies; it is the offset of ``ai.onnx`` Attention 25, whose ``is_causal`` is
``bottom_right`` with a past or lengths and ``top_left`` without). Rotary positions of
``sequence`` kind count from the past length of the *cache* (``kv_lengths - q_len`` where it is
static), and from 0 without one, for queries and new keys alike.

The cache holds keys as they enter the product: after qk-norm and rotary.

The modules here import nothing else of the package but :mod:`mha_export.errors`, and no array
library.
"""

from __future__ import annotations

from mha_export.spec._attention import AttentionSpec, QkOutput
from mha_export.spec._cache import CacheSpec
from mha_export.spec._latent import LatentSpec
from mha_export.spec._mask import CausalAlignment, EmptyRow, Fill, MaskSpec
from mha_export.spec._norm import QkNormSpec
from mha_export.spec._projections import JointSpec, ProjectionSpec
from mha_export.spec._rotary import RotaryScaling, RotarySpec, RotaryStyle
from mha_export.spec._types import Dim, DType

__all__ = [
    "AttentionSpec",
    "CacheSpec",
    "CausalAlignment",
    "DType",
    "Dim",
    "EmptyRow",
    "Fill",
    "JointSpec",
    "LatentSpec",
    "MaskSpec",
    "ProjectionSpec",
    "QkNormSpec",
    "QkOutput",
    "RotaryScaling",
    "RotarySpec",
    "RotaryStyle",
]
