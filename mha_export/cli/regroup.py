"""``mha-export regroup``: fewer key/value heads, or one for every query head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._head_options import data_options, head_options
from mha_export.cli._options import json_option, output_option, reading_options
from mha_export.cli._terminal import finish, progress_shown
from mha_export.cli.prune import show_surgery


@click.command("regroup")
@click.argument("model")
@click.option("--kv-heads", type=int, required=True, metavar="N", help="Key/value heads a layer.")
@click.option(
    "--grouping",
    type=click.Choice(["auto", "similar", "contiguous"]),
    default="auto",
    show_default=True,
    help="Which heads are averaged: those alike, those next to each other, or whichever of the two "
    "is better on the data (without data: those alike).",
)
@click.option(
    "--align/--no-align",
    default=True,
    show_default=True,
    help="Turn the heads of a group towards one another before they are averaged.",
)
@data_options
@output_option("Model to write, .onnx; its record goes beside it as .json.")
@reading_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    kv_heads: int,
    grouping: Any,
    align: bool,
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Write MODEL with other key/value heads: averaged (fewer, approximate) or repeated (exact).

    \b
    Example:
      mha-export regroup decoder.onnx --kv-heads 2 --data prompts.npz -o grouped.onnx
    """
    from mha_export.jobs import SourceSettings, regroup_model

    chosen = head_options(options)
    with progress_shown() as progress:
        result = regroup_model(
            model,
            kv_heads=kv_heads,
            grouping=grouping,
            align=align,
            options=chosen,
            output=output,
            settings=SourceSettings(**options),
            progress=progress,
        )
    finish(ctx, result, as_json=as_json, show=show_surgery)
