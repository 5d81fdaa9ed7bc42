"""Run the `console` examples of README.md and docs/ and write what they print below them; a test compares the pages.

python scripts/refresh_examples.py README.md docs/cli.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def refresh(page: Path) -> None:
    """Replace the output of each `$ ` command of the page; sessions of one page share a folder, as in the test."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "140",
        "NO_COLOR": "1",
    }
    with tempfile.TemporaryDirectory() as folder:

        def run_session(match: re.Match[str]) -> str:
            parts = []
            for part in re.split(r"^\$ ", match[1], flags=re.MULTILINE)[1:]:
                command = re.match(r"(?:.*\\\n)*.*\n", part)
                line = command[0] if command else part
                done = subprocess.run(
                    ["bash", "-c", line], cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False
                )
                parts.append(f"$ {line}" + "".join(f"{text.rstrip()}\n" for text in done.stdout.splitlines()))
            return "```console\n" + "".join(parts) + "```"

        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"^```console\n(.*?)^```", run_session, text, flags=re.MULTILINE | re.DOTALL), "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        refresh(Path(name).resolve())
