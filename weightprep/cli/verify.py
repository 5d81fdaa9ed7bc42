"""`weightprep verify`: whether a result is exactly what the conversion of its source must be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightprep.cli.output import DEFAULT_WORKERS, command, print_json, print_lines, say

__all__ = ["verify"]

_SHOWN = 20


@command
def verify(
    src: Annotated[Path, typer.Argument(help="The checkpoint that was converted, or org/name\\[@revision].")],
    dst: Annotated[Path, typer.Argument(help="The result; SRC again for a sidecar that was added to it.")],
    recipe: Annotated[str | None, typer.Option(help="Recipe name or file, where the manifest's is not found.")] = None,
    allow_quality_loss: Annotated[
        bool, typer.Option("--allow-quality-loss", help="Accept modules below the floor where the manifest waives it.")
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Tensors compared at once; default: cores, at most 4.")
    ] = DEFAULT_WORKERS,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Read source and result again, and compare every tensor, the index, the config and every other file.

    Converted tensors are converted afresh and compared bit for bit. Exit code 1 if anything differs.

    Example:

      weightprep verify GLM-5.2 GLM-5.2-prepared
    """
    from weightprep.checkpoint.hub_source import locate
    from weightprep.checkpoint.manifest import MANIFEST_NAME, SIDECAR_MANIFEST
    from weightprep.cli.progress import progress
    from weightprep.convert.verify import verify as judge

    verdict = judge(
        locate(src), dst, recipe=recipe, allow_quality_loss=allow_quality_loss, workers=workers, watch=progress
    )
    if json:
        print_json(
            "verify",
            {
                "ok": not verdict.findings,
                "tensors": verdict.tensors,
                "modules": verdict.modules,
                "files": verdict.files,
                "below_floor": list(verdict.waived),
                "notes": list(verdict.notes),
                "findings": [
                    {"subject": finding.subject, "found": finding.found, "wanted": finding.wanted}
                    for finding in verdict.findings
                ],
            },
        )
    else:
        for finding in verdict.findings[:_SHOWN]:
            print_lines(str(finding))
        if len(verdict.findings) > _SHOWN:
            print_lines(f"... and {len(verdict.findings) - _SHOWN} more (--json lists all)")
        if not verdict.findings:
            print_lines(
                f"{dst}: sound; {verdict.tensors} tensors compared, {verdict.modules} module(s) converted afresh, "
                f"{verdict.files} other files"
            )
    for note in verdict.notes:
        say(note)
    if verdict.waived:
        say(
            f"{len(verdict.waived)} module(s) below the recipe's floor, {verdict.waived[0]} first: "
            "converted with --allow-quality-loss, says the manifest"
        )
    if verdict.findings:
        is_result = any((dst / name).exists() for name in (MANIFEST_NAME, SIDECAR_MANIFEST))
        conclusion = f"do not serve {dst}; convert again" if is_result else f"{dst} is not a result of convert"
        say(f"{len(verdict.findings)} finding(s): {conclusion}")
    return 1 if verdict.findings else None
