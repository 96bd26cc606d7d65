"""Small modules with attention, written after well-known repositories: for ``sweep_models``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _sweep_bodies import (
    Body,
    D,
    H,
    W,
    additive,
    alibi,
    cosine,
    cosine_learnt,
    differential,
    diffusers_block,
    fairseq,
    gated_pair_bias,
    gpt2_old,
    grouped_einsum,
    hand_softmax,
    keras,
    late_division,
    late_division_one,
    linear,
    llama2_c,
    lucidrains_vit,
    min_gpt,
    one_key_head,
    perceiver,
    performer,
    sdpa_grouped,
    set_transformer,
    softmax_one,
    softmax_one_stable,
    t5x,
    talking,
    transformer_xl,
    vae_block,
    window,
    x_transformers,
)
from torch import nn
from torch.nn import functional

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model to sweep.

    Attributes:
        make: the module, with random weights.
        inputs: its inputs at a batch and a length, in the order it takes them.
        axes: the open axes by input.
        attentions: how many sites there are; heads, kv_heads: of each, where that is one number.
        refused: how many softmaxes must be rejected with a reason.
        kept: the sites must be recognised, and kept with a reason.
        exporters: those to try, where not all.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    axes: dict[str, dict[int, str]]
    attentions: int = 1
    heads: int | None = H
    kv_heads: int | None = None
    refused: int = 0
    kept: bool = False
    exporters: tuple[str, ...] = ()
    tolerance: float = 2e-5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def flags(batch: int, length: int) -> torch.Tensor:
    """A padding mask, True where a token is; rows of two lengths."""
    kept = torch.ones(batch, length, dtype=torch.bool)
    kept[-1, length - 2 :] = False
    return kept


def sequence(batch: int, length: int) -> Inputs:
    return {"x": drawn(batch, length, W)}


def pair(batch: int, length: int) -> Inputs:
    return {"x": drawn(batch, length, W), "m": drawn(batch, length + 3, W)}


def padded(batch: int, length: int) -> Inputs:
    return {"x": drawn(batch, length, W), "mask": flags(batch, length)}


OPEN = {"x": {0: "b", 1: "s"}}
PAIR = {"x": {0: "b", 1: "s"}, "m": {0: "b", 1: "t"}}
PADDED = {"x": {0: "b", 1: "s"}, "mask": {0: "b", 1: "s"}}


class Head(nn.Module):
    """One head of Karpathy's lectures."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(W, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, length, _ = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:length, :length] == 0, float("-inf"))
        return wei.softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(H)])
        self.proj = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Static(nn.Module):
    """Keys and values written into buffers at places that a caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body(min_gpt)

    def forward(
        self, x: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, v = self.body.heads(x)
        k, v = past_k.index_copy(2, place, k), past_v.index_copy(2, place, v)
        kept = torch.arange(past_k.shape[2])[None, :] <= place[:, None]
        made = functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
        return self.body.merge(made), k, v


class OpenClip(nn.Module):
    """Length first, a causal mask of -inf in a buffer, ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(W, H)
        self.norm = nn.LayerNorm(W)
        self.register_buffer("mask", torch.full((64, 64), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(1, 0, 2)
        y, mask = self.norm(x), self.mask[: x.shape[0], : x.shape[0]]
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x.permute(1, 0, 2)


class Detr(nn.Module):
    """Positions are added to queries and keys, not to values; padding by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(W, H, batch_first=True) for _ in range(2))
        self.queries, self.place = nn.Embedding(5, W), nn.Parameter(torch.randn(1, 5, W))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        objects = self.queries.weight[None].expand(x.shape[0], -1, -1)
        q = objects + self.place
        objects = objects + self.own(q, q, value=objects)[0]
        keys = x + x.cumsum(1)
        found, _ = self.cross(objects + self.place, keys, value=x, key_padding_mask=~mask)
        return objects + found


class Whole(nn.Module):
    """``nn.Transformer``, its target causal."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(W, H, 1, 1, 48, batch_first=True)

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        mask = torch.full((m.shape[1], m.shape[1]), float("-inf")).triu(1)
        return self.model(x, m, tgt_mask=mask)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(W, H, 48, batch_first=True, norm_first=True)
        self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(x, src_key_padding_mask=~mask)


def bodied(body: Callable[..., Any], **extra: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: Body(body, **{name: make() for name, make in extra.items()})


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) / 4)


def angles() -> torch.Tensor:
    return torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(D // 2) * 2 / D))


def modules() -> Iterator[Model]:
    """All of them."""

    def plain(name: str, body: Callable[..., Any], **other: Any) -> Model:
        extra = other.pop("extra", {})
        settings = {"inputs": sequence, "axes": OPEN, **other}
        return Model(name=name, make=bodied(body, **extra), **settings)

    tril = {"bias": lambda: torch.tril(torch.ones(1, 1, 64, 64))}
    masked = {"inputs": padded, "axes": PADDED}
    yield plain("minGPT", min_gpt, extra=tril)
    yield plain("GPT-2, old", gpt2_old, extra=tril, kept=True, **masked)
    yield plain(
        "llama2.c",
        llama2_c,
        kv_heads=2,
        extra={
            "cos": lambda: angles().cos(),
            "sin": lambda: angles().sin(),
            "mask": lambda: torch.full((1, 1, 64, 64), float("-inf")).triu(1),
        },
    )
    memory = {"mem_k": parameter(1, H, 3, D), "mem_v": parameter(1, H, 3, D)}
    yield plain("x-transformers, memory", x_transformers, extra=memory, **masked)
    yield plain("vit-pytorch", lucidrains_vit)
    yield plain("PaLM-pytorch", one_key_head, kv_heads=1)
    yield plain("cosine similarity", cosine)
    scales = {"logit_scale": parameter(H, 1, 1)}
    yield plain("cosine, learnt scale", cosine_learnt, extra=scales)
    yield plain(
        "fairseq",
        fairseq,
        inputs=lambda b, s: {"x": drawn(s, b, W), "mask": flags(b, s)},
        axes={"x": {0: "s", 1: "b"}, "mask": {0: "b", 1: "s"}},
    )
    yield plain("Set Transformer, PMA", set_transformer, extra={"seeds": parameter(1, 5, W)})
    yield plain("Perceiver", perceiver, extra={"seeds": parameter(1, 5, W)})
    yield plain("T5X", t5x, extra={"table": lambda: nn.Embedding(8, H)})
    kernels = {name: parameter(W, H, D) for name in ("wq", "wk", "wv")}
    yield plain("Keras EinsumDense", keras, extra={**kernels, "wo": parameter(H, D, W)})
    yield plain("grouped einsum", grouped_einsum, kv_heads=2)
    yield plain("softmax plus one", softmax_one)
    yield plain("softmax plus one, stable", softmax_one_stable)
    yield plain("softmax by hand", hand_softmax)
    yield plain("divided last", late_division)
    yield plain("divided last, plus one", late_division_one)
    xl = {"positions": parameter(64, W), "u": parameter(H, D), "w": parameter(H, D)}
    yield plain("Transformer-XL", transformer_xl, extra=xl)
    slopes = {"slopes": lambda: 2.0 ** -torch.arange(1.0, H + 1)}
    yield plain("ALiBi", alibi, extra=slopes)
    yield plain(
        "AlphaFold, pair bias",
        gated_pair_bias,
        extra={"pairs": lambda: nn.Linear(6, H)},
        inputs=lambda b, s: {"x": drawn(b, s, W), "z": drawn(b, s, s, 6)},
        axes={"x": {0: "b", 1: "s"}, "z": {0: "b", 1: "s", 2: "s"}},
    )
    yield plain("diffusers, cross", diffusers_block, inputs=pair, axes=PAIR)
    yield plain(
        "VAE block",
        vae_block,
        heads=1,
        extra={n: lambda: nn.Conv2d(8, 8, 1) for n in ("cq", "ck", "cv", "co")},
        inputs=lambda b, s: {"x": drawn(b, 8, s, s + 1)},
        axes={"x": {0: "b", 2: "h", 3: "w"}},
    )
    yield plain("sliding window", window)
    yield plain("SDPA, enable_gqa", sdpa_grouped, kv_heads=2)
    yield Model(name="lectures' heads", make=Heads, inputs=sequence, axes=OPEN)
    yield Model(
        name="static cache, free places",
        make=Static,
        inputs=lambda b, s: {
            "x": drawn(b, s, W),
            "past_k": drawn(b, H, 12, D),
            "past_v": drawn(b, H, 12, D) + 1,
            "place": torch.arange(2, 2 + s),
        },
        axes={"x": {0: "b", 1: "s"}, "past_k": {0: "b"}, "past_v": {0: "b"}, "place": {0: "s"}},
    )
    yield Model(name="open_clip", make=OpenClip, inputs=sequence, axes=OPEN)
    yield Model(name="DETR decoder", make=Detr, attentions=2, **masked)
    yield Model(name="nn.Transformer", make=Whole, attentions=3, inputs=pair, axes=PAIR)
    yield Model(name="nn.TransformerEncoder", make=Encoder, attentions=2, **masked)
    refused = {"attentions": 0, "heads": None}
    yield plain("talking heads", talking, refused=1, extra={"mix": parameter(H, H)}, **refused)
    yield plain("differential", differential, refused=2, **refused)
    random = {"random": parameter(16, D)}
    yield plain("Performer", performer, extra=random, **refused)
    yield plain("linear (efficient)", linear, **refused)
    yield plain(
        "additive (Bahdanau)", additive, extra={"score": lambda: nn.Linear(W, 1)}, **refused
    )
