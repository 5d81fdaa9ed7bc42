"""The plan names the exclude entries that it overrides and those that name nothing, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.synth import synthesize


def plan(*args: object) -> str:
    result = CliRunner().invoke(app, ["convert", *(str(arg) for arg in args), "--dry-run"])
    assert result.exit_code == 0
    return result.stdout


def test_entries_that_name_nothing_are_listed(tmp_path: Path) -> None:
    """GLM's published list calls indexer.weights_proj by a name that no tensor has."""
    synthesize(tmp_path / "src", encoding="fp8_block")
    arguments = (tmp_path / "src", tmp_path / "dst", "--requantize")
    expected = [f"model.layers.{i}.self_attn.indexers_proj" for i in range(4)]
    assert json.loads(plan(*arguments, "--json"))["unmatched_excludes"] == expected
    shown = next(line for line in plan(*arguments).splitlines() if "name nothing" in line)
    assert ", 4: model.layers.0.self_attn.indexers_proj" in shown


def test_each_overridden_entry_is_named(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", encoding="mxfp4_experts")
    arguments = (tmp_path / "src", tmp_path / "dst", "--layout", "sidecar")
    modules = json.loads(plan(*arguments, "--json"))["modules"]
    assert [module["overrides_exclude"] for module in modules] == [module["module"] for module in modules]
    shown = plan(*arguments)
    assert shown.count("overrides the checkpoint's exclude entry") == 4
    assert "name nothing" not in shown
