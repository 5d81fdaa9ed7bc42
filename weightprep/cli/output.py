"""How every command ends: results on stdout, everything else on stderr, and one exit code for each kind of outcome.

Under --json stdout carries one document with a `schema`, also when the command fails.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import typer

from weightprep.errors import Interrupted, WeightprepError

__all__ = ["DEFAULT_WORKERS", "command", "print_json", "print_lines", "printable", "say"]

# More shards in flight than this gain nothing on one disk.
DEFAULT_WORKERS = min(os.cpu_count() or 1, 4)
P = ParamSpec("P")


def print_json(schema: str, document: Mapping[str, Any]) -> None:
    """Print the one document of a command, in ASCII: a stranger's names reach the terminal as escapes here too."""
    json.dump({"schema": f"weightprep.{schema}/1", **document}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_lines(*lines: str) -> None:
    """Print lines of the result."""
    for line in lines:
        print(printable(line))


def say(*lines: str) -> None:
    """Tell a person something that is not the result."""
    for line in lines:
        print(printable(line), file=sys.stderr)


def printable(text: str) -> str:
    """`text` with what moves a terminal's cursor, colours it or reverses the writing spelled as Python escapes.

    Names in checkpoints and manifests are a stranger's, and could otherwise paint over what is said of them. The end of
    a line is among it: a name may not begin a line of its own.
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """A command whose errors become messages and exit codes; `function` returns its own exit code (None: 0).

    0 done; 1 a contract, quality or verification failure; 2 bad input or usage; 130 interrupted.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("json", False))
        try:
            code = function(*args, **kwargs)
        except WeightprepError as error:
            if as_json:
                print_json("error", {"error": error.describe()})
            say(f"error: {error.subject}: found {error.found}; wanted {error.wanted}", f"  -> {error.remedy}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            interrupted = Interrupted(function.__name__.rstrip("_"))
            if as_json:
                print_json("error", {"error": interrupted.describe()})
            say(f"interrupted; {interrupted.remedy}")
            raise typer.Exit(interrupted.exit_code) from None
        except BrokenPipeError:
            # The reader has seen enough (`| head`); flushing at exit must not complain about it either.
            sys.stdout = None
            raise typer.Exit(128 + signal.SIGPIPE) from None
        raise typer.Exit(code or 0)

    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return run
