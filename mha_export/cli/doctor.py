"""``mha-export doctor``: the targets here, and what each can do, probed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from mha_export.cli._options import json_option, output_option, quick_option, target_option
from mha_export.cli._terminal import print_json, print_line, print_table, progress_shown


@click.command("doctor")
@target_option
@output_option("Capability file to write.", required=False)
@quick_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    targets: tuple[str, ...],
    output: Path | None,
    quick: bool,
    as_json: bool,
) -> None:
    """List the targets of this machine and probe what each can do.

    \b
    Example:
      mha-export doctor
    """
    from mha_export.jobs import doctor

    with progress_shown() as progress:
        result = doctor(targets=targets, output=output, quick=quick, progress=progress)
    if as_json:
        print_json(result.document)
    else:
        _show(result.document)
    ctx.exit(result.exit_code)


def _show(document: dict[str, Any]) -> None:
    rows = []
    for row in document["targets"]:
        states = Counter(capability["state"] for capability in row["capabilities"])
        probed = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        rows.append(
            [
                row["target"],
                row["build"]["status"],
                row["run"]["status"],
                f"{row['runtime']} {row['version'] or ''}".strip(),
                row["device"],
                probed,
            ]
        )
    print_table("", ["target", "build", "run", "runtime", "device", "probed"], rows)
    for row in document["targets"]:
        for what in ("build", "run"):
            state = row[what]
            if state["status"] == "unavailable":
                print_line(f"{row['target']}: can't {what}: {state['reason']}")
                print_line(f"  fix: {state['fix']}")
                break
