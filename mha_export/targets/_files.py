"""Where a compile puts its files, and models as bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_export.targets._target import CompileOptions


def work_folder(options: CompileOptions) -> Path:
    """The caller's folder (made if need be), or a new temporary one that stays until removed."""
    if options.workdir is not None:
        options.workdir.mkdir(parents=True, exist_ok=True)
        return options.workdir
    return Path(tempfile.mkdtemp(prefix="mha_export-"))


def model_bytes(model: ir.Model) -> bytes:
    """The model in one piece: external weights are embedded. The model itself is not changed."""
    proto = ir.to_proto(model)
    embed_external(model, proto)
    return bytes(proto.SerializeToString())


def embed_external(model: ir.Model, proto: Any) -> None:
    """Give the initializers of ``proto`` the data that ``model`` keeps in external files."""
    tensors = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    for initializer in proto.graph.initializer:
        if initializer.name in tensors:
            initializer.ClearField("external_data")
            initializer.ClearField("data_location")
            initializer.raw_data = tensors[initializer.name].tobytes()
