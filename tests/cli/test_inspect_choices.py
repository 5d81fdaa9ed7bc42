"""Which engine and hardware `inspect` judges by where little was named, and why a path is not fast."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.contracts import READ_RELEASES, TARGETS
from weightprep.contracts.gates import TARGET_NAMES
from weightprep.engines.sglang.options import split_options
from weightprep.errors import EngineError
from weightprep.synth import synthesize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("inspect") / "model", arch="glm_moe_dsa", layers=1, shards=1)


def inspect(source: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", str(source), *arguments])


def installed(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", answer)


@pytest.mark.parametrize(
    ("version", "judged", "source_of_it"),
    [
        ("0.5.15", "0.5.15", "installed here"),
        ("0.5.23+rocm700", "0.5.23+rocm700", "installed here"),
        (
            "0.0.0.dev0",
            READ_RELEASES[-1],
            "the newest that was read: 0.0.0.dev0, which is installed, names no release",
        ),
        (None, READ_RELEASES[-1], "none is installed: the newest that was read"),
    ],
)
def test_the_installed_engine_is_the_default(
    version: str | None, judged: str, source_of_it: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(version, monkeypatch)
    assert f"sglang=={judged} ({source_of_it})" in inspect(source).stdout
    told = json.loads(inspect(source, "--json").stdout)
    assert (told["engine"], told["engine_from"], told["engine_note"]) == (f"sglang=={judged}", source_of_it, None)


def test_a_release_above_those_that_were_read_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = f"gates were read up to {READ_RELEASES[-1]}"
    done = inspect(source, "--engine", "sglang==0.6.1")
    assert done.exit_code == 0
    assert note in done.stderr
    installed("0.5.24.post1", monkeypatch)
    assert note in json.loads(inspect(source, "--json").stdout)["engine_note"]


def test_a_release_below_is_an_error_though_it_is_installed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inspect(source, "--engine", "sglang==0.5.11").exit_code == 2
    installed("0.5.11", monkeypatch)
    done = inspect(source)
    assert done.exit_code == 2
    assert "sglang 0.5.11" in done.stderr


@pytest.mark.parametrize(
    ("target", "path", "reason"),
    [
        ("gfx950", "bf16 (WRONG)", "torch.bmm takes w_scale for float, but it is tensor"),
        ("gfx942", "bf16 (WRONG)", "torch.bmm takes w_scale for float, but it is tensor"),
        ("cpu", "bf16+fp8_dequantized (slow)", "w.to(bfloat16) * w_scale in each call"),
    ],
)
def test_a_prepared_path_that_is_not_fast_has_its_reason(target: str, path: str, reason: str, source: Path) -> None:
    lines = inspect(source, "--precision", "bf16+fp8", "--target", target).stdout.splitlines()
    closing = [line for line in lines if line.startswith(f"{target}: ")]
    assert len(closing) == 1
    assert path in closing[0]
    assert reason in closing[0]


def test_one_map_names_the_hardware(source: Path) -> None:
    """`mi355x` is told its target by inspect and by the loader alike."""
    assert tuple(TARGET_NAMES) == TARGETS
    asked = inspect(source, "--target", "mi355x")
    assert asked.exit_code == 2
    with pytest.raises(EngineError) as refused:
        split_options({"target": "mi355x"})
    for message in (asked.stderr, str(refused.value)):
        assert "gfx950 (MI350X, MI355X), gfx942 (MI300X)" in message
