"""A canonical graph from a specification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.forms import Form, FormParams, Supported, build_model, form_named
from mha_export.jobs._result import JobResult
from mha_export.jobs._store import check_source_stays, files_of_source, staged_file
from mha_export.presets import (
    describe_preset,
    load_preset,
    preset_names,
    spec_from_mapping,
    spec_from_yaml,
    spec_to_mapping,
)
from mha_export.spec import AttentionSpec

_DEFAULT_OPSET = 23
_TOP_LEVEL = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "scale", "softcap")


def build_graph(
    spec: str | Path | AttentionSpec | None = None,
    *,
    preset: str | None = None,
    output: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
) -> JobResult:
    """Build one attention as one form and, with ``output``, write it.

    Args:
        spec: a YAML file, or a spec; None: ``preset``, or flags alone.
        preset: name of a published architecture to start from.
        output: file to write; None only checks and explains.
        flags: ``form``, ``opset``, ``weights`` (``random`` or ``none``), ``seed``, and fields of
            the spec that replace those of its base (``q_heads``, ``causal``, ``d_model``, ...).

    Errors:
        InputError: no base and too few flags, a contradiction, or a form that cannot state it; the
            message names the feature and what it would need. An output that is the YAML file.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    form = form_named(flags.get("form", "primitive"))
    stated = _with_flags(_base(spec, preset), flags)
    params = FormParams(opset=flags.get("opset", max(form.min_opset, _DEFAULT_OPSET)))
    verdict = form.supports(stated, params)
    if not isinstance(verdict, Supported):
        raise InputError(
            f"form {form.name} at opset {params.opset} cannot state this attention: {verdict}",
            fix="choose another --form or --opset; primitive states every attention",
        )
    if output is not None:
        check_source_stays([Path(output)], files_of_source(spec))
    files = () if output is None else (_write(stated, form, params, flags, Path(output)),)
    document = {
        "form": form.name,
        "params": params.to_json(),
        "spec": stated.to_json(),
        "by_other_means": dict(verdict.by_other_means),
        "file": None if output is None else str(output),
    }
    return JobResult(document=document, files=files)


def list_preset_rows() -> list[dict[str, str]]:
    """Name, description and source of every preset."""
    rows = (describe_preset(name) for name in preset_names())
    return [{"name": row.name, "about": row.about, "source": row.source} for row in rows]


def _base(spec: str | Path | AttentionSpec | None, preset: str | None) -> dict[str, Any]:
    if spec is not None and preset is not None:
        raise InputError("both a SPEC and --preset were given", fix="give one of them")
    if isinstance(spec, AttentionSpec):
        return spec_to_mapping(spec)
    if spec is not None:
        return spec_to_mapping(spec_from_yaml(spec))
    return {} if preset is None else spec_to_mapping(load_preset(preset))


def _with_flags(base: dict[str, Any], flags: Mapping[str, Any]) -> AttentionSpec:
    merged = dict(base)
    merged.update({name: flags[name] for name in _TOP_LEVEL if name in flags})
    if "dtype" in flags:
        merged["io_dtype"] = flags["dtype"]
    mask = dict(merged.get("mask", {}))
    mask.update({name: flags[name] for name in ("causal", "left_window") if name in flags})
    if mask:
        merged["mask"] = mask
    if "rotary_dim" in flags:
        merged["rotary"] = {
            "theta": 10000.0,
            **merged.get("rotary", {}),
            "dim": flags["rotary_dim"],
        }
    if "d_model" in flags:
        merged["projections"] = {**merged.get("projections", {}), "d_model": flags["d_model"]}
    if "q_heads" in merged:
        merged.setdefault("kv_heads", merged["q_heads"])
    missing = [name for name in ("q_heads", "head_dim") if name not in merged]
    if missing:
        raise InputError(
            f"no {' and no '.join(missing)} was stated",
            fix="give a SPEC.yaml, --preset NAME, or at least --q-heads and --head-dim",
        )
    return spec_from_mapping(merged, where="build")


def _write(
    spec: AttentionSpec, form: Form, params: FormParams, flags: Mapping[str, Any], output: Path
) -> Path:
    model = build_model(
        form,
        spec,
        params,
        weights=None if flags.get("weights") == "random" else "none",
        seed=flags.get("seed", 0),
    )
    with staged_file(output) as stage:
        ir.save(model, stage)
    return output
