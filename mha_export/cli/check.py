"""``mha-export check``: the main job, export to report, with every target found here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._options import (
    export_options,
    inputs_option,
    json_option,
    limit_options,
    output_option,
    quick_option,
    seed_option,
    source_options,
    target_option,
    workload_options,
)
from mha_export.cli._terminal import finish, print_line, progress_shown
from mha_export.cli.export import show_export
from mha_export.cli.run import show_results


@click.command("check")
@click.argument("source")
@target_option
@output_option("Folder to write.")
@export_options
@inputs_option
@click.option("--vs", metavar="BASELINE", help="Ratio of latency to 'raw', the unmodified model.")
@quick_option
@limit_options
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
    """Export SOURCE, compile, prove and time it with every target found here, and report.

    SOURCE may be an export folder: it is then checked as it is. A check that was ended goes on
    when it is given again with the same -o: finished targets are not run again.

    \b
    Example:
      mha-export check model.onnx -o out
    """
    from mha_export.jobs import check_source

    with progress_shown() as progress:
        result = check_source(
            source, targets=targets, out=output, options=options, progress=progress
        )
    finish(ctx, result, as_json=as_json, show=lambda document: _show(document, output))


def _show(document: dict[str, Any], folder: Path) -> None:
    show_export(document["export"], folder)
    show_results(document["results"])
    print_line(document["verdict"])
