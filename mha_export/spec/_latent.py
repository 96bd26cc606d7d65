"""Multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2): keys and values expand from one latent vector.

    Each head's key is ``nope_dim`` channels expanded from the latent and ``rope_dim`` rotated
    channels shared by all heads; ``head_dim = nope_dim + rope_dim``.

    Attributes:
        kv_rank: width of the latent kept in the cache.
        q_rank: width of the query latent, or None for a direct projection.
        absorbed: the expansion is folded into query and output, attention runs over the latent
            (equal in exact arithmetic; kv_heads is then 1, value_source a prefix of K).
        v_dim: width of one expanded value head when absorbed (``v_head_dim`` is then kv_rank).
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    q_rank: int | None = None
    absorbed: bool = False
    v_dim: int | None = None
