"""A torch module or program: an object, ``module.py:factory``, or a saved ``.pt2``."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.frontends import _export, _tasks
from mha_export.frontends._digest import model_digest
from mha_export.frontends._frontend import LoadedModel, SourceOptions
from mha_export.frontends._torch_samples import sample_arguments
from mha_export.frontends._traceable import Traceable


class TorchModule:
    """Exports with ``torch.onnx.export``; arguments are given, or derived from the module."""

    name = "torch"
    summary = "a torch.nn.Module or torch.export program (from Python, module.py:factory, or .pt2)"

    def accepts(self, source: object) -> bool:
        if isinstance(source, (str, Path)):
            return Path(source).suffix.lower() == ".pt2" or _factory_of(str(source)) is not None
        return _is_a(source, "torch.nn.modules.module", "Module") or _is_a(
            source, "torch.export.exported_program", "ExportedProgram"
        )

    def load(self, source: object, options: SourceOptions) -> LoadedModel:
        if not isinstance(source, (str, Path)):
            return _load_object(source, options, type(source).__name__)
        factory = _factory_of(str(source))
        path = Path(source) if factory is None else factory[0]
        if not path.is_file():
            raise InputError(f"{path}: no such file", fix="check the path")
        if not options.trust_code:
            raise InputError(
                f"{source}: loading it runs the code in it; it is not run unasked",
                fix="read it, then allow it with --trust-code",
            )
        if factory is None:
            return _load_object(_saved_program(path), options, path.stem, where=str(path))
        made, given = _call_factory(path, factory[1])
        merged = options if not given else _with_inputs(options, given)
        return _load_object(made, merged, factory[1], where=str(source))


def _is_a(source: object, module: str, name: str) -> bool:
    """By the names of its classes, so that nothing imports torch to say no."""
    return any(kind.__module__ == module and kind.__name__ == name for kind in type(source).__mro__)


def _factory_of(source: str) -> tuple[Path, str] | None:
    """``path/to/module.py:factory``, taken apart."""
    path, colon, factory = source.rpartition(":")
    return (Path(path), factory) if colon and path.endswith(".py") else None


def _saved_program(path: Path) -> Any:
    try:
        import torch

        with _export.quiet():
            return torch.export.load(path)
    except ImportError as error:
        raise _needs_torch(path) from error
    except Exception as error:
        raise InputError(
            f"{path}: not a program of torch.export: {_export.last_words(error)}",
            fix="save it with torch.export.save and the installed torch version",
        ) from error


def _needs_torch(source: object) -> InputError:
    return InputError(f"{source}: needs torch", fix="pip install 'mha-export[torch]'")


def _call_factory(path: Path, factory: str) -> tuple[Any, Mapping[str, Any]]:
    """The module that ``factory()`` returns, with its inputs by name where it returns a pair."""
    module_name = f"_mha_export_source_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file", fix="give module.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        made = getattr(module, factory)()
    except ImportError as error:
        if error.name == "torch":
            raise _needs_torch(path) from error
        raise InputError(f"{path}: import failed: {error}", fix="install what it needs") from error
    except AttributeError as error:
        if not hasattr(module, factory):
            named = [name for name, item in vars(module).items() if inspect.isfunction(item)]
            raise InputError(
                f"{path}: has no {factory!r}",
                fix=f"its functions are: {', '.join(named) or 'none'}",
            ) from error
        raise InputError(f"{path}:{factory} failed: {_export.last_words(error)}") from error
    except Exception as error:
        raise InputError(
            f"{path}:{factory} failed: {_export.last_words(error)}",
            fix="call it in Python to see the whole traceback",
        ) from error
    finally:
        sys.modules.pop(module_name, None)
    if not isinstance(made, tuple) or len(made) != 2:
        return made, {}
    if not isinstance(made[1], Mapping):
        raise InputError(
            f"{path}:{factory}: its inputs are a {type(made[1]).__name__}, expected a dict",
            fix="return (module, {input name: value})",
        )
    return made


def _with_inputs(options: SourceOptions, given: Mapping[str, Any]) -> SourceOptions:
    return dataclasses.replace(options, inputs={**given, **options.inputs})


def _load_object(
    source: object, options: SourceOptions, name: str, *, where: str | None = None
) -> LoadedModel:
    what = where or f"torch {type(source).__name__}"
    if _is_a(source, "torch.export.exported_program", "ExportedProgram"):
        graph = _export.export_program(source, opset=options.opset, what=what)
        return _loaded(graph, name, what, _program_samples(source, graph.model))
    if not _is_a(source, "torch.nn.modules.module", "Module"):
        raise InputError(
            f"{what}: made a {type(source).__name__}, expected a torch.nn.Module",
            fix="return the module, or (module, {input name: value}), from the factory",
        )
    module: Any = source
    training = module.training
    module.eval()
    try:
        traceable, samples = _traceable(module, options, what)
        graph = _export.export(traceable, exporter=options.exporter, opset=options.opset, what=what)
    except _export.FailedExportError as error:
        if not options.shapes:
            raise
        raise InputError(
            error.what,
            fix=f"inputs made by a shape ({', '.join(options.shapes)}) are floats: where the "
            "module takes token ids or a mask, return (module, {input name: tensor}) from the "
            "factory",
        ) from error
    finally:
        module.train(training)
    return _loaded(graph, name, what, samples)


def _traceable(
    module: Any, options: SourceOptions, what: str
) -> tuple[Traceable, dict[str, np.ndarray]]:
    if _is_a(module, "transformers.modeling_utils", "PreTrainedModel") and not options.inputs:
        task = options.task or _tasks.task_of_class(type(module).__name__, module.config)
        return _tasks.traceable_for(module, task, dims=options.dims, seed=options.seed)
    return sample_arguments(module, options, what)


def _program_samples(program: Any, model: ir.Model) -> dict[str, np.ndarray] | None:
    """The program's own example inputs under the names the graph gave them, if they still fit."""
    import torch

    args, keywords = program.example_inputs or ((), {})
    tensors = [
        item
        for item in torch.utils._pytree.tree_leaves((args, keywords))
        if isinstance(item, torch.Tensor)
    ]
    names = [value.name or "" for value in model.graph.inputs]
    if len(tensors) != len(names):
        return None
    return {name: _export.as_array(item) for name, item in zip(names, tensors, strict=True)}


def _loaded(
    graph: _export.ExportedGraph, name: str, what: str, samples: dict[str, np.ndarray] | None
) -> LoadedModel:
    inputs = {value.name for value in graph.model.graph.inputs}
    kept = None if samples is None else {k: v for k, v in samples.items() if k in inputs}
    return LoadedModel(
        model=graph.model,
        name=name,
        sha256=model_digest(graph.model),
        origin=what,
        notes=graph.notes,
        sample_inputs=kept,
    )


FRONTEND = TorchModule()
