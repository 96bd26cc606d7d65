"""Options of the commands on heads, with one spelling and one help text each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mha_export.cli._options import seed_option

F = TypeVar("F", bound=Callable[..., Any] | click.Command)


def data_options(command: F) -> F:
    """Which samples, and what is measured on them."""
    for option in reversed(
        [
            click.option(
                "--data",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="Samples: .npz by input name, .jsonl, or text, one a line.",
            ),
            click.option(
                "--tokenizer",
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Folder of tokenizer.json, for text; the model's own where it has one.",
            ),
            click.option(
                "--loss",
                default="auto",
                show_default=True,
                metavar="NAME",
                help="embedding, kl, next-token, labels, prototypes, or module.py:function.",
            ),
            click.option("--output-name", metavar="NAME", help="Graph output that is measured."),
            click.option(
                "--search-on",
                type=click.IntRange(1),
                default=64,
                show_default=True,
                help="Samples that scores are taken on; the others judge.",
            ),
            seed_option,
        ]
    ):
        command = option(command)
    return command


def head_options(given: dict[str, Any]) -> Any:
    """The settings of the job; what is left in ``given`` is the source's."""
    from mha_export.jobs import HeadOptions

    return HeadOptions(
        data=given.pop("data"),
        tokenizer=given.pop("tokenizer"),
        loss=given.pop("loss"),
        output=given.pop("output_name"),
        search_on=given.pop("search_on"),
        seed=given["seed"],
        trust_code=given["trust_code"],
    )
