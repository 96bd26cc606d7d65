"""``mha-export tune``: measure the legal forms of every attention, keep the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mha_export.cli._options import (
    json_option,
    output_option,
    quick_option,
    seed_option,
    source_options,
    workload_options,
)
from mha_export.cli._terminal import (
    print_json,
    print_line,
    print_notice,
    print_table,
    progress_shown,
)


@click.command("tune")
@click.argument("source", metavar="MODEL")
@click.option(
    "-t",
    "--target",
    required=True,
    metavar="NAME",
    help="Target to measure on; NAME:PRECISION where the runtime chooses.",
)
@output_option("Plan to write; one that is there already is gone on with.")
@click.option("--budget", type=float, metavar="SECONDS", help="Time to spend on measuring.")
@source_options
@workload_options
@quick_option
@seed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: str,
    target: str,
    output: Path,
    budget: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time every legal form of every attention of MODEL, and write the fastest as a plan.

    \b
    Example:
      mha-export tune model.onnx -t cpu --dim batch=1 --dim seq=128 -o plan.json
      mha-export export model.onnx -t cpu --plan plan.json -o out
    """
    from mha_export.jobs import TuneSettings, split_settings, tune_model

    source_settings, _, run_settings = split_settings(options)
    with progress_shown() as progress:
        result = tune_model(
            source,
            target=target,
            output=output,
            source_settings=source_settings,
            settings=TuneSettings(run=run_settings, budget=budget),
            progress=progress,
        )
    for notice in result.notices:
        print_notice(notice)
    if as_json:
        print_json(result.document)
    elif result.files:
        show_plan(result.document)
        print_line(f"written to {output}")
    ctx.exit(result.exit_code)


def show_plan(document: dict[str, Any]) -> None:
    """One line a measurement, the fastest of each workload first."""
    rows = [row for row in document["measured"] if "form" in row]
    rows.sort(key=lambda row: (row["site"], str(row["lengths"]), _p50(row) or float("inf")))
    print_table(
        "",
        ["site", "lengths", "form", "parameters", "p50 ms", "of primitive", "problem"],
        [
            [
                row["site"],
                " ".join(f"{name}={size}" for name, size in row["lengths"].items()),
                row["form"],
                " ".join(f"{name}={value}" for name, value in row["params"].items()),
                _p50(row),
                None if row["vs"] is None else row["vs"]["ratio"],
                row["problem"],
            ]
            for row in rows
        ],
    )


def _p50(row: dict[str, Any]) -> float | None:
    latency = row["latency_ms"]
    return None if latency is None else float(latency["p50"])
