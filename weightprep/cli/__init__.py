"""The commands. Each imports what it needs when it runs: `weightprep --help` must not wait for torch."""

from __future__ import annotations

import typer

from weightprep.cli.convert import convert
from weightprep.cli.inspect import inspect
from weightprep.cli.recipes import recipes
from weightprep.cli.synth import synth
from weightprep.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="weightprep",
    help="Put model weights into exactly the form on which sglang's fast kernels gate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (convert, inspect, verify, synth):
    app.command()(command)
app.add_typer(recipes)
