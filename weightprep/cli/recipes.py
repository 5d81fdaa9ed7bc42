"""`weightprep recipes`: which there are, what one says, whether a file is one, and the schema that it follows."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

from weightprep.cli.output import command, print_json, print_lines

__all__ = ["recipes"]

recipes = typer.Typer(name="recipes", help="List, show and check recipes.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@recipes.command("list")
@command
def list_(json: _Json = False) -> int | None:
    """List the recipes that can be found, shipped ones and those in $WEIGHTPREP_RECIPES.

    Example:

      weightprep recipes list
    """
    from weightprep.recipe import list_recipes

    found = list_recipes()
    if json:
        rows = [
            {"name": r.name, "architectures": list(r.architectures), "description": r.description, "hash": r.hash}
            for r in found
        ]
        print_json("recipes", {"recipes": rows})
        return None
    for recipe in found:
        print_lines(f"{recipe.name:24} {', '.join(recipe.architectures)}", f"{'':24} {recipe.description}")
    return None


@recipes.command()
@command
def show(name: Annotated[str, typer.Argument(help="Recipe name or YAML file.")], json: _Json = False) -> int | None:
    """Print a recipe with every default filled in.

    Example:

      weightprep recipes show glm_moe_dsa > glm_moe_dsa.yaml
    """
    import yaml

    from weightprep.recipe import load_recipe

    recipe = load_recipe(name)
    content = recipe.model_dump(mode="json", by_alias=True)
    if json:
        print_json("recipe", {"hash": recipe.hash, "recipe": content})
    else:
        print_lines(*yaml.safe_dump(content, sort_keys=False).splitlines())
    return None


@recipes.command()
@command
def check(file: Annotated[str, typer.Argument(help="Recipe name or YAML file.")], json: _Json = False) -> int | None:
    """Check a recipe: its keys, its expressions, and that each step can follow the one before.

    Example:

      weightprep recipes check glm_moe_dsa.yaml
    """
    from weightprep.recipe import load_recipe

    recipe = load_recipe(file)
    if json:
        print_json("recipe-check", {"name": recipe.name, "hash": recipe.hash, "modules": list(recipe.modules)})
    else:
        print_lines(f"{recipe.name}: sound, {len(recipe.modules)} module(s)")
    return None


@recipes.command()
@command
def schema(json: _Json = False) -> int | None:
    """Print the JSON Schema of recipes, for editors.

    Example:

      weightprep recipes schema > recipe.schema.json
    """
    from weightprep.recipe import recipe_schema

    if json:
        print_json("recipe-schema", {"json_schema": recipe_schema()})
        return None
    print_lines(*jsonlib.dumps(recipe_schema(), indent=2).splitlines())
    return None
