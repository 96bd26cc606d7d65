"""``mha-export run``: compile, parity and latency on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._options import (
    inputs_option,
    json_option,
    limit_options,
    output_option,
    quick_option,
    seed_option,
    target_option,
    workload_options,
)
from mha_export.cli._terminal import (
    finish,
    print_table,
    progress_shown,
)


@click.command("run")
@click.argument("model", metavar="DIR_OR_MODEL", type=click.Path(path_type=Path))
@target_option
@output_option("Results file to write.", required=False)
@inputs_option
@workload_options
@click.option("--vs", metavar="BASELINE", help="Ratio of latency to 'raw', the unmodified model.")
@quick_option
@limit_options
@seed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    targets: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile, check and time an export folder, or one .onnx file, on this machine.

    The results are written as they come, target by target. A run that was ended goes on where it
    was when it is given again with the same -o: finished targets are not run again. What a target
    does to itself (a crash, a hang, all the memory) is its own result; the others go on.

    \b
    Example:
      mha-export run out -o results.json
    """
    from mha_export.jobs import RunSettings, run_models

    with progress_shown() as progress:
        result = run_models(
            model,
            targets=targets,
            output=output,
            settings=RunSettings.from_options(**options),
            progress=progress,
        )
    finish(ctx, result, as_json=as_json, show=show_results)


def show_results(document: dict[str, Any]) -> None:
    """One line a record: status, placement, error and latency."""
    print_table(
        "",
        ["model", "target", "workload", "status", "placement", "error / bound", "p50 ms", "reason"],
        [_row(record) for record in document["results"]],
    )


def _row(record: dict[str, Any]) -> list[object]:
    placement, parity, latency = (
        record["placement"],
        record["parity"],
        record["latency_ms"],
    )
    target = record["target"] + (f":{record['precision']}" if record["precision"] else "")
    if record.get("variant") not in (None, record["target"]):
        target += f" ({record['variant']})"
    return [
        record["model"],
        target,
        " ".join(f"{name}={size}" for name, size in record["workload"].items()),
        record["status"],
        None
        if placement is None
        else f"{placement['on_target']}/{placement['float_compute_nodes']}",
        None if parity is None else parity["factor"],
        None if latency is None else latency["p50"],
        record["reason"],
    ]
