"""inspect's word on DeepSeek-V4's compressors, against headers of a synthesized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from weightprep.cli import app


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4") / "checkpoint"
    done = CliRunner().invoke(app, ["synth", str(folder), "--arch", "deepseek_v4"])
    assert done.exit_code == 0, done.output
    return folder


def compressors(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["inspect", str(folder), "--json", *arguments])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["compressors"]
    return found


def test_every_compressor_is_counted_by_kind(v4: Path) -> None:
    config = json.loads((v4 / "config.json").read_text())
    ratios = config["compress_ratios"]
    found = {kind["kind"]: kind for kind in compressors(v4)}
    assert {name: kind["count"] for name, kind in found.items()} == {
        "compressor_ratio_4": ratios.count(4),
        "indexer_compressor_ratio_4": ratios.count(4),
        "compressor_ratio_128": ratios.count(128),
    }
    for kind in found.values():
        assert kind["dtypes"] == {"wkv": "bfloat16", "wgate": "bfloat16", "ape": "float32"}
        assert (kind["today"]["path"], kind["today"]["fast"]) == ("compressor_widened", False)
        assert (kind["prepared"]["path"], kind["prepared"]["fast"]) == ("compressor_direct", True)


@pytest.mark.parametrize(
    ("target", "version", "producer"),
    [
        ("gfx950", "0.5.12", None),
        ("gfx950", "0.5.15", "linear_bf16_fp32"),
        ("gfx942", "0.5.18", "linear_bf16_fp32"),
        ("gfx950", "0.5.20", "_compute_wkv_gate"),
        ("gfx950", "0.5.23", "_compute_wkv_gate"),
        ("sm90", "0.5.23", None),
        ("cpu", "0.5.15", None),
    ],
)
def test_the_hook_follows_target_and_release(v4: Path, target: str, version: str, producer: str | None) -> None:
    for kind in compressors(v4, "--target", target, "--engine", f"sglang=={version}"):
        if producer is None:
            assert kind["hooks"] == []
            assert kind["today"] == kind["prepared"]
            assert kind["today"]["path"] == "compressor_float32"
        else:
            assert kind["hooks"][0].endswith(producer)
            assert kind["hooks"][1].endswith("compress_forward")


def test_a_gate_weight_in_float32_keeps_the_widening_and_says_why(v4: Path, tmp_path: Path) -> None:
    changed = None
    for file in sorted(v4.iterdir()):
        target = tmp_path / file.name
        if file.suffix != ".safetensors":
            target.write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name in tensors:
            if changed is None and name.endswith("attn.compressor.wgate.weight") and "indexer" not in name:
                changed, tensors[name] = name, tensors[name].float()
        save_file(tensors, target)
    assert changed is not None
    odd = [kind for kind in compressors(tmp_path) if kind["dtypes"]["wgate"] == "float32"]
    assert [kind["count"] for kind in odd] == [1]
    assert odd[0]["prepared"]["path"] == "compressor_widened"
    assert odd[0]["prepared"]["reason"].startswith("wgate is float32: the direct path reads")
    assert odd[0]["hooks"] == []


def test_the_table_stands_beside_nothing_to_convert(v4: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(v4)])
    assert done.exit_code == 0
    assert "nothing to convert: attention has no kv_b_proj" in done.output
    assert "compressor_widened (slow)" in done.output
    assert "compressor_direct (fast)" in done.output
    assert "kernel(s) per step go away with --load-format weightprep" in done.output


def test_an_unknown_target_or_release_is_an_error(v4: Path) -> None:
    for arguments in (("--target", "gfx906"), ("--engine", "sglang==0.5.10")):
        assert CliRunner().invoke(app, ["inspect", str(v4), *arguments]).exit_code == 2


def test_other_architectures_have_none(tmp_path: Path) -> None:
    folder = tmp_path / "glm"
    assert CliRunner().invoke(app, ["synth", str(folder), "--arch", "glm_moe_dsa"]).exit_code == 0
    assert compressors(folder) == []


def test_group_scales_are_told_of_where_a_release_transposes_them(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    made = CliRunner().invoke(app, ["synth", str(folder), "--arch", "deepseek_v3", "--encoding", "fp8_block"])
    assert made.exit_code == 0, made.output
    for version, told in (("0.5.18", True), ("0.5.23", False)):
        arguments = ["inspect", str(folder), "--target", "gfx950", "--target", "sm90", "--engine", f"sglang=={version}"]
        table = CliRunner().invoke(app, arguments)
        assert ("gfx950: activation scales: today scales_transposed (slow)" in table.output) is told
        assert "sm90: activation scales" not in table.output
        (scales,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["group_scales"]
        assert (scales["target"], scales["today"]["fast"], scales["prepared"]["fast"]) == ("gfx950", not told, True)
