"""A recipe that forgets the NextN layer leaves it slow; whoever wrote it is told before a server is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.synth import synthesize

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
REASON = "no layer group of recipe my_mla names this layer; stays as it is"
NEXTN = "model.layers.2.self_attn.kv_b_proj"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The page's recipe, for a GLM checkpoint of two decoder layers and a NextN layer."""
    synthesize(tmp_path / "src", layers=2, shards=1)
    (text,) = re.findall(r"^## A whole recipe\n\n```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "my_mla.yaml"
    path.write_text(text.replace("MyMlaForCausalLM", "GlmMoeDsaForCausalLM"))
    return path


def run(*arguments: object) -> tuple[str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def forget_nextn(recipe: Path) -> None:
    text = re.sub(r"^  nextn: .*\n", "", recipe.read_text(), flags=re.MULTILINE)
    recipe.write_text(text.replace("on: [decoder, nextn]", "on: [decoder]"))


def test_the_pages_recipe_has_the_nextn_layer(recipe: Path) -> None:
    planned = json.loads(
        run("convert", recipe.parent / "src", recipe.parent / "dst", "--recipe", recipe, "--dry-run", "--json")[0]
    )
    assert NEXTN in [module["module"] for module in planned["modules"]]
    assert planned["passed"] == []


def test_a_forgotten_layer_is_named(recipe: Path) -> None:
    forget_nextn(recipe)
    source, destination = recipe.parent / "src", recipe.parent / "dst"
    passed = [{"module": NEXTN, "reason": REASON}]

    assert f"{NEXTN}: {REASON}" in run("inspect", source, "--recipe", recipe)[0]
    assert json.loads(run("inspect", source, "--recipe", recipe, "--json")[0])["passed"] == passed
    assert f"{NEXTN}: {REASON}" in run("convert", source, destination, "--recipe", recipe, "--dry-run")[0]
    assert f"{NEXTN}: {REASON}" in run("convert", source, destination, "--recipe", recipe)[1]
    again = run("convert", destination, recipe.parent / "again", "--recipe", recipe)[0]
    assert again.startswith("nothing to convert")
    assert f"{NEXTN}: {REASON}" in again
    document = json.loads(run("convert", source, recipe.parent / "new", "--recipe", recipe, "--json")[0])
    assert document["passed"] == passed


def test_no_layer_is_named_that_was_kept_on_purpose(recipe: Path) -> None:
    document = run("convert", recipe.parent / "src", recipe.parent / "dst", "--nextn", "keep", "--dry-run", "--json")[0]
    assert json.loads(document)["passed"] == []
