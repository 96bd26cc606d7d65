"""Attentions after well-known repositories, as functions of a module with four projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

W, H, D = 32, 4, 8
"""Width, heads and channels of a head."""


class Body(nn.Module):
    """Projections, and a function that is given."""

    def __init__(self, body: Callable[..., Any], **extra: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, W) for _ in range(4))
        self.packed = nn.Linear(W, 3 * W, bias=False)
        self.body = body
        for name, value in extra.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.body(self, *inputs)

    def heads(self, x: torch.Tensor, m: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        other = x if m is None else m
        return tuple(split(t) for t in (self.q(x), self.k(other), self.v(other)))

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(x.transpose(1, 2).reshape(x.shape[0], -1, W))


def split(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], H, D).transpose(1, 2)


def min_gpt(own: Body, x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    q, k, v = own.heads(x)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(own.bias[:, :, :length, :length] == 0, float("-inf"))
    return own.merge(att.softmax(-1) @ v)


def gpt2_old(own: Body, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``where(causal, w, -1e4)``, then padding is added."""
    q, k, v = own.heads(x)
    w = q @ k.transpose(-1, -2) / math.sqrt(D)
    seen = own.bias[:, :, : x.shape[1], : x.shape[1]].bool()
    w = torch.where(seen, w, torch.tensor(-1e4))
    w = w + (1.0 - mask[:, None, None, :].float()) * -10000.0
    return own.merge(w.softmax(-1) @ v)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """llama2.c's rotation: pairs, real and imaginary."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    out = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return out.flatten(3)


def llama2_c(own: Body, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    q = own.q(x).view(batch, length, H, D)
    k, v = (f(x)[..., : 2 * D].reshape(batch, length, 2, D) for f in (own.k, own.v))
    cos, sin = own.cos[:length], own.sin[:length]
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    k, v = (
        t[:, :, :, None, :].expand(batch, length, 2, 2, D).reshape(batch, length, H, D)
        for t in (k, v)
    )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
    scores = scores + own.mask[:, :, :length, :length]
    weights = functional.softmax(scores.float(), dim=-1).type_as(q)
    return own.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, -1))


def x_transformers(own: Body, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Learnt keys and values before the others, a mask padded for them."""
    q, k, v = own.heads(x)
    mem_k, mem_v = (t.expand(x.shape[0], -1, -1, -1) for t in (own.mem_k, own.mem_v))
    k, v = torch.cat((mem_k, k), dim=-2), torch.cat((mem_v, v), dim=-2)
    dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
    kept = functional.pad(mask[:, None, None, :], (3, 0), value=True)
    dots = dots.masked_fill(~kept, -torch.finfo(dots.dtype).max)
    out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(-1, dtype=torch.float32), v)
    return own.merge(out)


def lucidrains_vit(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (split(t) for t in own.packed(x).chunk(3, dim=-1))
    attn = (torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5).softmax(dim=-1)
    return own.merge(torch.einsum("bhij,bhjd->bhid", attn, v))


def one_key_head(own: Body, x: torch.Tensor) -> torch.Tensor:
    """PaLM-like: one key/value head, without its axis."""
    q = split(own.q(x)) * D**-0.5
    k, v = own.k(x)[..., :D], own.v(x)[..., :D]
    sim = torch.einsum("b h i d, b j d -> b h i j", q, k)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    sim = sim.masked_fill(hidden, -torch.finfo(sim.dtype).max)
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    return own.merge(torch.einsum("b h i j, b j d -> b h i d", sim.softmax(-1), v))


def cosine(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Similarity of unit vectors, times ten."""
    q, k, v = own.heads(x)
    q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
    return own.merge((torch.einsum("bhid,bhjd->bhij", q, k) * 10.0).softmax(-1) @ v)


def cosine_learnt(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Similarity of unit vectors, times a learnt number a head, at most 100 (Swin v2)."""
    q, k, v = own.heads(x)
    attn = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
    attn = attn * torch.clamp(own.logit_scale, max=math.log(1.0 / 0.01)).exp()
    return own.merge(attn.softmax(-1) @ v)


def fairseq(own: Body, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[length, batch, width]; heads in the batch; padding put in between two views."""
    length, batch, _ = x.shape

    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().view(-1, batch * H, D).transpose(0, 1)

    q, k, v = cut(own.q(x) * D**-0.5), cut(own.k(x)), cut(own.v(x))
    weights = torch.bmm(q, k.transpose(1, 2)).view(batch, H, length, length)
    weights = weights.masked_fill(~mask[:, None, None, :], float("-inf"))
    weights = weights.view(batch * H, length, length).float().softmax(-1)
    out = torch.bmm(weights, v).transpose(0, 1).contiguous().view(length, batch, W)
    return own.o(out)


def set_transformer(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Pooling by attention: learnt seeds; heads split off and put into the batch, outermost."""
    q = own.q(own.seeds.repeat(x.size(0), 1, 1))
    k, v = own.k(x), own.v(x)
    q_, k_, v_ = (torch.cat(t.split(D, 2), 0) for t in (q, k, v))
    weights = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(W), 2)
    out = torch.cat((q_ + weights.bmm(v_)).chunk(H, 0), 2)
    return out + functional.relu(own.o(out))


def perceiver(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Learnt latents look at the input; keys and values in one projection."""
    latents = own.seeds.expand(x.shape[0], -1, -1)
    k, v = own.packed(x)[..., : 2 * W].chunk(2, dim=-1)
    q, k, v = (
        t.reshape(t.shape[0], -1, H, D).permute(0, 2, 1, 3).reshape(-1, t.shape[1], D)
        for t in (own.q(latents), k, v)
    )
    attn = (torch.einsum("b i d, b j d -> b i j", q, k) * D**-0.5).softmax(dim=-1)
    out = torch.einsum("b i j, b j d -> b i d", attn, v)
    out = out.reshape(x.shape[0], H, -1, D).permute(0, 2, 1, 3).reshape(x.shape[0], -1, W)
    return own.o(out)


def bucketed(length: int, other: int) -> torch.Tensor:
    """T5's buckets of relative positions, both ways, 8 of them."""
    far = torch.arange(other)[None, :] - torch.arange(length)[:, None]
    bucket = (far > 0).long() * 4
    far = far.abs()
    large = 2 + (torch.log(far.clamp(min=1).float() / 2) / math.log(8 / 2) * 2).long()
    return bucket + torch.where(far < 2, far, large.clamp(max=3))


def t5x(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (f(x).view(*x.shape[:2], H, D) for f in (own.q, own.k, own.v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    bias = own.table(bucketed(x.shape[1], x.shape[1])).permute(2, 0, 1)[None]
    weights = torch.softmax(scores + bias, -1)
    return own.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], W))


def keras(own: Body, x: torch.Tensor) -> torch.Tensor:
    """EinsumDense in and out, kernels of three axes."""
    q, k, v = (torch.einsum("abc,cde->abde", x, w) for w in (own.wq, own.wk, own.wv))
    scores = torch.einsum("aecd,abcd->acbe", k, q * (1.0 / math.sqrt(D)))
    made = torch.einsum("acbe,aecd->abcd", scores.softmax(-1), v)
    return torch.einsum("abcd,cde->abe", made, own.wo)


def grouped_einsum(own: Body, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    q = own.q(x).view(batch, length, 2, 2, D)
    k, v = (f(x)[..., : 2 * D].reshape(batch, length, 2, D) for f in (own.k, own.v))
    sim = torch.einsum("b n h g d, b s h d -> b h g n s", q, k) * D**-0.5
    out = torch.einsum("b h g n s, b s h d -> b n h g d", sim.softmax(-1), v)
    return own.o(out.reshape(batch, length, W))


def softmax_one(own: Body, x: torch.Tensor) -> torch.Tensor:
    """``exp(x) / (1 + sum exp(x))``: a key of score 0 that holds nothing."""
    q, k, v = own.heads(x)
    e = torch.exp(q @ k.transpose(-1, -2) * D**-0.5)
    return own.merge(e / (1 + e.sum(-1, keepdim=True)) @ v)


def softmax_one_stable(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    scores = q @ k.transpose(-1, -2) * D**-0.5
    most = scores.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(scores - most)
    return own.merge(e / (torch.exp(-most) + e.sum(-1, keepdim=True)) @ v)


def late_division(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    scores = q @ k.transpose(-1, -2) * D**-0.5
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return own.merge((e @ v) / e.sum(-1, keepdim=True))


def late_division_one(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    e = torch.exp(q @ k.transpose(-1, -2) * D**-0.5)
    return own.merge((e @ v) / (1.0 + e.sum(-1, keepdim=True)))


def hand_softmax(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    scores = q @ k.transpose(-1, -2) * D**-0.5
    e = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return own.merge(e / (e.sum(-1, keepdim=True) + 1e-9) @ v)


def transformer_xl(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Content and position scores, the latter shifted by a pad and two views."""
    batch, length, _ = x.shape
    q, k, v = own.heads(x)
    r = own.k(own.positions[:length]).view(length, H, D).permute(1, 0, 2)
    ac = (q + own.u[:, None]) @ k.transpose(-1, -2)
    bd = (q + own.w[:, None]) @ r.transpose(-1, -2)
    bd = functional.pad(bd, (1, 0)).view(batch, H, length + 1, length)[:, :, 1:]
    scores = (ac + bd) * D**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return own.merge(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)


def alibi(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    far = torch.arange(x.shape[1])[None, :] - torch.arange(x.shape[1])[:, None]
    scores = q @ k.transpose(-1, -2) * D**-0.5 + own.slopes[:, None, None] * far
    return own.merge(scores.masked_fill(far > 0, float("-inf")).softmax(-1) @ v)


def gated_pair_bias(own: Body, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """AlphaFold-like: a bias from a pair representation, the context gated a head."""
    q, k, v = own.heads(x)
    bias = own.pairs(z).permute(0, 3, 1, 2)
    made = ((q * D**-0.5) @ k.transpose(-1, -2) + bias).softmax(-1) @ v
    gate = torch.sigmoid(own.packed(x)[..., :W]).view(*x.shape[:2], H, D)
    return own.o((made.transpose(1, 2) * gate).reshape(*x.shape[:2], W))


def diffusers_block(own: Body, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Batch merged into heads, ``baddbmm`` with an empty bias."""

    def cut(t: torch.Tensor) -> torch.Tensor:
        t = t.reshape(t.shape[0], t.shape[1], H, D).permute(0, 2, 1, 3)
        return t.reshape(t.shape[0] * H, t.shape[2], D)

    q, k, v = cut(own.q(x)), cut(own.k(m)), cut(own.v(m))
    empty = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5)
    made = torch.bmm(scores.softmax(-1), v).reshape(x.shape[0], H, -1, D)
    return own.o(made.permute(0, 2, 1, 3).reshape(x.shape[0], -1, W))


def vae_block(own: Body, x: torch.Tensor) -> torch.Tensor:
    """One head over the pixels of an image, channels first."""
    b, c, h, w = x.shape
    q = own.cq(x).reshape(b, c, h * w).permute(0, 2, 1)
    k = own.ck(x).reshape(b, c, h * w)
    weights = (torch.bmm(q, k) * c**-0.5).softmax(dim=2).permute(0, 2, 1)
    made = torch.bmm(own.cv(x).reshape(b, c, h * w), weights)
    return x + own.co(made.reshape(b, c, h, w))


def window(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Mistral-like: causal, four keys at most."""
    q, k, v = own.heads(x)
    i = torch.arange(x.shape[1])
    kept = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - 4)
    return own.merge(functional.scaled_dot_product_attention(q, k, v, attn_mask=kept))


def sdpa_grouped(own: Body, x: torch.Tensor) -> torch.Tensor:
    q = split(own.q(x))
    k, v = (f(x)[..., : 2 * D].reshape(*x.shape[:2], 2, D).transpose(1, 2) for f in (own.k, own.v))
    made = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return own.merge(made)


def talking(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    scores = torch.einsum("bhij,hg->bgij", q @ k.transpose(-1, -2) * D**-0.5, own.mix)
    return own.merge(scores.softmax(-1) @ v)


def differential(own: Body, x: torch.Tensor) -> torch.Tensor:
    q, k, v = own.heads(x)
    q1, q2 = (q[..., : D // 2], q[..., D // 2 :])
    k1, k2 = (k[..., : D // 2], k[..., D // 2 :])
    one, two = ((a @ b.transpose(-1, -2)).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
    return own.merge((one - 0.5 * two) @ v)


def performer(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Random features of an exponential kernel; no weights are ever made."""
    q, k, v = own.heads(x)

    def features(t: torch.Tensor) -> torch.Tensor:
        projected = t * D**-0.25 @ own.random.T
        size = (t * D**-0.25).square().sum(-1, keepdim=True) / 2
        return torch.exp(projected - size - projected.amax((-1, -2), keepdim=True)) + 1e-4

    q, k = features(q), features(k)
    scale = 1.0 / torch.einsum("bhnd,bhd->bhn", q, k.sum(-2))
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    return own.merge(torch.einsum("bhde,bhnd,bhn->bhne", context, q, scale))


def linear(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Efficient attention: queries over channels, keys over the length."""
    q, k, v = own.heads(x)
    context = k.softmax(-2).transpose(-1, -2) @ v
    return own.merge((q.softmax(-1) * D**-0.5) @ context)


def additive(own: Body, x: torch.Tensor) -> torch.Tensor:
    """Bahdanau's: scores from a tanh of sums."""
    q, k = own.q(x), own.k(x)
    scores = own.score(torch.tanh(q[:, :, None] + k[:, None, :])).squeeze(-1)
    return own.o(scores.softmax(-1) @ own.v(x))
