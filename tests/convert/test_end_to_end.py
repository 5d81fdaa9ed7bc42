"""From a small checkpoint to a verified result, in every layout and encoding, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.synth import synthesize


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout


@pytest.mark.parametrize("layout", ["inline", "sidecar"])
@pytest.mark.parametrize(("encoding", "flags"), [("bf16", []), ("fp8_block", ["--requantize"])])
@pytest.mark.parametrize("shards", [1, 3])
def test_convert_then_verify(tmp_path: Path, layout: str, encoding: str, flags: list[str], shards: int) -> None:
    source, destination = tmp_path / "src", tmp_path / "dst"
    synthesize(source, encoding=encoding, shards=shards)

    code, out = run("convert", source, destination, "--layout", layout, "--json", *flags)

    document = json.loads(out)
    assert (code, document["schema"], document["state"]) == (0, "weightprep.convert/1", "done")
    assert len(document["results"]) == 4
    code, out = run("verify", source, destination, "--json")
    verdict = json.loads(out)
    assert (code, verdict["findings"]) == (0, [])
    assert verdict["modules"] == 4
    assert not (tmp_path / "dst.partial").exists()


def test_sidecar_in_place_adds_one_folder(tmp_path: Path) -> None:
    synthesize(tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    assert run("convert", tmp_path / "m", tmp_path / "m", "--layout", "sidecar")[0] == 0

    after = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir() if path.is_file()}
    assert after == before
    assert {path.name for path in (tmp_path / "m").iterdir()} - set(before) == {"weightprep"}
    assert run("verify", tmp_path / "m", tmp_path / "m")[0] == 0


def test_fp8_source_is_passed(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", encoding="fp8_block")

    code, out = run("convert", tmp_path / "src", tmp_path / "dst")

    assert code == 0
    assert "nothing to convert: 4 module(s) are already fp8_block" in out
    assert not (tmp_path / "dst").exists()


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    synthesize(tmp_path / "src")

    code, out = run("convert", tmp_path / "src", tmp_path / "dst", "--dry-run", "--json")

    document = json.loads(out)
    assert (code, document["state"]) == (0, "planned")
    assert document["tensors"] == {"passed": 149, "transformed": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
