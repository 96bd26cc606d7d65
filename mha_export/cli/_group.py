"""The ``mha-export`` group: finds the commands, one per file of this package."""

from __future__ import annotations

import importlib
import pkgutil

import click

import mha_export
from mha_export import cli as package


class CommandsFromFiles(click.Group):
    """Every module of this package that does not begin with ``_`` is a command of that name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(package.__path__))
        return sorted(name for name in names if not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{package.__name__}.{cmd_name}").command
        return command


@click.group(cls=CommandsFromFiles, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mha_export.__version__, prog_name="mha-export")
def cli() -> None:
    """Find every attention in a transformer, emit the ONNX form that each runtime runs best,
    prove all of them equal to one float64 oracle, measure them, and report on one page.

    \b
    Example:
      mha-export check model.onnx -o out      everything, with every target found here

    Exit codes: 0 all well, 1 a check failed, 2 bad usage or input, 3 a target can't run here.
    """
