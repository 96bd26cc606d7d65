"""Small decoders as ONNX text, each one edit from the plain one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

VOCABULARY, WIDTH, HEADS, PLACES = 24, 16, 2, 40

PLAIN = {
    "positions": """
        ids_shape = Shape(input_ids)
        one = Constant<value_int: int = 1>()
        zero = Constant<value_int: int = 0>()
        length = Gather(ids_shape, one)
        places = Range(zero, length, one)
        place_vectors = Gather(table, places)
    """,
    "hidden": "hidden = Identity(embedded)",
    "shape": """
        splits = Constant<value_ints: ints = [0, 0, 2, 8]>()
        merged = Constant<value_ints: ints = [0, 0, 16]>()
    """,
    "mask": """
        across = Unsqueeze(places, zeros)
        down = Unsqueeze(places, ones)
        sees = LessOrEqual(across, down)
        allowed = Identity(sees)
    """,
    "source": "source = Identity(hidden)",
    "after": "rows = Identity(attended)",
    "logits": "logits = MatMul(rows, head)",
}
"""The parts of a decoder; a case replaces some."""

PADDED = """
        across = Unsqueeze(places, zeros)
        down = Unsqueeze(places, ones)
        sees = LessOrEqual(across, down)
        kept = Cast<to: int = 9>(attention_mask)
        by_key = Unsqueeze(kept, middle)
        allowed = And(sees, by_key)
"""

_BODY = """
        zeros = Constant<value_ints: ints = [0]>()
        ones = Constant<value_ints: ints = [1]>()
        middle = Constant<value_ints: ints = [1, 2]>()
        token_vectors = Gather(words, input_ids)
        {positions}
        embedded = Add(token_vectors, place_vectors)
        {hidden}
        {shape}
        {source}
        q_flat = MatMul(hidden, wq)
        k_flat = MatMul(source, wk)
        v_flat = MatMul(source, wv)
        q_split = Reshape(q_flat, splits)
        k_split = Reshape(k_flat, splits)
        v_split = Reshape(v_flat, splits)
        q = Transpose<perm: ints = [0, 2, 1, 3]>(q_split)
        kt = Transpose<perm: ints = [0, 2, 3, 1]>(k_split)
        v = Transpose<perm: ints = [0, 2, 1, 3]>(v_split)
        products = MatMul(q, kt)
        scale = Constant<value_float: float = 0.3535533905932738>()
        scores = Mul(products, scale)
        {mask}
        fill = Constant<value_float: float = -1e30>()
        masked = Where(allowed, scores, fill)
        weights = Softmax<axis: int = -1>(masked)
        context = MatMul(weights, v)
        back = Transpose<perm: ints = [0, 2, 1, 3]>(context)
        flat = Reshape(back, merged)
        mixed = MatMul(flat, wo)
        attended = Add(hidden, mixed)
        {after}
        {logits}
"""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder: ``inputs`` beside the ids, the parts it has another of, its output."""

    inputs: str = ""
    parts: dict[str, str] = field(default_factory=dict)
    output: str = "float[batch, seq, 24] logits"

    def model(self) -> ir.Model:
        body = _BODY.format(**{**PLAIN, **self.parts})
        ids = "int64[batch, seq] input_ids"
        inputs = ", ".join(filter(None, (ids, self.inputs)))
        text = (
            '<ir_version: 9, opset_import: ["" : 18]>\n'
            f"decoder ({inputs}) => ({self.output}) {{ {body} }}"
        )
        proto = onnx.parser.parse_model(text)
        random = np.random.default_rng(0)
        shapes = {
            "words": (VOCABULARY, WIDTH),
            "table": (PLACES, WIDTH),
            **dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)),
            "head": (WIDTH, VOCABULARY),
            "kernel": (WIDTH, WIDTH, 3),
        }
        read = {name for node in proto.graph.node for name in node.input}
        for name, shape in shapes.items():
            if name in read:
                array = (random.standard_normal(shape) / 2).astype(np.float32)
                proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return ir.from_proto(proto)

    def saved(self, path: Path) -> Path:
        ir.save(self.model(), path)
        return path


MASKED = Decoder(
    inputs="int64[batch, seq] attention_mask",
    parts={"mask": PADDED},
)
"""With padding, as exporters of language models write it."""
