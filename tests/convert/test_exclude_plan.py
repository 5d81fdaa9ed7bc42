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


def test_entries_that_name_nothing_are_listed_where_there_is_nothing_to_convert(tmp_path: Path) -> None:
    """The first that somebody with GLM-5-FP8 calls: its weights stay as they are."""
    source = synthesize(tmp_path / "src", encoding="fp8_block")
    for command in (("convert", str(source), str(tmp_path / "dst")), ("inspect", str(source))):
        shown = CliRunner().invoke(app, command).stdout
        assert "nothing to convert" in shown
        assert (
            "exclude entries that name nothing in this checkpoint, 4: model.layers.0.self_attn.indexers_proj" in shown
        )
        document = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
        assert document["unmatched_excludes"] == [f"model.layers.{i}.self_attn.indexers_proj" for i in range(4)]


def test_each_overridden_entry_is_named(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", encoding="mxfp4_experts")
    arguments = (tmp_path / "src", tmp_path / "dst", "--layout", "sidecar")
    modules = json.loads(plan(*arguments, "--json"))["modules"]
    assert [module["overrides_exclude"] for module in modules] == [module["module"] for module in modules]
    shown = plan(*arguments)
    assert shown.count("overrides the checkpoint's exclude entry") == 4
    assert "name nothing" not in shown
