"""The JSON Schema of recipes, for editors: the models' own, with the known steps and their parameters filled in."""

from __future__ import annotations

from typing import Any

from weightprep.recipe.recipe import Recipe
from weightprep.transforms import transforms

__all__ = ["recipe_schema"]


def recipe_schema() -> dict[str, Any]:
    """What a recipe file may hold."""
    schema = Recipe.model_json_schema(by_alias=True)
    step = schema["$defs"]["StepPart"]
    step.pop("additionalProperties", None)
    step["properties"] = {}
    for transform in transforms().values():
        parameters = transform.params.model_json_schema()
        schema["$defs"].update(parameters.pop("$defs", {}))
        step["properties"][transform.name] = {**parameters, "description": transform.doc}
    step["additionalProperties"] = False
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
