"""Each architecture that ships with a recipe goes through inspect, convert and verify, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.synth import ARCHITECTURES, synthesize

SMALL = {"n_routed_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
RECIPES = {
    "glm_moe_dsa": "glm_moe_dsa",
    "glm4_moe_lite": "glm4_moe_lite",
    "deepseek_v2": "deepseek_v3",
    "deepseek_v2_lite": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "kimi_k25": "kimi_k2",
}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_is_whole() -> None:
    assert set(RECIPES) | {"deepseek_v4"} == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", RECIPES)
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("inline", "fp8"), ("inline", "bf16"), ("sidecar", "fp8"), ("sidecar", "mxfp4"), ("sidecar", "bf16")],
)
def test_inspect_convert_verify(tmp_path: Path, arch: str, layout: str, precision: str) -> None:
    encoding = "fp8_block" if precision == "bf16" else "bf16"
    source = synthesize(tmp_path / "src", arch=arch, encoding=encoding, layers=2, shards=2, overrides=SMALL)
    told = json.loads(run("inspect", source, "--target", "gfx950", "--json"))
    assert told["recipe"] == RECIPES[arch]
    made = json.loads(run("convert", source, tmp_path / "dst", "--layout", layout, "--precision", precision, "--json"))
    layers = 2 + (json.loads((source / "config.json").read_text()).get("num_nextn_predict_layers") or 0)
    assert len(made["results"]) == layers
    verdict = json.loads(run("verify", source, tmp_path / "dst", "--json"))
    assert (verdict["findings"], verdict["modules"]) == ([], layers)
    if layout == "inline":
        after = json.loads(run("inspect", tmp_path / "dst", "--target", "gfx950", "--json"))
        assert after["layers"], "the result is a checkpoint of the same recipe"


def test_deepseek_v4_has_nothing_to_convert_and_says_why(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "src", arch="deepseek_v4", layers=2, encoding="fp8_block_fp4_experts")
    assert "nothing to convert: attention has no kv_b_proj" in run("convert", source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
