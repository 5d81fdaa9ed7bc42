"""The commands. Each imports what it needs when it runs: `weightprep --help` must not wait for torch."""

from __future__ import annotations

from typing import Annotated

import typer

from weightprep import __version__
from weightprep.cli.completion import InstallCompletion, ShowCompletion, answer_shells
from weightprep.cli.convert import convert
from weightprep.cli.doctor import doctor
from weightprep.cli.inspect import inspect
from weightprep.cli.output import print_lines
from weightprep.cli.recipes import recipes
from weightprep.cli.report import report
from weightprep.cli.synth import synth
from weightprep.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="weightprep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_lines(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    install_completion: InstallCompletion = None,
    show_completion: ShowCompletion = None,
) -> None:
    """Put model weights into exactly the form on which sglang's fast kernels gate."""


answer_shells()
for command in (convert, inspect, verify, report, synth, doctor):
    app.command()(command)
app.add_typer(recipes)
