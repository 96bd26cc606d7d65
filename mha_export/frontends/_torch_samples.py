"""Arguments to export a torch module with: given by name, by shape, or derived from its kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mha_export.errors import InputError
from mha_export.frontends._export import as_array
from mha_export.frontends._frontend import SourceOptions
from mha_export.frontends._traceable import Axes, Traceable

_Shape = tuple[int | str, ...]
"""Sizes of one argument; a text is an axis that stays open."""

_DIMS: Mapping[str, int] = {"batch": 2, "seq": 5, "kv_seq": 7}


def sample_arguments(
    module: Any, options: SourceOptions, what: str
) -> tuple[Traceable, dict[str, np.ndarray]]:
    """The module as an exporter takes it, and its sample inputs by name.

    Tensors become graph inputs; other values of ``options.inputs`` (flags, None) are fixed.

    Errors:
        InputError: an argument is missing or unknown and nothing tells its shape.
    """
    import torch

    parameters = inspect.signature(module.forward).parameters
    _refuse_unknown(parameters, options, what)
    sizes = {**_DIMS, **options.dims}
    derived = _derived_shapes(module)
    generator = torch.Generator().manual_seed(options.seed)
    tensors: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    axes: dict[str, Axes | None] = {}
    for name, value in options.inputs.items():
        if isinstance(value, (np.ndarray, torch.Tensor)):
            tensors[name] = torch.as_tensor(value)
            axes[name] = None
        else:
            fixed[name] = value
    for name, shape in options.shapes.items():
        tensors.setdefault(name, torch.randn(shape, generator=generator))
        axes.setdefault(name, None)
    for name, sketch in derived.items():
        optional = name in parameters and parameters[name].default is not inspect.Parameter.empty
        stated = {axis: dim for axis, dim in enumerate(sketch) if isinstance(dim, str)}
        if name in tensors:
            axes[name] = stated
        elif name not in fixed and not optional:
            size = [sizes[dim] if isinstance(dim, str) else dim for dim in sketch]
            tensors[name] = torch.randn(size, generator=generator)
            axes[name] = stated
    _refuse_missing(parameters, tensors, fixed, what)
    ordered = [name for name in parameters if name in tensors]
    traceable = Traceable(
        module=_adapter(module, tuple(ordered), fixed),
        args=tuple(tensors[name] for name in ordered),
        input_names=tuple(ordered),
        input_axes=tuple(axes[name] for name in ordered),
    )
    return traceable, {name: as_array(tensors[name]) for name in ordered}


def _refuse_unknown(parameters: Mapping[str, Any], options: SourceOptions, what: str) -> None:
    unknown = sorted({*options.inputs, *options.shapes} - set(parameters))
    if unknown:
        raise InputError(
            f"{what}: forward has no argument {unknown[0]!r}",
            fix=f"its arguments are: {', '.join(parameters) or 'none'}",
        )


def _refuse_missing(
    parameters: Mapping[str, inspect.Parameter],
    tensors: Mapping[str, Any],
    fixed: Mapping[str, Any],
    what: str,
) -> None:
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and name not in tensors
        and name not in fixed
    ]
    if needed or not tensors:
        name = needed[0] if needed else next(iter(parameters), "x")
        raise InputError(
            f"{what}: nothing tells the shape of its input{'s' if len(needed) > 1 else ''} "
            f"{', '.join(needed) or name}",
            fix=f"give it: --shape {name}=2,16,512 (floats; sizes above 1 stay open), or return "
            "(module, {input name: tensor}) from the factory, as token ids and masks need",
        )


def _adapter(module: Any, names: tuple[str, ...], fixed: Mapping[str, Any]) -> Any:
    """A module of positional tensors around one with keywords and fixed flags."""
    import torch

    class Adapter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            result = self.module(**dict(zip(names, tensors, strict=True)), **fixed)
            if isinstance(result, (tuple, list)):
                return tuple(item for item in result if item is not None)
            return result

    return Adapter().eval()


def _derived_shapes(module: Any) -> dict[str, _Shape]:
    """Argument shapes of modules whose constructor fixes them; empty for any other.

    Optional arguments are listed for their axes; they are inputs only when given.
    """
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn.modules.") and kind.__name__ in _KNOWN:
            return _KNOWN[kind.__name__](module)
    return {}


def _sequence(module: Any, length: str, width: int) -> _Shape:
    first = ("batch", length) if module.batch_first else (length, "batch")
    return (*first, width)


def _multihead(module: Any) -> dict[str, _Shape]:
    return {
        "query": _sequence(module, "seq", module.embed_dim),
        "key": _sequence(module, "kv_seq", module.kdim),
        "value": _sequence(module, "kv_seq", module.vdim),
        "key_padding_mask": ("batch", "kv_seq"),
    }


def _encoder_layer(module: Any) -> dict[str, _Shape]:
    return {
        "src": _sequence(module.self_attn, "seq", module.self_attn.embed_dim),
        "src_key_padding_mask": ("batch", "seq"),
    }


def _decoder_layer(module: Any) -> dict[str, _Shape]:
    width = module.self_attn.embed_dim
    return {
        "tgt": _sequence(module.self_attn, "seq", width),
        "memory": _sequence(module.multihead_attn, "kv_seq", width),
        "tgt_key_padding_mask": ("batch", "seq"),
        "memory_key_padding_mask": ("batch", "kv_seq"),
    }


def _encoder(module: Any) -> dict[str, _Shape]:
    return _encoder_layer(module.layers[0])


def _decoder(module: Any) -> dict[str, _Shape]:
    return _decoder_layer(module.layers[0])


def _transformer(module: Any) -> dict[str, _Shape]:
    return {
        "src": _sequence(module, "kv_seq", module.d_model),
        "tgt": _sequence(module, "seq", module.d_model),
    }


_KNOWN: Mapping[str, Callable[[Any], dict[str, _Shape]]] = {
    "MultiheadAttention": _multihead,
    "TransformerEncoderLayer": _encoder_layer,
    "TransformerEncoder": _encoder,
    "TransformerDecoderLayer": _decoder_layer,
    "TransformerDecoder": _decoder,
    "Transformer": _transformer,
}
