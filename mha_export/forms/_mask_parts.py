"""Which parts the mask of a spec has: what hides a pair, and what is added to its score."""

from __future__ import annotations

from mha_export.spec import AttentionSpec, Dim, MaskSpec

PAIRWISE_PARTS = frozenset({"causal", "left_window", "right_window", "block", "documents"})
"""Parts that compare each query's position with each key's: their tensor is [.., s, t]."""


def hiding_parts(spec: AttentionSpec) -> frozenset[str]:
    """Names of the parts of a spec that can forbid a pair."""
    mask = spec.mask
    present = {
        "causal": mask.causal is not None,
        "left_window": mask.left_window is not None,
        "right_window": mask.right_window is not None,
        "keep": mask.keep is not None,
        "padding": mask.padding,
        "lengths": spec.uses_lengths,
        "block": mask.block is not None,
        "documents": mask.documents,
        "bias": mask.bias is not None and may_be_shorter(mask.bias, spec),
    }
    return frozenset(name for name, here in present.items() if here)


def added_parts(mask: MaskSpec) -> tuple[str, ...]:
    """Names of the parts that are added to the scores."""
    return tuple(
        name
        for name, here in (
            ("bias", mask.bias is not None),
            ("alibi", mask.alibi_slopes is not None),
        )
        if here
    )


def may_be_shorter(shape: tuple[Dim, ...], spec: AttentionSpec) -> bool:
    """Whether a mask operand's last axis may hold fewer keys than there are."""
    return shape[-1] != spec.kv_len
