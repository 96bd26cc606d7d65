"""``mha-export compare``: are two models equal, and where do they first part."""

from __future__ import annotations

from typing import Any

import click

from mha_export.cli._options import (
    inputs_option,
    json_option,
    seed_option,
    target_option,
    workload_options,
)
from mha_export.cli._terminal import (
    finish,
    print_line,
    print_table,
    progress_shown,
)


@click.command("compare")
@click.argument("model_a", metavar="A.onnx")
@click.argument("model_b", metavar="B.onnx", required=False)
@target_option
@inputs_option
@workload_options
@seed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model_a: str,
    model_b: str | None,
    targets: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Say whether two models (or one model on two targets) are equal on adversarial inputs,
    and name the first attention, and the stage in it, where they part.

    \b
    Example:
      mha-export compare original.onnx out/cpu.onnx
      mha-export compare model.onnx -t cpu -t openvino
    """
    from mha_export.jobs import compare_models

    with progress_shown() as progress:
        result = compare_models(
            model_a, model_b, targets=targets, options=options, progress=progress
        )
    finish(ctx, result, as_json=as_json, show=_show)


def _show(document: dict[str, Any]) -> None:
    print_table(
        "",
        ["case", "status", "output", "max abs", "bound", "message"],
        [
            [
                row["name"],
                row["status"],
                row["output"],
                row["max_abs"],
                row["bound"],
                row["message"],
            ]
            for row in document["outputs"]
        ],
    )
    if document["equal"]:
        print_line("equal")
        return
    first = document["first_difference"]
    where = first["site"] or "outside every attention"
    stage = f", {first['stage']}" if first["site"] else ""
    print_line(f"different; they first part at {where}{stage}: {first['message']}")
