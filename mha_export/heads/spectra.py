"""What a head can do at most, from its weights alone, and what it adds, from real inputs.

``W_Q W_K^T`` [m, m] says which tokens may attend to which, ``W_V W_O`` [m, m] what is moved; both
have the rank of a head's width at most. Their singular values come from two thin QR
factorisations. With rotary embedding the first is the form at a distance of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mha_export.heads._layers import Layer
from mha_export.heads.probing import Seen

Floats = NDArray[np.float64]
TOLERANCE = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Singular values of one head's map, largest first.

    ``rank``: how many exceed the largest times the model width times the epsilon of float32 (the
    usual numerical rank). ``effective``: exp of the entropy of their shares (Roy and Vetterli
    2007).
    """

    values: tuple[float, ...]
    rank: int
    effective: float


def product_spectrum(left: Floats, right: Floats) -> Spectrum:
    """Of ``left right^T``, [m, d] and [n, d], without forming it."""
    _, r_left = np.linalg.qr(left)
    _, r_right = np.linalg.qr(right)
    values = np.linalg.svd(r_left @ r_right.T, compute_uv=False)
    top = float(values[0]) if len(values) else 0.0
    cut = top * max(len(left), len(right)) * TOLERANCE
    shares = values / values.sum() if values.sum() else np.zeros(0)
    shares = shares[shares > 0]
    return Spectrum(
        values=tuple(float(value) for value in values),
        rank=int((values > cut).sum()) if top else 0,
        effective=float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0,
    )


def query_key_spectra(layer: Layer) -> tuple[Spectrum, ...]:
    """Of each query head's ``W_Q W_K^T``; none where a projection is not known."""
    if layer.query is None or layer.key is None:
        return ()
    group = layer.spec.group
    return tuple(
        product_spectrum(layer.query.weight[:, h], layer.key.weight[:, h // group])
        for h in range(layer.heads)
    )


def value_output_spectra(layer: Layer) -> tuple[Spectrum, ...]:
    """Of each query head's ``W_V W_O``; none where a projection is not known."""
    if layer.value is None or layer.output is None:
        return ()
    group = layer.spec.group
    return tuple(
        product_spectrum(layer.value.weight[:, h // group], layer.output.weight[h].T)
        for h in range(layer.heads)
    )


@dataclass(kw_only=True)
class Contributions:
    """What each head of a layer adds to the output, ``context_i W_O,i``, batch after batch.

    Everything asked for follows from sums of products of contexts, [h * e, h * e]: no contribution
    [tokens, m] is ever formed.
    """

    layer: Layer
    tokens: float = 0.0
    sums: Floats | None = None
    products: Floats | None = None

    def add(self, seen: Seen) -> None:
        """Take in one batch, padding left out."""
        b, h, s, e = seen.context.shape
        usable = seen.batch.keep[:, :s]
        rows = seen.context.transpose(0, 2, 1, 3).reshape(b, s, h * e)[usable]
        if self.sums is None or self.products is None:
            self.sums, self.products = np.zeros(h * e), np.zeros((h * e, h * e))
        self.tokens += len(rows)
        self.sums += rows.sum(0)
        self.products += rows.T @ rows

    def norms(self) -> Floats:
        """[h]: root mean square over tokens of the length of a head's contribution."""
        products, weight = self._products(), self._weight()
        h, e = weight.shape[:2]
        blocks = products.reshape(h, e, h, e)
        found = [np.einsum("ij,im,jm->", blocks[i, :, i], weight[i], weight[i]) for i in range(h)]
        lengths: Floats = np.sqrt(np.maximum(np.array(found) / max(self.tokens, 1.0), 0.0))
        return lengths

    def mean(self) -> Floats:
        """[m]: the mean over tokens of what all heads together add."""
        weight = self._weight()
        assert self.sums is not None
        total: Floats = self.sums @ weight.reshape(-1, weight.shape[-1])
        return total / max(self.tokens, 1.0)

    def similarity(self) -> Floats:
        """[h, h]: linear CKA of the heads' contributions over tokens (Kornblith et al. 2019).

        ``|X_i^T X_j|_F^2 / (|X_i^T X_i|_F |X_j^T X_j|_F)`` of centred contributions: 1 where two
        heads say the same up to a rotation, 0 where they have nothing in common.
        """
        weight = self._weight()
        h, e = weight.shape[:2]
        assert self.sums is not None
        centred = self._products() - np.outer(self.sums, self.sums) / max(self.tokens, 1.0)
        blocks = centred.reshape(h, e, h, e)
        inner = np.einsum("iem,ifm->ief", weight, weight)
        found = np.empty((h, h))
        for i in range(h):
            for j in range(i, h):
                between = blocks[i, :, j]
                found[i, j] = found[j, i] = np.einsum(
                    "ab,bc,dc,ad->", between, inner[j], between, inner[i]
                )
        scale = np.sqrt(np.maximum(np.diag(found), 0.0))
        scale = np.where(scale > 0, scale, 1.0)
        alike: Floats = found / np.outer(scale, scale)
        return alike

    def _weight(self) -> Floats:
        assert self.layer.output is not None
        return self.layer.output.weight

    def _products(self) -> Floats:
        assert self.products is not None
        return self.products
