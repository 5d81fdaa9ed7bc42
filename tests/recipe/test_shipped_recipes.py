"""What several shipped recipes say of one thing is the same: each file is whole, so the facts stand in each again."""

from __future__ import annotations

import math
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


def test_every_pipeline_has_the_floor_of_its_precision() -> None:
    """Without one, other weights in the right form are served."""
    floors = {"fp8": 28, "mxfp4": 16, "bf16": 40, "bf16+fp8": 28}
    for recipe in RECIPES:
        for module in recipe.modules.values():
            found = {
                name: pipeline.quality and pipeline.quality.min_sqnr_db for name, pipeline in module.pipelines().items()
            }
            assert found == floors, recipe.name
    # bf16 rounds to 2^-8 of a number at most
    assert floors["bf16"] < 20 * math.log10(2**8)
    page = (CONFIGS[0].parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
    assert "28 dB for fp8 and 16 dB for MXFP4" in page
    assert "Its floor is 40 dB" in page
    assert "floor of fp8, 28 dB" in page


def test_every_shipped_recipe_is_in_the_catalogue_of_its_page() -> None:
    page = (CONFIGS[0].parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| (?:GLM|DeepSeek|Kimi|as)", page, re.MULTILINE)
    assert sorted(table) == [recipe.name for recipe in RECIPES]
