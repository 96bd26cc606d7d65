"""Multi-head attention as textbooks write it in PyTorch, and the same in numpy.

    mha-export check docs/examples/classic_attention.py:example --trust-code -o out

Vaswani et al., "Attention Is All You Need" (2017), section 3.2: four linear layers, heads split by
``view(b, n, h, d_k).transpose(1, 2)``, and

    softmax(Q Kᵀ / sqrt(d_k)) V
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """Inputs [b, n, d_model] and [b, m, d_model]; output [b, n, d_model].

    ``mask`` [b, 1, n, m] or anything that broadcasts to it: 0 hides a key.
    """

    def __init__(self, d_model: int = 512, heads: int = 8) -> None:
        super().__init__()
        if d_model % heads:
            raise ValueError(f"d_model {d_model} is not a multiple of heads {heads}")
        self.heads = heads
        self.d_k = d_model // heads
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.W_O = nn.Linear(d_model, d_model)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = self.split(self.W_Q(query))
        k = self.split(self.W_K(key))
        v = self.split(self.W_V(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        context = torch.softmax(scores, dim=-1) @ v
        b, _, n, _ = context.shape
        return self.W_O(context.transpose(1, 2).contiguous().view(b, n, self.heads * self.d_k))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        return x.view(b, n, self.heads, self.d_k).transpose(1, 2)


def numpy_attention(
    module: MultiHeadAttention,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """The same arithmetic with the module's weights, in float64."""

    def linear(layer: nn.Linear, x: np.ndarray) -> np.ndarray:
        weight = layer.weight.detach().numpy().astype(np.float64)
        return x @ weight.T + layer.bias.detach().numpy()

    def split(x: np.ndarray) -> np.ndarray:
        b, n, _ = x.shape
        return x.reshape(b, n, module.heads, module.d_k).transpose(0, 2, 1, 3)

    q = split(linear(module.W_Q, query))
    k = split(linear(module.W_K, key))
    v = split(linear(module.W_V, value))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(module.d_k)
    if mask is not None:
        scores = np.where(mask == 0, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    context = (weights @ v).transpose(0, 2, 1, 3)
    return linear(module.W_O, context.reshape(*context.shape[:2], -1))


def example() -> tuple[MultiHeadAttention, dict[str, torch.Tensor]]:
    """The module with seeded weights, and inputs to export it with."""
    torch.manual_seed(0)
    module = MultiHeadAttention()
    return module, {
        "query": torch.randn(2, 5, 512),
        "key": torch.randn(2, 7, 512),
        "value": torch.randn(2, 7, 512),
    }
