"""Every architecture that the installed sglang builds on the MLA classes has a recipe, or docs/recipes.md says that it
has none.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from weightprep.errors import RecipeError
from weightprep.recipe import find_recipe, list_recipes

ROOT = "DeepseekV2WeightLoaderMixin"
DOCS = (Path(__file__).resolve().parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")


def registry() -> tuple[set[str], set[str]]:
    """Names in sglang's EntryClass lists: of classes that inherit the loader of MLA weights, and of classes whose code
    builds or calls one of those.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    bases: dict[str, set[str]] = {}
    uses: dict[str, set[str]] = {}
    entries: set[str] = set()
    for path in Path(next(iter(spec.submodule_search_locations or ()))).glob("srt/models/*.py"):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {name for base in node.bases for name in _names(base)}
                uses[node.name] = set(_names(node))
            elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "EntryClass" for t in node.targets):
                entries |= set(_names(node.value))
    inherit = {ROOT}
    while more := {name for name, of in bases.items() if of & inherit} - inherit:
        inherit |= more
    return inherit & entries, {name for name in entries - inherit if uses.get(name, set()) & inherit}


def _names(node: ast.AST) -> list[str]:
    found = [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]
    return found + [child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)]


def test_each_is_covered_or_named_as_not_covered() -> None:
    inherit, build = registry()
    assert {"DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLMNextN", "Glm4MoeLiteForCausalLM"} <= inherit
    assert {"KimiK25ForConditionalGeneration", "Glm5NextForConditionalGeneration"} <= build
    covered = {name for recipe in list_recipes() for name in recipe.architectures}
    section = DOCS.split("## Architectures without a recipe")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert (inherit | build) - covered == named


def test_an_unknown_one_is_told_how_to_go_on() -> None:
    with pytest.raises(RecipeError, match=r"kv_lora_rank.*show deepseek_v3 > my_mla\.yaml.*--recipe my_mla\.yaml"):
        find_recipe("GigaChat35ForCausalLM")
