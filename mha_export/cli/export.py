"""``mha-export export``: recognise, rewrite, prove, per target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._options import (
    export_options,
    json_option,
    output_option,
    seed_option,
    source_options,
    target_option,
    workload_options,
)
from mha_export.cli._terminal import (
    print_json,
    print_line,
    print_notice,
    print_table,
    progress_shown,
)


@click.command("export")
@click.argument("source")
@target_option
@output_option("Folder to write.")
@export_options
@source_options
@workload_options
@seed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: str,
    targets: tuple[str, ...],
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Write SOURCE as one ONNX graph per target, each rewritten attention proven.

    SOURCE is an .onnx file, a Hugging Face folder, a YAML specification or preset:NAME.

    \b
    Example:
      mha-export export model.onnx -t cpu -t openvino -t portable -o out
    """
    from mha_export.jobs import export_model, split_settings

    source_settings, export_settings, _ = split_settings(options)
    with progress_shown() as progress:
        result = export_model(
            source,
            targets=targets,
            out=output,
            source_settings=source_settings,
            settings=export_settings,
            progress=progress,
        )
    for notice in result.notices:
        print_notice(notice)
    if as_json:
        print_json(result.document)
    else:
        show_export(result.document, output)
    ctx.exit(result.exit_code)


def show_export(document: dict[str, Any], folder: Path) -> None:
    """One line a variant: what was fused, lowered, kept or undone."""
    rows = []
    for variant in document["variants"]:
        states = [site["status"] for site in variant["sites"].values()]
        forms = sorted({site["form"] for site in variant["sites"].values() if site["form"]})
        counts = [states.count(state) for state in ("fused", "lowered", "kept", "proof_failed")]
        rows.append(
            [variant["target"], variant["file"], variant["opset"], ", ".join(forms), *counts]
        )
    print_table(
        document["model"]["name"],
        ["target", "file", "opset", "forms", "fused", "lowered", "kept", "proof failed"],
        rows,
    )
    print_line(f"written to {folder}")
