"""What is told to whoever writes a recipe of their own: whose mistake it is, and how to begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.errors import RecipeError
from weightprep.recipe import find_recipe, load_recipe, resolve
from weightprep.synth import synthesize

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_attention_heads": 4,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "kv_lora_rank": 128,
    "num_hidden_layers": 1,
}


def test_a_misspelt_config_key_is_the_recipes_mistake(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "glm_moe_dsa.yaml"
    own = tmp_path / "my_mla.yaml"
    text = shipped.read_text(encoding="utf-8").replace("name: glm_moe_dsa", "name: my_mla")
    own.write_text(text.replace("rank: kv_lora_rank", "rank: kv_lora_rnk"), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"recipe my_mla: dims.rank: found 'kv_lora_rnk'.*wanted 'kv_lora_rank'"):
        resolve(load_recipe(own), CONFIG)


def test_a_config_without_the_key_is_the_configs() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "kv_lora_rank"}
    with pytest.raises(RecipeError, match=r"config.json: kv_lora_rank: found nothing"):
        resolve(load_recipe("glm_moe_dsa"), config)


def test_an_unknown_architecture_is_told_how_to_begin() -> None:
    with pytest.raises(RecipeError, match=r"weightprep recipes show deepseek_v3 > my_mla.yaml"):
        find_recipe("MyMlaForCausalLM")


@pytest.mark.parametrize("options", [[], ["--recipe", "glm_moe_dsa"]])
@pytest.mark.parametrize("architectures", [None, []])
def test_a_config_without_architectures_has_one_remedy(
    tmp_path: Path, options: list[str], architectures: list[str] | None
) -> None:
    config = synthesize(tmp_path / "src", layers=1, shards=1) / "config.json"
    content = {**json.loads(config.read_text()), "architectures": architectures}
    config.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "src"), *options, "--json"])
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["subject"].endswith("config.json: architectures")
    assert error["found"] == "none"
    assert "GlmMoeDsaForCausalLM" in error["wanted"]
    assert "add the name to it" in error["remedy"]
    assert "recipes list" not in error["remedy"]


def test_a_misspelt_architecture_under_a_recipe_is_answered_with_the_right_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'GlmMoeDsaForCausalLM'"):
        resolve(load_recipe("glm_moe_dsa"), {**CONFIG, "architectures": ["GlmMoeDsaForCasualLM"]})
    with pytest.raises(RecipeError, match="did you mean 'GlmMoeDsaForCausalLM'"):
        find_recipe("GlmMoeDsaForCasualLM")


def test_the_verdict_on_a_recipe_is_a_result() -> None:
    done = CliRunner().invoke(app, ["recipes", "check", "glm_moe_dsa"])
    assert (done.exit_code, done.stdout) == (0, "glm_moe_dsa: sound, 1 module(s)\n")
