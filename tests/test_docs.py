"""Every example in README.md and docs/ is run: the commands, their exit codes and what they print.

A fenced block marked `console` is a session: lines that start with `$ ` are commands, the lines below them what the
command prints on stdout. The blocks of one file share a folder and run in order. `...` on a line of its own stands for
left-out lines. Times and rates differ from run to run and are compared as `#`. Blocks marked `sh` are for other
machines (a server with a GPU): their flags are checked by the parser that they are written for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_VARYING = re.compile(r"\d[\d,.]* ?(s|ms|MB/s|GB/s)\b")


@dataclass(frozen=True, slots=True)
class Command:
    line: str
    output: str


def blocks(page: Path, kind: str) -> list[str]:
    return [body for language, body in _BLOCK.findall(page.read_text(encoding="utf-8")) if language == kind]


def commands(session: str) -> list[Command]:
    found: list[Command] = []
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        # a trailing backslash continues the command, as in a shell
        line, _, output = re.sub(r"\\\n\s*", "", part).partition("\n")
        found.append(Command(line.strip(), output))
    return found


def pattern(expected: str) -> re.Pattern[str]:
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + r"[ ]*\n"
        for line in expected.splitlines()
    ]
    return re.compile("".join(lines))


def run_page(page: Path, folder: Path) -> int:
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "140",
        "NO_COLOR": "1",
    }
    count = 0
    for session in blocks(page, "console"):
        for command in commands(session):
            done = subprocess.run(
                ["bash", "-c", command.line],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            wanted, shown = _VARYING.sub("#", command.output), _VARYING.sub("#", done.stdout)
            assert pattern(wanted).fullmatch(shown), (
                f"$ {command.line}\nprints\n{done.stdout}{done.stderr}\n{page.name} says\n{command.output}"
            )
            count += 1
    return count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_readme_has_examples_and_a_wrong_one_is_noticed(tmp_path: Path) -> None:
    assert len(blocks(ROOT / "README.md", "console")) >= 3
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match="echo one"):
        run_page(page, tmp_path)


def server_lines() -> list[str]:
    lines = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            joined = re.sub(r"\\\n\s*", "", block)
            lines += [
                line
                for line in joined.splitlines()
                if re.match(r"(sglang serve|python -m sglang.launch_server) ", line)
            ]
    return lines


def test_server_examples_are_accepted_by_sglangs_own_parser() -> None:
    lines = server_lines()
    assert lines, "the README shows how to serve"
    script = (
        "import json, sys; from sglang.srt.plugins import load_plugins; load_plugins();"
        "import argparse; from sglang.srt.server_args import ServerArgs;"
        "p = argparse.ArgumentParser(); ServerArgs.add_cli_args(p);"
        "[p.parse_args(argv) for argv in json.loads(sys.argv[1])]"
    )
    argvs = []
    for line in lines:
        words = shlex.split(line.split(" #")[0])
        argvs.append(words[2:] if words[0] == "sglang" else words[3:])
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(argvs)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
