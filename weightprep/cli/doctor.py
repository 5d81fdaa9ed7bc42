"""`weightprep doctor`: would `--load-format weightprep` work in this environment, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from weightprep.cli.output import command, print_json, print_lines

__all__ = ["doctor"]

_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


@command
def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> int | None:
    """Examine this environment; exit code 1 if the sglang flag would not work in it.

    Example:

      weightprep doctor --json
    """
    from weightprep.engines.sglang.doctor import examine

    findings = examine()
    problems = sum(finding.status == "problem" for finding in findings)
    if json:
        print_json("doctor", {"works": problems == 0, "findings": [asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print_lines(f"{_MARKS[finding.status]}  {finding.subject.ljust(width)}  {finding.found}")
            if finding.remedy:
                print_lines(f"{'':9}{'':{width}}  -> {finding.remedy}")
        verdict = "--load-format weightprep works here" if problems == 0 else f"{problems} problem(s) to solve first"
        print_lines(verdict)
    return 1 if problems else None
