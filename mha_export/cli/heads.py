"""``mha-export heads``: what each head does, and what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._head_options import data_options, head_options
from mha_export.cli._options import json_option, output_option, reading_options
from mha_export.cli._terminal import (
    finish,
    print_line,
    print_table,
    progress_shown,
)

COLUMNS = (
    "importance", "entropy_share", "confidence", "previous", "next", "same", "first", "separator",
    "offset", "offset_weight", "rare", "induction", "norm", "qk_effective_rank",
    "vo_effective_rank",
)  # fmt: skip


@click.command("heads")
@click.argument("model")
@data_options
@click.option(
    "--importance",
    "method",
    type=click.Choice(["ablation", "gradient", "fisher", "hessian", "none"]),
    help="How; by default ablation for agreement and gradient for labels.",
)
@click.option(
    "--map", "maps", multiple=True, metavar="LAYER:HEAD", help="Attention map for the report."
)
@click.option("--sample", default=0, show_default=True, help="Sample the maps are drawn for.")
@output_option("JSON file to write; `report` makes a page of it.", required=False)
@reading_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    method: str | None,
    maps: tuple[str, ...],
    sample: int,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say of every head of MODEL what it looks at, what it adds, and what it is worth.

    \b
    Example:
      mha-export heads model.onnx --data sentences.txt --tokenizer DIR -o heads.json
      mha-export report heads.json -o heads.html
    """
    from mha_export.jobs import SourceSettings, analyse_heads

    chosen = head_options(options)
    with progress_shown() as progress:
        result = analyse_heads(
            model,
            options=chosen,
            method=method,
            maps=maps,
            sample=sample,
            output=output,
            settings=SourceSettings(**options),
            progress=progress,
        )
    finish(ctx, result, as_json=as_json, show=_show)


def _show(document: dict[str, Any]) -> None:
    rows = [
        [f"{layer['layer']}:{head['head']}", *(head[name] for name in COLUMNS)]
        for layer in document["layers"]
        for head in layer["heads"]
    ]
    kept = [
        index for index in range(len(COLUMNS) + 1) if any(row[index] is not None for row in rows)
    ]
    names = ["head", *(name.replace("_", " ") for name in COLUMNS)]
    print_table(
        document["model"]["name"],
        [names[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
    )
    if document["importance_method"]:
        print_line(
            f"importance: {document['importance_method']} of {document['loss']}, "
            f"{document['importance_by']}; {document['samples']} samples of {document['data']}"
        )
