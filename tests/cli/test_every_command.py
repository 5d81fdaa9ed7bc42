"""What every command has: an example in its help that is a command line of it, and --json."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from weightprep.cli import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        # typer brings a click of its own, so its classes cannot be asked for
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids="-".join)
def test_examples_and_json(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert any("--json" in parameter.opts for parameter in command.params)
    _, marker, examples = (command.help or "").partition("Example")
    assert marker, "no example"
    lines = [line.strip() for line in examples.splitlines() if line.strip().startswith("weightprep ")]
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" > ")[0].partition("   (")[0])
        assert words[1 : 1 + len(path)] == list(path), line
        # parsed, not run: an option or an argument that the command does not have is an error
        command.make_context(path[-1], words[1 + len(path) :])
