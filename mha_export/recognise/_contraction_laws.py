"""Shapes of the ops that multiply matrices: MatMul and its kin, Gemm, Einsum, attention."""

from __future__ import annotations

from collections.abc import Sequence

from mha_export.recognise._shape_laws import Facts, Law, Shape, broadcast


def _matmul_shape(
    left: Shape | None, right: Shape | None, conflicts: list[tuple[int, int]]
) -> Shape | None:
    if left is None or right is None or not left or not right:
        return None
    if len(left) == 1 or len(right) == 1:
        return left[:-1] if len(right) == 1 else right[:-2] + right[-1:]
    inner = (left[-1], right[-2])
    if None not in inner and inner[0] != inner[1]:
        conflicts.append((inner[0] or 0, inner[1] or 0))
    lead_dims = broadcast([left[:-2], right[:-2]], conflicts)
    return None if lead_dims is None else (*lead_dims, left[-2], right[-1])


def _matmul(facts: Facts) -> Sequence[Shape | None]:
    return (_matmul_shape(facts.shapes[0], facts.shapes[1], facts.conflicts),)


def swap_last(shape: Shape | None) -> Shape | None:
    """The shape with its two last axes exchanged."""
    return None if shape is None else (*shape[:-2], shape[-1], shape[-2])


def _fused_matmul(facts: Facts) -> Sequence[Shape | None]:
    left, right = facts.shapes[0], facts.shapes[1]
    left = swap_last(left) if facts.attributes.get("transA", 0) else left
    right = swap_last(right) if facts.attributes.get("transB", 0) else right
    return (_matmul_shape(left, right, facts.conflicts),)


def _quantised_matmul(facts: Facts) -> Sequence[Shape | None]:
    return (_matmul_shape(facts.shapes[0], facts.shapes[3], facts.conflicts),)


def _matmul_nbits(facts: Facts) -> Sequence[Shape | None]:
    left = facts.shapes[0]
    return (None if left is None else (*left[:-1], facts.attributes.get("N")),)


def _gemm(facts: Facts) -> Sequence[Shape | None]:
    return _fused_matmul(facts)


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[str], str] | None:
    """Operand labels and output labels, an ellipsis spelled out in capitals; None where odd."""
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        return None
    extra = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    most = max([n for n, term in zip(extra, terms, strict=True) if "..." in term], default=0)
    names = [label for label in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if label not in text][:most]
    filled = []
    for term, count in zip(terms, extra, strict=True):
        if "..." in term:
            term = term.replace("...", "".join(names[len(names) - count :]))
        elif count:
            return None
        filled.append(term)
    if not arrow:
        letters = sorted(set("".join(filled)) - set(names))
        out = "".join(names) + "".join(x for x in letters if "".join(filled).count(x) == 1)
    return filled, out.replace("...", "".join(names))


def _einsum(facts: Facts) -> Sequence[Shape | None]:
    shapes = [shape for shape in facts.shapes if shape is not None]
    if len(shapes) != len(facts.shapes):
        return (None,)
    terms = einsum_terms(facts.attributes["equation"], [len(shape) for shape in shapes])
    if terms is None:
        return (None,)
    sizes: dict[str, int | None] = {}
    for term, shape in zip(terms[0], shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            if sizes.get(label) in (None, 1):
                sizes[label] = size
            elif size not in (None, 1) and size != sizes[label]:
                facts.conflicts.append((sizes[label] or 0, size or 0))
    return (tuple(sizes.get(label) for label in terms[1]),)


def _attention(facts: Facts) -> Sequence[Shape | None]:
    """``ai.onnx`` Attention 23 and up; present tensors and scores beside the output."""
    if "num_heads" in facts.attributes:
        return _projecting_attention(facts)
    query, key, value = (
        (facts.shapes + [None] * 3)[:3]
        if isinstance(facts.shapes, list)
        else (tuple(facts.shapes) + (None,) * 3)[:3]
    )
    if query is None or key is None or value is None:
        return (None,) * facts.outputs
    if len(query) == 4:
        heads, kv_heads = query[1], key[1]
        output: Shape = (*query[:3], value[3])
        batch, q_len, new, width, value_width = (query[0], query[2], key[2], key[3], value[3])
    else:
        heads = facts.attributes.get("q_num_heads")
        kv_heads = facts.attributes.get("kv_num_heads")
        if heads is None or kv_heads is None or key[2] is None or value[2] is None:
            return (None,) * facts.outputs
        batch, q_len, new = query[0], query[1], key[1]
        width, value_width = key[2] // kv_heads, value[2] // kv_heads
        output = (batch, q_len, heads * value_width)
    past = facts.shapes[4] if len(facts.shapes) > 4 else None
    total = new
    if past is not None:
        total = None if new is None or past[2] is None else new + past[2]
    return [
        output,
        (batch, kv_heads, total, width),
        (batch, kv_heads, total, value_width),
        (batch, heads, q_len, total),
    ][: facts.outputs]


def _projecting_attention(facts: Facts) -> Sequence[Shape | None]:
    """``com.microsoft`` Attention: [b, s, width of the values], from the hidden states."""
    hidden, weights = facts.shapes[0], facts.shapes[1]
    rest: list[Shape | None] = [None] * (facts.outputs - 1)
    if hidden is None or weights is None or weights[1] is None:
        return [None, *rest]
    sizes = facts.attributes.get("qkv_hidden_sizes")
    return [(*hidden[:2], sizes[2] if sizes else weights[1] // 3), *rest]


def _microsoft_attention(facts: Facts) -> Sequence[Shape | None]:
    """The first output of contrib attention ops is shaped like the query, as wide as the value."""
    query = facts.shapes[0]
    rest: list[Shape | None] = [None] * (facts.outputs - 1)
    if query is not None and len(query) == 3:
        value = facts.shapes[2] if len(facts.shapes) > 2 else None
        wide = value[2] if value is not None and len(value) == 3 else query[2]
        return [(query[0], query[1], wide), *rest]
    return [None, *rest]


def _group_query_attention(facts: Facts) -> Sequence[Shape | None]:
    """[b, s, h * d]; a present is as long as the queries where there is no past."""
    shapes = [*facts.shapes, None, None, None, None]
    query, key, past = shapes[0], shapes[1], shapes[3]
    heads, kv_heads = facts.attributes["num_heads"], facts.attributes["kv_num_heads"]
    rest: list[Shape | None] = [None] * (facts.outputs - 1)
    if query is None or len(query) != 3 or query[2] is None:
        return [None, *rest]
    width = query[2] // (heads if key is not None else heads + 2 * kv_heads)
    present = (query[0], kv_heads, query[1] if past is None else None, width)
    output: Shape = (query[0], query[1], heads * width)
    return [output, present, present, None][: facts.outputs]


CONTRACTIONS: dict[str, Law] = {
    "Attention": _attention,
    "Einsum": _einsum,
    "FusedMatMul": _fused_matmul,
    "Gemm": _gemm,
    "GroupQueryAttention": _group_query_attention,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MatMulNBits": _matmul_nbits,
    "MultiHeadAttention": _microsoft_attention,
    "QLinearMatMul": _quantised_matmul,
}
