"""``mha-export build``: a canonical graph from a specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._options import json_option, output_option, seed_option
from mha_export.cli._terminal import print_json, print_line, print_notice


@click.command("build")
@click.argument("spec", required=False, metavar="[SPEC.yaml]")
@click.option("--preset", metavar="NAME", help="A published architecture; --list shows them.")
@click.option("--list", "list_presets", is_flag=True, help="List the presets and leave.")
@click.option(
    "-f",
    "--form",
    "form",
    metavar="FORM",
    default="primitive",
    show_default=True,
    help="ONNX form.",
)
@output_option("File to write.", required=False)
@click.option("--q-heads", type=int, help="Query heads.")
@click.option("--kv-heads", type=int, help="Key/value heads.")
@click.option("--head-dim", type=int, help="Width of a query or key head.")
@click.option("--v-head-dim", type=int, help="Width of a value head.")
@click.option("--d-model", type=int, help="Model width: adds the projections.")
@click.option("--scale", type=float, help="Whole factor on the scores.")
@click.option("--softcap", type=float, help="Cap of the scores.")
@click.option("--causal", type=click.Choice(["top_left", "bottom_right"]), help="Causal mask.")
@click.option("--left-window", type=int, help="Keys behind the query that are seen.")
@click.option("--rotary-dim", type=int, help="Rotated channels of a head.")
@click.option(
    "--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Input and output dtype."
)
@click.option("--opset", type=click.IntRange(13, 26), help="Version of ai.onnx.")
@click.option(
    "--weights",
    type=click.Choice(["random", "none"]),
    default="none",
    show_default=True,
    help="none: weights are graph inputs.",
)
@click.option("--explain", is_flag=True, help="Print the spec and what was said by other means.")
@seed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    spec: str | None,
    preset: str | None,
    list_presets: bool,
    output: Path | None,
    explain: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Build the canonical graph of one attention from a YAML file, a preset, or flags.

    \b
    Example:
      mha-export build --preset llama-3-8b -f ort-gqa -o llama.onnx
      mha-export build --q-heads 8 --head-dim 64 --causal bottom_right -o attention.onnx
    """
    from mha_export.jobs import build_graph, list_preset_rows

    if list_presets:
        _show_presets(list_preset_rows(), as_json=as_json)
        return
    result = build_graph(spec, preset=preset, output=output, flags=flags)
    for notice in result.notices:
        print_notice(notice)
    if output is None and not explain and not as_json:
        print_notice("it can be built; nothing was written: name a file with -o")
    if as_json:
        print_json(result.document)
    else:
        if explain:
            _explain(result.document)
        for file in result.files:
            print_line(f"written to {file}")
    ctx.exit(result.exit_code)


def _show_presets(rows: list[dict[str, str]], *, as_json: bool) -> None:
    from mha_export.cli._terminal import print_table

    if as_json:
        print_json({"presets": rows})
    else:
        print_table(
            "", ["preset", "about", "source"], [[r["name"], r["about"], r["source"]] for r in rows]
        )


def _explain(document: dict[str, Any]) -> None:
    for name, value in document["spec"].items():
        print_line(f"{name}: {value}")
    print_line(f"form: {document['form']} {document['params']}")
    print_line("verdict: supported" + ("" if document["by_other_means"] else ", all natively"))
    for feature, means in document["by_other_means"].items():
        print_line(f"{feature}: said by {means}")
