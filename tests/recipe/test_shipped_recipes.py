"""What several shipped recipes say of one thing is the same: each file is whole, so the facts stand in each again."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from weightprep.recipe import Recipe, load_recipe
from weightprep.recipe.pipeline import PipelinePart

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
RECIPES: tuple[Recipe, ...] = tuple(load_recipe(path) for path in CONFIGS)


def test_contracts_of_one_name_are_one() -> None:
    found = defaultdict(set)
    for recipe in RECIPES:
        for name, contract in recipe.contracts.items():
            found[name].add(tuple(sorted((role, part.model_dump_json()) for role, part in contract.items())))
    assert {name: len(kinds) for name, kinds in found.items()} == dict.fromkeys(found, 1)


def test_pipelines_of_one_precision_are_one() -> None:
    found = defaultdict(set)
    for recipe in RECIPES:
        for name, module in recipe.modules.items():
            for precision, pipeline in module.pipelines().items():
                content = pipeline.model_dump_json(include=set(PipelinePart.model_fields))
                found[name, precision].add(content)
    assert len(found) > 1
    assert {key: len(kinds) for key, kinds in found.items()} == dict.fromkeys(found, 1)


def test_every_shipped_recipe_is_in_the_catalogue_of_its_page() -> None:
    page = (CONFIGS[0].parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| (?:GLM|DeepSeek|Kimi|as)", page, re.MULTILINE)
    assert sorted(table) == [recipe.name for recipe in RECIPES]
