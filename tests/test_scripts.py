"""The scripts run: those that need no GPU on something small, the others at least as far as their options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
# parts of other scripts, and two that take no options
WITHOUT_OPTIONS = {
    "convert_peers",
    "glm_attention",
    "measure_quality",
    "refresh_examples",
    "runtime_cases",
    "runtime_peers",
}


def run(name: str, *args: str) -> str:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted({path.stem for path in SCRIPTS.glob("*.py")} - WITHOUT_OPTIONS))
def test_options_are_explained(name: str) -> None:
    assert run(name, "--help").startswith("usage: ")


@pytest.mark.parametrize("mode", ["full", "linked"])
def test_converters_are_compared(mode: str, tmp_path: Path) -> None:
    small = ("--tiny", "--size", "0.9GB", "--shard-size", "0.004GB", "--rounds", "1", "--cold", "nothing")
    sizes = ("--size", "0.9GB") if mode == "full" else ("--size", "0.04GB")
    table = run(
        "bench_convert", *small, *sizes, "--mode", mode, "--sidecar", "--peers", "naive", "--directory", str(tmp_path)
    )
    link = "copy" if mode == "full" else "hard"
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["`cp -r`", f"`convert --link {link}`", f"`convert --link {link} --layout sidecar`", "naive"]
    assert not list(tmp_path.iterdir())
