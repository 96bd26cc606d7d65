"""A bare specification: a YAML file, ``preset:NAME``, or an :class:`AttentionSpec`."""

from __future__ import annotations

from pathlib import Path

from mha_export.errors import InputError
from mha_export.forms import FormParams, build_model, form_named
from mha_export.frontends._digest import model_digest
from mha_export.frontends._frontend import LoadedModel, SourceOptions
from mha_export.presets import load_preset, spec_from_yaml
from mha_export.spec import AttentionSpec

PRESET_PREFIX = "preset:"
_SUFFIXES = frozenset({".yaml", ".yml"})


class Specification:
    """Builds the canonical graph of one attention; its weights, where it has any, are seeded."""

    name = "specification"
    summary = "a specification (.yaml, or preset:NAME)"

    def accepts(self, source: object) -> bool:
        if isinstance(source, AttentionSpec):
            return True
        if not isinstance(source, (str, Path)):
            return False
        return str(source).startswith(PRESET_PREFIX) or Path(source).suffix.lower() in _SUFFIXES

    def load(self, source: object, options: SourceOptions) -> LoadedModel:
        spec, name, origin = _read(source)
        if options.dtype is not None:
            spec = spec.replace(io_dtype=options.dtype)
        form = form_named(options.form)
        opset = FormParams().opset if options.opset is None else options.opset
        params = FormParams(opset=max(opset, form.min_opset))
        model = build_model(form, spec, params, seed=options.seed)
        return LoadedModel(model=model, name=name, sha256=model_digest(model), origin=origin)


def _read(source: object) -> tuple[AttentionSpec, str, str]:
    if isinstance(source, AttentionSpec):
        return source, "attention", "AttentionSpec"
    text = str(source)
    if text.startswith(PRESET_PREFIX):
        preset = text.removeprefix(PRESET_PREFIX)
        return load_preset(preset), preset, f"preset {preset}"
    path = Path(text)
    if not path.is_file():
        raise InputError(f"{path}: no such file", fix="check the path, or use preset:NAME")
    return spec_from_yaml(path), path.stem, f"specification {path}"


FRONTEND = Specification()
