"""Options that several commands share, with one spelling and one help text each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
target_option = click.option(
    "-t",
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Target, repeatable; NAME:PRECISION where the runtime chooses; 'all': all available.",
)
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of every random input and weight."
)
quick_option = click.option("--quick", is_flag=True, help="Fewer cases and shorter timing.")
strict_option = click.option(
    "--strict", is_flag=True, help="A failed proof is an error, not an undone rewrite."
)
form_option = click.option(
    "--form", metavar="FORM", help="This form at every site, or the reason why not."
)
cache_option = click.option(
    "--cache",
    type=click.Choice(["keep", "concat", "static"]),
    default="keep",
    show_default=True,
    help="keep: inputs and outputs stay as they were; concat, static: give a decoder one.",
)
split_option = click.option(
    "--split",
    type=click.Choice(["none", "prefill-decode"]),
    default="none",
    show_default=True,
    help="A decoder as two graphs that share weights and cache: for prompts, for single tokens.",
)
weights_option = click.option(
    "--weights",
    type=click.Choice(["keep", "int8", "int4", "int4-qdq"]),
    default="keep",
    show_default=True,
    help="Weights of linear layers in 8 or 4 bits: MatMulNBits, or DequantizeLinear (qdq). On ONNX "
    "Runtime's CPU int4 is faster than float, int8 slower.",
)
require_fused_option = click.option(
    "--require-fused", is_flag=True, help="Every attention rewritten, else exit 1."
)
standalone_option = click.option(
    "--standalone", is_flag=True, help="Weights inside each file instead of one weights.bin."
)
inputs_option = click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Inputs to use instead of the generated battery.",
)
shape_option = click.option(
    "--shape", "shapes", multiple=True, metavar="INPUT=N,N", help="Whole shape of one input."
)
plan_option = click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Form per site and target, as written by tune or by hand.",
)


def limit_options(command: F) -> F:
    """What one step of one target may use, and how long all of them may take."""
    for option in reversed(
        [
            click.option(
                "--time-limit",
                type=float,
                metavar="SECONDS",
                help="For one build, load or run of a target.  [default: 600; 120 with --quick]",
            ),
            click.option(
                "--memory-limit",
                type=int,
                metavar="MIB",
                help="For a target's process.  [default: four fifths of what is free]",
            ),
            click.option(
                "--budget",
                type=float,
                metavar="SECONDS",
                help="For the whole run, shared out among its targets.  [default: none; 120 "
                "with --quick]",
            ),
        ]
    ):
        command = option(command)
    return command


def output_option(help_text: str, *, required: bool = True) -> Decorator[Any]:
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        required=required,
        metavar="PATH",
        help=help_text,
    )


def source_options(command: F) -> F:
    """How a source is turned into a graph, and in which precision."""
    dtype = click.option(
        "--dtype",
        type=click.Choice(["fp32", "fp16", "bf16"]),
        help="Cast the export to this precision.",
    )
    return dtype(reading_options(command))


def reading_options(command: F) -> F:
    """How a source is turned into a graph."""
    for option in reversed(
        [
            click.option("--task", metavar="TASK", help="Hugging Face task, e.g. text-generation."),
            click.option("--opset", type=click.IntRange(13, 26), help="Version of ai.onnx."),
            click.option(
                "--exporter",
                type=click.Choice(["auto", "dynamo", "legacy"]),
                default="auto",
                show_default=True,
                help="Torch's exporter: torch.export, tracing, or the first that works.",
            ),
            click.option(
                "--trust-code", is_flag=True, help="Run Python code that comes with the source."
            ),
        ]
    ):
        command = option(command)
    return command


def workload_options(command: F) -> F:
    """Sizes of the inputs."""
    for option in reversed(
        [
            click.option(
                "--dim",
                "dims",
                multiple=True,
                metavar="NAME=N",
                help="Size of a symbolic dimension; several values of one name: several workloads.",
            ),
            shape_option,
        ]
    ):
        command = option(command)
    return command


def export_options(command: F) -> F:
    """What an export is asked for beyond its source and targets."""
    for option in reversed(
        [
            form_option,
            cache_option,
            split_option,
            weights_option,
            strict_option,
            require_fused_option,
            plan_option,
            standalone_option,
        ]
    ):
        command = option(command)
    return command
