"""Gradient importance of a torch module: one backward pass a sample instead of two runs a head.

A module's W_O is found by its numbers: the parameter equal to the output projection that was read
off the exported graph, either way round. Its rows for head i are multiplied by gate i through
``torch.func.functional_call``, which is what a gate on the context does, whatever the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mha_export.errors import InputError
from mha_export.heads._affine import Floats
from mha_export.heads._layers import HeadModel, Layer
from mha_export.heads.data import Batch
from mha_export.heads.importance import Importance, check_method
from mha_export.heads.measures import Measure


def gradient_importance(
    module: Any,
    heads: HeadModel,
    batches: Sequence[Batch],
    references: Sequence[Floats],
    measure: Measure,
    *,
    output: Callable[[Any], Any] | None = None,
) -> Importance:
    """``mean over samples of |dL/dgate|`` by torch's autograd, in the module's own precision.

    Args:
        module: the torch module that ``heads`` was exported from, its inputs named alike.
        heads: layers whose output projection is among the module's parameters.
        batches: samples.
        references: outputs of the whole model, which some measures compare with.
        measure: a loss with labels.
        output: picks the measured tensor from what the module returns; None: the first.

    Errors:
        InputError: an agreement loss, or a layer whose W_O is no parameter of the module.
    """
    import torch

    check_method("gradient", agreement=measure.agreement)
    layers = [layer for layer in heads.layers if layer.output is not None]
    names = {layer.number: _parameter_of(layer, module) for layer in layers}
    values = {(layer.number, head): 0.0 for layer in layers for head in range(layer.heads)}
    count = 0
    for batch, reference in zip(batches, references, strict=True):
        for index in range(batch.samples):
            gates = {n.number: torch.ones(n.heads, requires_grad=True) for n in layers}
            changed = _scaled(module, layers, names, gates)
            one, own = _sample(batch, index)
            inputs = {name: torch.from_numpy(array) for name, array in one.inputs.items()}
            result = torch.func.functional_call(module, changed, args=(), kwargs=inputs)
            result = _first_of(result) if output is None else output(result)
            loss = measure.losses(torch, result, reference[own], one).sum()
            slopes = torch.autograd.grad(loss, [gates[layer.number] for layer in layers])
            for layer, slope in zip(layers, slopes, strict=True):
                for head, number in enumerate(slope.abs().tolist()):
                    values[layer.number, head] += number
            count += 1
    return Importance(
        method="gradient",
        by="torch autograd",
        values={head: number / count for head, number in values.items()},
    )


def _sample(batch: Batch, index: int) -> tuple[Batch, slice]:
    own = slice(index, index + 1)
    return Batch(
        inputs={name: np.ascontiguousarray(array[own]) for name, array in batch.inputs.items()},
        keep=batch.keep[own],
        labels=None if batch.labels is None else batch.labels[own],
        ids=None if batch.ids is None else batch.ids[own],
    ), own


def _scaled(
    module: Any, layers: Sequence[Layer], names: Mapping[int, tuple[str, bool]], gates: Any
) -> dict[str, Any]:
    parameters = dict(module.named_parameters())
    changed = {}
    for layer in layers:
        name, transposed = names[layer.number]
        assert layer.output is not None
        factor = gates[layer.number].repeat_interleave(layer.output.weight.shape[1])
        weight = parameters[name].detach()
        factor = factor.to(weight.dtype)
        changed[name] = weight * (factor[None, :] if transposed else factor[:, None])
    return changed


def _parameter_of(layer: Layer, module: Any) -> tuple[str, bool]:
    """Name of W_O, and whether it is stored [m, h * e]."""
    assert layer.output is not None
    h, e, m = layer.output.weight.shape
    wanted = layer.output.weight.reshape(h * e, m)
    for name, parameter in module.named_parameters():
        if parameter.ndim != 2 or parameter.numel() != wanted.size:
            continue
        stored = parameter.detach().cpu().double().numpy()
        for transposed in (True, False):
            array = stored.T if transposed else stored
            if array.shape == wanted.shape and np.allclose(array, wanted, rtol=1e-6, atol=1e-9):
                return name, transposed
    raise InputError(
        f"layer {layer.number} ({layer.id}): its output projection is no parameter of the module",
        fix="use differences on the exported model instead (--importance gradient on the .onnx)",
    )


def _first_of(result: Any) -> Any:
    if hasattr(result, "ndim"):
        return result
    return next(iter(result.values())) if isinstance(result, Mapping) else result[0]
