"""``mha-export prune``: a model without some of its heads."""

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


@click.command("prune")
@click.argument("model")
@click.option("--heads", metavar="L:H,...", help="These heads, e.g. 0:1,1:3.")
@click.option("--fraction", type=float, help="This share of all heads.")
@click.option("--min-quality", type=float, help="As many as keep this quality.")
@click.option("--max-latency-ms", type=float, help="As few as bring the median on cpu to this.")
@click.option(
    "--order",
    type=click.Choice(["greedy", "one-shot"]),
    default="greedy",
    show_default=True,
    help="Score again after each head, or once.",
)
@click.option(
    "--unit", type=click.Choice(["head", "group"]), help="A head, or all that share keys."
)
@click.option("--compare", is_flag=True, help="Follow the other order too, for the curve.")
@click.option(
    "--fold/--no-fold", default=True, show_default=True,
    help="Mean contribution of a layer without heads into its bias.",
)  # fmt: skip
@click.option(
    "--shortlist", default=12, show_default=True, type=click.IntRange(0),
    help="Heads tried at each greedy step; 0: all.",
)  # fmt: skip
@click.option("--time", is_flag=True, help="Time the model before and after, in turn, on cpu.")
@data_options
@output_option("Model to write, .onnx; its record goes beside it as .json.")
@reading_options
@json_option
@click.pass_context
def command(ctx: click.Context, /, model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Write MODEL without some heads: equal to the model with their gates at zero, and smaller.

    \b
    Example:
      mha-export prune model.onnx --fraction 0.5 --data sentences.txt --tokenizer DIR -o half.onnx
    """
    from mha_export.jobs import PruneGoal, SourceSettings, prune_model

    names = ("fraction", "min_quality", "max_latency_ms", "order", "unit", "compare", "fold",
             "shortlist", "time")  # fmt: skip
    named = options.pop("heads")
    goal = PruneGoal(
        heads=tuple(part.strip() for part in named.split(",") if part.strip()) if named else (),
        **{name: options.pop(name) for name in names},
    )
    chosen = head_options(options)
    with progress_shown() as progress:
        result = prune_model(
            model,
            goal=goal,
            options=chosen,
            output=output,
            settings=SourceSettings(**options),
            progress=progress,
        )
    finish(ctx, result, as_json=as_json, show=show_surgery)


def show_surgery(document: dict[str, Any]) -> None:
    """A line a layer, and what the whole came to."""
    print_table(
        document["model"]["name"],
        ["layer", "site", "query heads", "key/value heads", "removed", "groups"],
        [
            [
                layer["layer"],
                layer["site"],
                f"{layer['q_heads_before']} -> {layer['q_heads']}",
                f"{layer['kv_heads_before']} -> {layer['kv_heads']}",
                ",".join(map(str, layer["removed"])) or None,
                " ".join("+".join(map(str, group)) for group in layer["groups"]) or None,
            ]
            for layer in document["layers"]
        ],
    )
    print_line(
        f"{document['how']}: heads {document['heads_before']} -> {document['heads_after']}, "
        f"weights {document['bytes_before'] / 1e6:.1f} -> {document['bytes_after'] / 1e6:.1f} MB, "
        f"cache a token {document['cache_bytes_before']} -> {document['cache_bytes_after']} bytes"
    )
    if document["quality"] is not None:
        others = ", ".join(
            f"{name} {value:.4f}" for name, value in document["quality_other"].items()
        )
        print_line(
            f"quality ({document['quality_name']}): {document['quality']:.4f}"
            + (f" ({others})" if others else "")
        )
    if document["check_max_abs"] is not None:
        print_line(
            f"equal to {document['check']}: largest difference {document['check_max_abs']:.2g}"
        )
    for name, value in document["latency_ms"].items():
        print_line(f"median of the {name} model on cpu: {value:.3g} ms")
