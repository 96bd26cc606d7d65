"""The presets at toy width: what golden graphs and rows of the conformance matrix are made of."""

from __future__ import annotations

from dataclasses import replace

from mha_export.spec import AttentionSpec, MaskSpec

CHOSEN = (
    # preset, form, opset: one of each form, and each way a form says something differently
    ("bert-base", "primitive", 13),
    ("bert-base", "onnx", 23),
    ("bert-base", "ort-mha", 17),
    ("bert-base", "ort-attention", 17),
    ("gpt2", "onnx", 23),
    ("gpt2", "ort-mha", 17),
    ("llama-3-8b", "primitive", 18),
    ("llama-3-8b", "onnx", 23),
    ("llama-3-8b", "ort-gqa", 21),
    ("mistral-7b", "onnx", 25),
    ("mistral-7b", "ort-gqa", 21),
    ("llama-3-8b", "grouped", 24),
    ("textbook-512x8", "tiled", 13),
    ("qwen3-8b", "onnx", 23),
    ("gemma-2-9b", "ort-gqa", 21),
    ("gpt-oss-20b", "onnx", 24),
    ("gpt-oss-20b", "ort-gqa", 21),
    ("t5-base", "onnx", 23),
    ("whisper-base-cross", "onnx", 23),
    ("bloom-560m", "ort-mha", 17),
    ("vit-b16", "trt", 17),
    ("textbook-512x8", "portable", 18),
    ("sd3-joint", "trt", 17),
    ("deepseek-v3-mla", "onnx", 23),
    ("deepseek-v3-mla-absorbed", "primitive", 18),
)


def reduced(spec: AttentionSpec) -> AttentionSpec:
    """The same attention at toy width: ratios, dtypes and features kept, numbers made small."""
    kv_heads = min(spec.kv_heads, 2)
    group = min(spec.group, 2)
    q_heads = kv_heads * group
    changes: dict[str, object] = {"q_heads": q_heads, "kv_heads": kv_heads}
    # An explicit scale stays the number it is: it states the model, not the width.
    head_dim, rotary_dim = 16, None
    if spec.rotary is not None:
        part = spec.rotary.dim / spec.head_dim
        rotary_dim = 16 if part == 1 else max(4, int(16 * part) // 4 * 4)
    latent = spec.latent
    if latent is not None:
        latent = replace(latent, kv_rank=8, nope_dim=8, rope_dim=4)
        latent = replace(latent, q_rank=latent.q_rank and 12, v_dim=latent.v_dim and 6)
        changes |= {"latent": latent, "q_heads": 2, "kv_heads": 1 if latent.absorbed else 2}
        head_dim = 12
        changes["v_head_dim"] = 8 if latent.absorbed else 6
        rotary_dim = 4
    elif spec.v_head_dim is not None:
        changes["v_head_dim"] = 16 if spec.v_head_dim == spec.head_dim else 8
    changes["head_dim"] = head_dim
    if spec.rotary is not None:
        changes["rotary"] = replace(spec.rotary, dim=rotary_dim, max_positions=4)
    if spec.projections is not None:
        width = 24
        kv_width = None if spec.projections.kv_d_model is None else 20
        projections = replace(spec.projections, d_model=width, kv_d_model=kv_width)
        if projections.joint is not None:
            # Of another width than the first, so that the two cannot be taken for each other.
            projections = replace(projections, joint=replace(projections.joint, d_model=20))
        changes["projections"] = projections
    changes["mask"] = _reduced_mask(spec.mask, spec.q_heads, q_heads)
    return spec.replace(**changes)


def _reduced_mask(mask: MaskSpec, from_heads: int, to_heads: int) -> MaskSpec:
    changes: dict[str, object] = {}
    if mask.alibi_slopes is not None:
        changes["alibi_slopes"] = mask.alibi_slopes[:to_heads]
    for name in ("keep", "bias"):
        shape = getattr(mask, name)
        if shape is not None:
            changes[name] = tuple(to_heads if size == from_heads else size for size in shape)
    for name in ("left_window", "right_window"):
        if getattr(mask, name) is not None:
            changes[name] = min(getattr(mask, name), 3)
    return replace(mask, **changes)
