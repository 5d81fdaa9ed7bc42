"""The names that help lists are those of the tables; they are written out, as --help must not wait for torch."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import typer

from weightprep.cli import app
from weightprep.recipe.module import Precision
from weightprep.synth import ARCHITECTURES


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [("synth", "arch", set(ARCHITECTURES)), ("convert", "precision", set(get_args(Precision)))],
)
def test_help_lists_every_name(command: str, option: str, names: set[str]) -> None:
    parameters = typer.main.get_command(app).commands[command].params
    text = next(parameter.help for parameter in parameters if parameter.name == option)
    assert names <= set(re.findall(r"[\w+]+", text))
