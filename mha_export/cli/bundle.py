"""``mha-export bundle``: what an app embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._bundle_view import show_bundle
from mha_export.cli._options import json_option, output_option, seed_option
from mha_export.cli._terminal import print_line, print_notice, progress_shown


@click.command("bundle")
@click.argument("export_dir", type=click.Path(path_type=Path))
@output_option("Folder to write, or a .zip.")
@click.option(
    "-t", "--target", "targets", multiple=True, metavar="NAME", help="Variants to take; none: all."
)
@click.option("--zip", "archive", is_flag=True, help="Also OUTPUT.zip beside the folder.")
@click.option(
    "--single-file",
    "single_files",
    multiple=True,
    metavar="NAME",
    help="Also this variant with its weights inside, repeatable.",
)
@click.option("--mobile", is_flag=True, help="Also ORT format, for mobile builds.")
@click.option(
    "--genai",
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    help="Also genai_config.json for onnxruntime-genai, from the model's config.json.",
)
@click.option(
    "--license",
    "licenses",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Licence text of the model to carry along, repeatable.",
)
@seed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, export_dir: Path, output: Path, as_json: bool, **options: Any
) -> None:
    """Make what an app embeds of EXPORT_DIR: a graph per target, one weights file, known answers,
    hashes, and a runnable example per language.

    \b
    Example:
      mha-export export model.onnx -t cpu -t openvino -t portable -o out
      mha-export bundle out -o app-model
    """
    from mha_export.jobs.bundle import bundle_export, settings_from

    with progress_shown() as progress:
        result = bundle_export(
            export_dir, out=output, settings=settings_from(options), progress=progress
        )
    for notice in result.notices:
        print_notice(notice)
    show_bundle(result.document, as_json=as_json)
    if not as_json:
        print_line(f"written to {', '.join(str(path) for path in result.files)}")
    ctx.exit(result.exit_code)
