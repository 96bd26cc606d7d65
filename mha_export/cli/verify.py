"""``mha-export verify``: is a bundle whole, and right on this machine."""

from __future__ import annotations

from typing import Any

import click

from mha_export.cli._options import json_option, target_option
from mha_export.cli._terminal import (
    finish,
    print_line,
    print_table,
    progress_shown,
)


@click.command("verify")
@click.argument("bundle")
@target_option
@click.option("--files-only", is_flag=True, help="Hashes only; run nothing.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    bundle: str,
    targets: tuple[str, ...],
    files_only: bool,
    as_json: bool,
) -> None:
    """Check every byte of BUNDLE (a folder or .zip) and name each bad file; then run its known
    answers on the targets that are here.

    \b
    Example:
      mha-export verify app-model
      mha-export verify app-model.zip --files-only
    """
    from mha_export.jobs import verify_bundle

    with progress_shown() as progress:
        result = verify_bundle(bundle, targets=targets, files_only=files_only, progress=progress)
    finish(ctx, result, as_json=as_json, show=_show)


def _show(document: dict[str, Any]) -> None:
    for problem in document["problems"]:
        print_line(f"{problem['file']}: {problem['reason']}")
    if document["problems"]:
        return
    print_line("every file is as it was made")
    if document["answers"]:
        print_table(
            "known answers",
            ["variant", "target", "status", "reason"],
            [
                [row["variant"], row["target"], row["status"], row["reason"]]
                for row in document["answers"]
            ],
        )
