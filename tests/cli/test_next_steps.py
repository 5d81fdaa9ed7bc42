"""What convert prints last is pasted: each line must work as it stands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from weightprep.synth import synthesize

RECIPES = Path(__file__).parents[2] / "configs"
MAY_LEAVE_OUT = "sglang without weightprep loads this checkpoint as well"


def convert(folder: Path, *options: str) -> list[str]:
    """The last lines of a conversion of `folder`/src to `folder`/dst, run in `folder`."""
    command = [sys.executable, "-m", "weightprep", "convert", "src", "dst", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def line(lines: list[str], start: str) -> list[str]:
    (found,) = [text for text in lines if text.startswith(start)]
    return shlex.split(found.removeprefix(start))


def own_recipe(folder: Path) -> None:
    """A checkpoint of an architecture that no recipe of weightprep's own names, and a recipe file for it."""
    synthesize(folder / "src", layers=2, shards=1)
    config = folder / "src" / "config.json"
    config.write_text(config.read_text().replace("GlmMoeDsaForCausalLM", "FooForCausalLM"))
    text = (RECIPES / "glm_moe_dsa.yaml").read_text()
    text = text.replace("name: glm_moe_dsa", "name: foo").replace("GlmMoeDsaForCausalLM", "FooForCausalLM")
    (folder / "foo.yaml").write_text(text)


def test_a_recipe_file_goes_into_both_lines(tmp_path: Path) -> None:
    own_recipe(tmp_path)
    lines = convert(tmp_path, "--recipe", "foo.yaml", "--nextn", "keep", "--precision", "decoder=fp8")

    program, *arguments = line(lines, "next: ")
    assert program == "weightprep"
    done = subprocess.run([sys.executable, "-m", program, *arguments], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    serve = line(lines, "then: ")
    assert json.loads(serve[serve.index("--model-loader-extra-config") + 1]) == {
        "recipe": str(tmp_path / "foo.yaml"),
        "precision": {"decoder": "fp8"},
        "nextn": "keep",
    }
    # sglang has no class of this name
    assert not any(MAY_LEAVE_OUT in text for text in lines)


def test_verify_without_the_file_of_a_private_recipe_asks_for_it(tmp_path: Path) -> None:
    own_recipe(tmp_path)
    convert(tmp_path, "--recipe", "foo.yaml")
    command = [sys.executable, "-m", "weightprep", "verify", "src", "dst"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "weightprep.json: recipe foo: found recipe foo: no recipe of this name" in done.stderr
    assert "-> pass its file with --recipe FILE" in done.stderr


@pytest.mark.parametrize("options", [(), ("--recipe", "glm_moe_dsa")])
def test_a_known_architecture(tmp_path: Path, options: tuple[str, ...]) -> None:
    synthesize(tmp_path / "src", layers=2, shards=1)
    lines = convert(tmp_path, *options)
    assert line(lines, "next: ") == ["weightprep", "verify", "src", "dst"]
    serve = line(lines, "then: ")
    assert ("--model-loader-extra-config" in serve) == bool(options)
    assert any(MAY_LEAVE_OUT in text for text in lines)
    assert "      on ROCm, before the server starts: export SGLANG_USE_AITER=1" in lines


def test_heads_of_very_different_size_are_refused_by_the_worst_of_them(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", layers=1, shards=1)
    (shard,) = (tmp_path / "src").glob("*.safetensors")
    tensors = load_file(shard)
    name = "model.layers.0.self_attn.kv_b_proj"
    # one value of one head; the others keep their amax of well below 1
    tensors[f"{name}.weight"][0, 0] = 3e4
    save_file(tensors, shard, {"format": "pt"})
    arguments = [sys.executable, "-m", "weightprep", "convert", "src", "dst"]
    refused = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"error: {name}: found " in refused.stderr
    assert "dB SQNR of its worst head (1 module(s) below the floor)" in refused.stderr
    assert not (tmp_path / "dst").exists()
    assert any("--allow-quality-loss" in text for text in convert(tmp_path, "--allow-quality-loss"))


def test_what_sglang_alone_makes_of_bf16_is_not_promised(tmp_path: Path) -> None:
    """Nothing of it is quantized in the checkpoint either."""
    synthesize(tmp_path / "src", layers=2, encoding="fp8_block")
    lines = convert(tmp_path, "--precision", "bf16", "--requantize")
    assert any("which need not be bf16" in text for text in lines)
    assert not any("quantized kv_b_proj" in text for text in lines)


def test_a_group_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    synthesize(tmp_path / "src", layers=2)
    command = [sys.executable, "-m", "weightprep", "convert", "src", "dst", "--precision", "decoder=fp8,decoder=bf16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "each group once" in done.stderr
