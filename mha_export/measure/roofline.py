"""How far from the limit: the work of a model, and what the same target reaches on plain graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.targets import CompileOptions, Limits, Program, TargetWorker

GEMM_SIZE = 1024
COPY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one run has to do: products only, and every weight, input and output moved once."""

    flops: float
    nbytes: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a target reaches on a large GEMM and on a large element-wise copy."""

    gemm_gflops: float | None = None
    copy_gbytes_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achieved rates; ``fraction`` is the least time the limits allow over the time taken."""

    gflops: float
    gbytes_s: float
    fraction: float | None


def work_of(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Work | None:
    """Count products by running ``model`` once on the reference evaluator.

    None where that evaluator cannot run it: a contrib op, or inputs it refuses.
    """
    from mha_export.targets.reference import evaluator_for

    try:
        reference = evaluator_for(model)
        count = [0.0]
        for node in reference.rt_nodes_:
            node.run = partial(_counted, node.run, node, count)
        with np.errstate(all="ignore"):
            outputs = reference.run(None, {n: inputs[n] for n in reference.input_names})
    except Exception:  # whatever the evaluator raises: the work is then not known
        return None
    weights = sum(
        v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None
    )
    moved = sum(np.asarray(array).nbytes for array in (*inputs.values(), *outputs))
    return Work(flops=count[0], nbytes=float(weights + moved))


def rates(work: Work, p50_ms: float, ceilings: Ceilings) -> Rates:
    """Rates of a median, and how near the nearer of the two limits it is."""
    seconds = p50_ms / 1e3
    least = [
        amount / (limit * 1e9)
        for amount, limit in (
            (work.flops, ceilings.gemm_gflops),
            (work.nbytes, ceilings.copy_gbytes_s),
        )
        if limit
    ]
    return Rates(
        gflops=work.flops / seconds / 1e9,
        gbytes_s=work.nbytes / seconds / 1e9,
        fraction=max(least) / seconds if least else None,
    )


def ceilings_of(
    target: str,
    *,
    precision: str | None = None,
    threads: int | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
    limits: Limits | None = None,
) -> Ceilings:
    """Run a GEMM and a copy on the target itself. A graph it refuses leaves its figure out."""
    n = GEMM_SIZE
    elements = int(COPY_BYTES // dtype.itemsize)
    gemm_ms = _best_ms(target, precision, threads, _gemm(n, dtype), limits)
    copy_ms = _best_ms(target, precision, threads, _copy(elements, dtype), limits)
    moved = 2.0 * elements * dtype.itemsize
    return Ceilings(
        gemm_gflops=None if gemm_ms is None else 2.0 * n**3 / gemm_ms / 1e6,
        copy_gbytes_s=None if copy_ms is None else moved / copy_ms / 1e6,
    )


def _best_ms(
    target: str,
    precision: str | None,
    threads: int | None,
    model: ir.Model,
    limits: Limits | None,
) -> float | None:
    (value,) = model.graph.inputs
    assert value.shape is not None
    assert value.dtype is not None
    shape = tuple(int(d) for d in value.shape)  # type: ignore[arg-type]
    array = np.random.default_rng(0).standard_normal(shape).astype(value.dtype.numpy())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "ceiling.onnx"
        ir.save(model, path)
        with TargetWorker(target, limits=limits) as worker:
            options = CompileOptions(
                precision=precision, threads=threads, workdir=Path(folder) / "built"
            )
            if not worker.compile(Program(graphs={"main": path}), options).ok:
                return None
            outcome = worker.time({value.name or "": array}, repeats=20, warmup=3)
            return min(outcome.value) if outcome.ok and outcome.value else None


def _gemm(n: int, dtype: ir.DataType) -> ir.Model:
    weight = np.random.default_rng(1).standard_normal((n, n)).astype(dtype.numpy())
    tensor = ir.tensor(weight, name="w")
    w = ir.Value(name="w", type=ir.TensorType(dtype), shape=ir.Shape((n, n)), const_value=tensor)
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape((n, n)))
    node = ir.node("MatMul", [x, w])
    return _single(node, x, (n, n), dtype, [w])


def _copy(elements: int, dtype: ir.DataType) -> ir.Model:
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape((elements,)))
    return _single(ir.node("Neg", [x]), x, (elements,), dtype, [])


def _single(
    node: ir.Node, x: ir.Value, shape: tuple[int, ...], dtype: ir.DataType, weights: list[ir.Value]
) -> ir.Model:
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(dtype), ir.Shape(shape)
    graph = ir.Graph(
        [x], [y], nodes=[node], initializers=weights, opset_imports={"": 17}, name="ceiling"
    )
    return ir.Model(graph, ir_version=9)


def _counted(
    run: Callable[..., Any], node: Any, count: list[float], *inputs: Any, **settings: Any
) -> Any:
    outputs = run(*inputs, **settings)
    count[0] += _flops(node, inputs, outputs)
    return outputs


def _flops(node: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> float:
    """Two for each multiply-add."""
    size = float(np.asarray(outputs[0]).size)
    if node.op_type == "MatMul":
        return 2.0 * size * float(inputs[0].shape[-1])
    if node.op_type == "Gemm":
        return 2.0 * size * float(inputs[0].shape[0 if getattr(node, "transA", 0) else 1])
    if node.op_type == "Conv":
        return 2.0 * size * float(np.prod(inputs[1].shape[1:]))
    if node.op_type == "Einsum":
        return 2.0 * _einsum_points(node.equation, inputs)
    if node.op_type == "Attention":
        keys = np.asarray(outputs[1]).shape[2] if len(outputs) > 1 and outputs[1] is not None else 0
        keys = keys or inputs[1].shape[-2]
        return 4.0 * size * float(keys)
    return 0.0


def _einsum_points(equation: str, inputs: tuple[Any, ...]) -> float:
    sizes: dict[str, int] = {}
    terms = equation.replace(" ", "").split("->")[0].split(",")
    for term, array in zip(terms, inputs, strict=True):
        letters = term.replace("...", "")
        sizes.update(zip(letters, np.asarray(array).shape[-len(letters) :], strict=False))
    return float(np.prod(list(sizes.values())))
