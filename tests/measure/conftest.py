"""Small whole models: an encoder with a padding mask, a decoder with a cache, by onnx_ir alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
VOCAB, WIDTH, HEADS = 19, 8, 2


class Net:
    """Appends nodes and weights; ``edit`` may replace a number by name before it is used."""

    def __init__(self, edits: dict[str, object]) -> None:
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.edits = edits
        self.stream = np.random.default_rng(5)

    def weight(self, name: str, array: np.ndarray) -> ir.Value:
        array = np.asarray(self.edits.get(name, array)).astype(array.dtype)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(array.shape),
            const_value=tensor,
        )
        self.weights.append(value)
        return value

    def random(self, name: str, *shape: int) -> ir.Value:
        return self.weight(name, self.stream.standard_normal(shape).astype(np.float32) * 0.5)

    def op(
        self, kind: str, *inputs: ir.Value, name: str | None = None, **attributes: object
    ) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes, name=name or f"{kind}_{len(self.nodes)}")
        node.outputs[0].name = f"{node.name}_out"
        self.nodes.append(node)
        return node.outputs[0]

    def heads(self, x: ir.Value, name: str) -> ir.Value:
        projected = self.op("MatMul", x, self.random(f"w_{name}", WIDTH, WIDTH))
        shape = self.weight(f"s_{name}", np.array([0, 0, HEADS, WIDTH // HEADS], dtype=np.int64))
        split = self.op("Reshape", projected, shape)
        return self.op("Transpose", split, perm=[0, 2, 1, 3])


def _input(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _model(net: Net, inputs: list[ir.Value], outputs: dict[str, ir.Value]) -> ir.Model:
    for name, value in outputs.items():
        value.name, value.type = name, ir.TensorType(FLOAT)
        value.shape = ir.Shape(["batch", "seq", WIDTH]) if name == "y" else None
    graph = ir.Graph(
        inputs,
        list(outputs.values()),
        nodes=net.nodes,
        initializers=net.weights,
        opset_imports={"": 17},
        name="net",
    )
    return ir.Model(graph, ir_version=9)


def encoder(layers: int = 2, **edits: object) -> ir.Model:
    """``ids`` [batch, seq], ``attention_mask`` [batch, seq] -> ``y`` [batch, seq, WIDTH]."""
    net = Net(edits)
    ids = _input("input_ids", INT64, "batch", "seq")
    mask = _input("attention_mask", INT64, "batch", "seq")
    x = net.op("Gather", net.random("table", VOCAB, WIDTH), ids)
    kept = net.op("Cast", mask, to=int(FLOAT))
    kept = net.op("Unsqueeze", kept, net.weight("axes", np.array([1, 2], dtype=np.int64)))
    hidden = net.op("Sub", net.weight("one", np.array(1.0, dtype=np.float32)), kept)
    bias = net.op("Mul", hidden, net.weight("fill", np.array(-1e4, dtype=np.float32)))
    for i in range(layers):
        q, k, v = (net.heads(x, f"{n}{i}") for n in "qkv")
        scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
        scaled = net.op("Mul", scores, net.weight(f"scale{i}", np.array(0.5, dtype=np.float32)))
        weights = net.op("Softmax", net.op("Add", scaled, bias), axis=-1, name=f"softmax{i}")
        context = net.op("Transpose", net.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        merged = net.op("Reshape", context, net.weight(f"m{i}", np.array([0, 0, WIDTH], np.int64)))
        x = net.op("Add", x, net.op("MatMul", merged, net.random(f"w_o{i}", WIDTH, WIDTH)))
    return _model(net, [ids, mask], {"y": x})


def decoder_inputs_only() -> ir.Model:
    """The inputs of a decoder with a cache; the graph only adds them up."""
    net = Net({})
    ids = _input("input_ids", INT64, "batch", "seq")
    mask = _input("attention_mask", INT64, "batch", "total")
    positions = _input("position_ids", INT64, "batch", "seq")
    past = _input("past_key_0", FLOAT, "batch", 2, "past", 4)
    offset = net.weight("two", np.array(2, dtype=np.int64))
    x = net.op("Gather", net.random("table", VOCAB, WIDTH), ids)
    p = net.op("Gather", net.random("places", 11, WIDTH), net.op("Add", positions, offset))
    return _model(net, [ids, mask, positions, past], {"y": net.op("Add", x, p)})


@pytest.fixture(scope="session")
def plain_encoder() -> ir.Model:
    return encoder()


@pytest.fixture(scope="session")
def make_encoder() -> Callable[..., ir.Model]:
    return encoder


@pytest.fixture(scope="session")
def cached_inputs() -> ir.Model:
    return decoder_inputs_only()
