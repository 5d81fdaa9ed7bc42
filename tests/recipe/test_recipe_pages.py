"""What docs/recipes.md, docs/formats.md and docs/contracts.md say against the code."""

from __future__ import annotations

import re
from pathlib import Path

from weightprep.contracts import predict
from weightprep.formats import SCALE_SUFFIXES, Encoding
from weightprep.recipe import list_recipes, load_recipe
from weightprep.recipe.module import LayerPart, ModulePart
from weightprep.recipe.recipe import Recipe
from weightprep.transforms import transforms

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECIPES = (DOCS / "recipes.md").read_text(encoding="utf-8")


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", RECIPES, re.DOTALL)
    path = tmp_path / "my_mla.yaml"
    path.write_text(example, encoding="utf-8")
    assert load_recipe(path).modules["kv_b"].precision == "fp8"


def test_the_example_of_a_step_is_a_step() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL) if "@transform" in block)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["clip"].params.model_json_schema()["required"] == ["limit"]  # type: ignore[attr-defined]


def test_every_recipe_step_and_key_is_described() -> None:
    for recipe in list_recipes():
        assert f"`{recipe.name}`" in RECIPES, recipe.name
    for name in transforms():
        assert f"| `{name}` |" in RECIPES, name
    for model in (Recipe, ModulePart, LayerPart):
        for key, field in model.model_fields.items():
            if key != "description":
                assert f"`{field.alias or key}`" in RECIPES or f"`{key}:" in RECIPES, key


def test_every_encoding_and_name_of_a_scale_is_described() -> None:
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    for name in (*(encoding.value for encoding in Encoding), *SCALE_SUFFIXES):
        assert name in text, name


def test_what_is_said_to_be_unsound_is_predicted_unsound() -> None:
    fp8 = {"w_kc": "float8_e4m3fn", "w_vc": "float8_e4m3fn", "w_scale": "tensor"}
    assert not predict("gfx950", "0.5.23", {**fp8, "w_vc": "bfloat16"}).sound
    assert not predict("gfx950", "0.5.23", {**fp8, "w_scale": "float"}).sound
    assert not predict("sm90", "0.5.23", {"w_kc": "uint8", "w_vc": "uint8"}).sound
    assert predict("gfx950", "0.5.23", fp8).fast
