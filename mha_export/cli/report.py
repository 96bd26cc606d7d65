"""``mha-export report``: one page from the results of many machines."""

from __future__ import annotations

from pathlib import Path

import click

from mha_export.cli._options import json_option, output_option
from mha_export.cli._terminal import print_json, print_line, print_notice


@click.command("report")
@click.argument(
    "results", nargs=-1, required=True, metavar="RESULTS.json...", type=click.Path(path_type=Path)
)
@output_option("Report to write: .html, .md, .json or .xml (JUnit).")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="OLD.json",
    help="Earlier results: report regressions in parity, placement and latency.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    results: tuple[Path, ...],
    output: Path,
    against: Path | None,
    as_json: bool,
) -> None:
    """Merge results of many machines into one report.

    \b
    Example:
      mha-export report laptop.json server.json -o report.html
    """
    from mha_export.jobs import write_report

    result = write_report(results, output=output, against=against)
    for notice in result.notices:
        print_notice(notice)
    if as_json:
        print_json(result.document)
    else:
        print_line(result.document["verdict"])
        print_line(f"written to {output}")
    ctx.exit(result.exit_code)
