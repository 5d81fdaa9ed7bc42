"""Shell completion for a shell that is named.

typer's own options take no name: they look for the shell among the parent processes, and write into the start-up file
of whatever they find there.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer.completion import install_callback, show_callback

__all__ = ["InstallCompletion", "Shell", "ShowCompletion", "answer_shells"]


class Shell(str, Enum):
    """Those that typer has a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"
    PWSH = "pwsh"


def answer_shells() -> None:
    """Have the program answer what the installed scripts ask it; typer does so by itself for its own options only."""
    completion_init()


def _install(context: typer.Context, parameter: typer.CallbackParam, shell: Shell | None) -> None:
    install_callback(context, parameter, shell and shell.value)


def _show(context: typer.Context, parameter: typer.CallbackParam, shell: Shell | None) -> None:
    show_callback(context, parameter, shell and shell.value)


InstallCompletion = Annotated[
    Shell | None, typer.Option(callback=_install, is_eager=True, help="Install completion for this shell.")
]
ShowCompletion = Annotated[
    Shell | None, typer.Option(callback=_show, is_eager=True, help="Print the completion script of this shell.")
]
