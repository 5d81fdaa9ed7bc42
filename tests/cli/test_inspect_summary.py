"""The last lines of inspect say what its rows say, and what they advise works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weightprep.cli import app
from weightprep.cli.next_steps import AITER_SWITCH
from weightprep.engines.sglang.hardware import AITER_VARIABLE
from weightprep.synth import synthesize

ENGINE = ("--engine", "sglang==0.5.23")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arch", "encoding", "target", "verdicts", "layout"),
    [
        ("glm_moe_dsa", "bf16", "gfx950", {"slow": 1}, "inline"),
        ("glm_moe_dsa", "mxfp4", "gfx950", {"WRONG": 3}, "inline"),
        ("deepseek_v3", "mxfp4", "gfx950", {"WRONG": 1}, "inline"),
        ("deepseek_v3", "mxfp4_experts", "gfx950", {"slow": 1}, "inline"),
        ("glm_moe_dsa", "int8_block", "sm90", {"slow": 3}, "sidecar"),
        ("glm_moe_dsa", "int8_channel", "gfx950", {"slow": 3}, "sidecar"),
        ("deepseek_v3", "fp8_block", "sm90", {"slow": 3}, None),
    ],
)
def test_counts_words_and_advice(
    arch: str, encoding: str, target: str, verdicts: dict[str, int], layout: str | None, tmp_path: Path
) -> None:
    source = synthesize(tmp_path / "src", arch, layers=2, shards=1, encoding=encoding)
    done = run("inspect", source, "--target", target, *ENGINE)
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{target}: ")]
    found = [re.search(r": (\d+) of 3 layer\(s\) are (\w+) today and fast once prepared", line) for line in lines]
    assert {match[2]: int(match[1]) for match in found if match} == verdicts
    for line in lines:
        assert (AITER_SWITCH in line) is target.startswith("gfx")
        commands = re.findall("`(.*?)`", line)
        assert len(commands) == (layout is not None)
        for command in commands:
            program, verb, *options = shlex.split(command)
            assert program == "weightprep"
            assert ("sidecar" in options) is (layout == "sidecar")
            converted = run(verb, source, tmp_path / "dst", *options)
            assert converted.exit_code == 0, converted.output
            assert (tmp_path / "dst" / "weightprep.json").exists()


@pytest.mark.parametrize("encoding", ["fp8_block", "fp8_channel"])
def test_what_is_fast_is_said_to_be_and_nothing_to_convert_as_convert_says(encoding: str, tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, shards=1, encoding=encoding)
    said = json.loads(run("convert", source, tmp_path / "dst", "--json").stdout)
    assert said["state"] == "nothing_to_convert"
    done = run("inspect", source, *ENGINE)
    assert f"nothing to convert: {said['reason']}" in done.stdout.splitlines()
    assert f"gfx950: all 3 layer(s) are fast today, with {AITER_SWITCH}" in done.stderr.splitlines()
    assert json.loads(run("inspect", source, *ENGINE, "--json").stdout)["nothing_to_convert"] == said["reason"]


def test_an_architecture_that_sglang_may_not_have(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", layers=2, shards=1)
    known = run("inspect", source, *ENGINE)
    assert "suppose" not in known.output
    assert json.loads(run("inspect", source, *ENGINE, "--json").stdout)["today_note"] is None
    config, shipped = source / "config.json", Path(__file__).parents[2] / "configs" / "glm_moe_dsa.yaml"
    config.write_text(config.read_text().replace("GlmMoeDsaForCausalLM", "FooForCausalLM"))
    text = shipped.read_text().replace("name: glm_moe_dsa", "name: foo")
    (tmp_path / "foo.yaml").write_text(text.replace("GlmMoeDsaForCausalLM", "FooForCausalLM"))
    done = run("inspect", source, "--recipe", tmp_path / "foo.yaml", *ENGINE)
    note = '"today" supposes that sglang loads FooForCausalLM as it loads DeepSeek'
    assert note in done.stdout
    assert "are slow today (supposed) and fast once prepared" in done.stderr
    document = json.loads(run("inspect", source, "--recipe", tmp_path / "foo.yaml", *ENGINE, "--json").stdout)
    assert document["today_note"].startswith(note)


ROW = re.compile(
    r"^\| [^|]+ \| `(\w+)` \| `(\w+)` \| (\w+) \| (\w+) \| (converts|nothing to convert) \|$", re.MULTILINE
)
GAINS = ROW.findall((Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8"))


def test_the_page_has_the_table() -> None:
    assert len(GAINS) == 8


@pytest.mark.parametrize(("arch", "encoding", "decoder", "nextn", "convert"), GAINS)
def test_the_pages_table_is_what_inspect_says(
    arch: str, encoding: str, decoder: str, nextn: str, convert: str, tmp_path: Path
) -> None:
    source = synthesize(tmp_path / "src", arch, layers=2, shards=1, encoding=encoding)
    document = json.loads(run("inspect", source, *ENGINE, "--json").stdout)
    found: dict[str, set[str]] = {"decoder": set(), "nextn": set()}
    for layer in document["layers"]:
        today = layer["today"]
        found[layer["group"]].add("fast" if today["fast"] else "slow" if today["sound"] else "WRONG")
        assert layer["prepared"]["fast"]
    assert found == {"decoder": {decoder}, "nextn": {nextn} - {"none"}}
    assert (document["nothing_to_convert"] is None) is (convert == "converts")


def test_the_switch_is_the_one_that_sglang_reads() -> None:
    assert f"{AITER_VARIABLE}=1" == AITER_SWITCH
