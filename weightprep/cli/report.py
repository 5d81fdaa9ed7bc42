"""`weightprep report`: one HTML page about a conversion."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from weightprep.cli.output import command, print_json, print_lines
from weightprep.errors import CheckpointError

__all__ = ["report"]


@command
def report(
    dst: Annotated[Path, typer.Argument(help="The directory that convert wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    run: Annotated[Path | None, typer.Option(help="What convert --json printed, for the timings.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Write one self-contained page: errors, ranges and dtypes of a conversion. Needs `weightprep\\[report]`.

    Example:

      weightprep report GLM-5.2-prepared -o report.html
    """
    from weightprep.convert.placing import write_bytes
    from weightprep.convert.report import render_report

    if output.is_dir():
        raise _unwritable(output, "a directory")
    page = render_report(dst, run)
    temporary = output.with_name(f".weightprep-report.{os.getpid()}")
    try:
        write_bytes(output, page.encode(), temporary)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _unwritable(output, error.strerror or type(error).__name__) from None
    if json:
        print_json("report", {"path": str(output), "bytes": len(page.encode())})
    else:
        print_lines(f"{output}: open it in a browser")
    return None


def _unwritable(output: Path, found: str) -> CheckpointError:
    return CheckpointError(
        output,
        found=found,
        wanted="a file that can be written, in a directory that exists",
        remedy="choose another place for the page with --output",
    )
