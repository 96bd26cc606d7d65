"""What every form says of every feature, as a page: docs/forms/features.md."""

from __future__ import annotations

from features import FEATURES, HEADS

from mha_export.forms import FormParams, all_forms, form_named
from mha_export.spec import ProjectionSpec

HEAD = """# Every feature in every form

What `scripts/regenerate_goldens` writes. `yes`: the form says it natively; a list names what it
says by other means, exactly too; `no` names the first feature that stops it, and `mha-export build`
says what that needs. Four query heads of width 16, two or four for keys and values; opset 23 but
for `onnx`. `ort-attention` projects by itself and has no fewer heads for keys: it is asked for the
same attention behind packed projections, with four.
"""


def columns() -> list[tuple[str, int]]:
    """Every form with the opsets at which it says something else."""
    return [
        (form, opset)
        for form in sorted(all_forms())
        for opset in ((23, 24, 25) if form == "onnx" else (23,))
    ]


def cell(form: str, opset: int, feature: str) -> str:
    """One verdict in a few words."""
    spec = FEATURES[feature]
    if form == "ort-attention":
        packed = ProjectionSpec(d_model=64, packing="packed", output=False)
        heads = spec.kv_heads if feature in HEADS else spec.q_heads
        spec = spec.replace(projections=packed, kv_heads=heads)
    verdict = form_named(form).supports(spec, FormParams(opset=opset))
    if not verdict:
        return f"no: {verdict.feature}"
    return ", ".join(sorted(verdict.by_other_means)) or "yes"


def page() -> str:
    """The whole page, byte for byte the same at every run."""
    chosen = columns()
    names = [f"{form} {opset}" if form == "onnx" else form for form, opset in chosen]
    lines = [HEAD, f"| feature | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for feature in FEATURES:
        cells = [cell(form, opset, feature) for form, opset in chosen]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
