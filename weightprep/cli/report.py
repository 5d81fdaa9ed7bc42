"""`weightprep report`: one HTML page about a conversion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from weightprep.cli.output import command, print_json

__all__ = ["report"]

_MAX_RUN_BYTES = 64 * 2**20


@command
def report(
    dst: Annotated[Path, typer.Argument(help="The directory that convert wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    run: Annotated[Path | None, typer.Option(help="What convert --json printed, for the timings.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Write one self-contained page: errors, ranges and dtypes of a conversion. Needs `weightprep[report]`.

    Example:

      weightprep report GLM-5.2-prepared -o report.html
    """
    from weightprep.checkpoint.json_file import read_object
    from weightprep.convert.placing import write_bytes
    from weightprep.convert.report import render_report

    page = render_report(dst, None if run is None else read_object(run, max_bytes=_MAX_RUN_BYTES))
    write_bytes(output, page.encode(), output.with_name(f".weightprep-report.{os.getpid()}"))
    if json:
        print_json("report", {"path": str(output), "bytes": len(page.encode())})
    else:
        print(f"{output}: open it in a browser")
    return None
