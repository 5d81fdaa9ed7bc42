"""Finding recipes by name, file or architecture, and parsing them.

Shipped recipes lie in weightprep/configs of an installed wheel, and in configs/ at the root of a checkout. A user's own
directory comes first, named by the environment variable WEIGHTPREP_RECIPES.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from weightprep.errors import RecipeError, did_you_mean
from weightprep.recipe.base import UNKNOWN_KEY
from weightprep.recipe.check import check_recipe
from weightprep.recipe.recipe import Recipe
from weightprep.recipe.yaml_file import parse_yaml, read_text
from weightprep.transforms.refusal import refusal

__all__ = ["find_recipe", "list_recipes", "load_recipe", "recipe_directories", "shipped_architectures"]

USER_DIRECTORY = "WEIGHTPREP_RECIPES"


def recipe_directories() -> tuple[Path, ...]:
    """Existing directories in which recipes are looked up, first match first.

    :raises RecipeError: the user's own is named and is not there
    """
    user = os.environ.get(USER_DIRECTORY)
    if not user:
        return _shipped_directories()
    if not Path(user).is_dir():
        raise RecipeError(
            f"{USER_DIRECTORY}={user}",
            found="a file" if Path(user).exists() else "nothing at this path",
            wanted="a directory with recipes",
            remedy=f"correct the environment variable {USER_DIRECTORY}, or unset it",
        )
    return (Path(user), *_shipped_directories())


def _shipped_directories() -> tuple[Path, ...]:
    package = Path(__file__).resolve().parent.parent
    return tuple(path for path in (package / "configs", package.parent / "configs") if path.is_dir())


def shipped_architectures() -> frozenset[str]:
    """Entries of config.json's `architectures` that a recipe of weightprep's own names; sglang has a class for each."""
    files = _files(_shipped_directories()).values()
    return frozenset(name for path in files for name in _parse(path).architectures)


def list_recipes() -> tuple[Recipe, ...]:
    """Every recipe that can be found, ordered by name; a user's recipe hides a shipped one of the same name."""
    return tuple(_parse(path) for _, path in sorted(_files().items()))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """The recipe of this name, or the one in this file.

    :raises RecipeError: no such recipe or file, malformed YAML, unknown key, wrong version, steps that do not compose
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return _parse(path)
    files = _files()
    if str(name_or_path) not in files:
        raise RecipeError(
            f"recipe {name_or_path}",
            found="no recipe of this name",
            wanted=f"one of {', '.join(sorted(files))}, or a path to a .yaml file",
            remedy=did_you_mean(str(name_or_path), files, "`weightprep recipes list` shows them"),
        )
    return _parse(files[str(name_or_path)])


def find_recipe(architecture: str, model_type: str | None = None) -> Recipe:
    """The recipe for an entry of config.json's `architectures`.

    :param model_type: config.json's `model_type`; decides where two recipes name the same architecture
    :raises RecipeError: if no recipe names it, or the file of one that does is unsound
    """
    every = _usable(architecture)
    recipes = [recipe for recipe in every if architecture in recipe.architectures and not recipe.by_name_only]
    recipes.sort(key=lambda recipe: (model_type not in recipe.model_types, bool(recipe.model_types), recipe.name))
    if not recipes:
        known = sorted({name for recipe in every for name in recipe.architectures})
        raise RecipeError(
            f"architecture {architecture}",
            found="no recipe for it",
            wanted=f"one of {', '.join(known)}",
            remedy=did_you_mean(
                architecture,
                known,
                "where attention is MLA (config.json has kv_lora_rank), `weightprep recipes show deepseek_v3 > "
                "my_mla.yaml`, change name (to my_mla, the file's name), architectures and the layers' prefix in it, "
                "and pass --recipe my_mla.yaml (docs/recipes.md)",
            ),
        )
    return recipes[0]


def _usable(architecture: str) -> list[Recipe]:
    """Every sound recipe; an unsound one that cannot be the one for `architecture` stands in nobody's way.

    :raises RecipeError: an unsound file has the architecture's name in it
    """
    recipes = []
    for path in _files().values():
        try:
            text = read_text(path)
        except RecipeError:
            continue
        try:
            recipes.append(_recipe(text, path))
        except RecipeError:
            if architecture in text:
                raise
    return recipes


def _files(directories: Iterable[Path] | None = None) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for directory in recipe_directories() if directories is None else directories:
        for path in sorted(directory.glob("*.yaml")):
            files.setdefault(path.stem, path)
    return files


def _parse(path: Path) -> Recipe:
    return _recipe(read_text(path), path)


# PyYAML takes tens of milliseconds for a recipe, and every plan of a model looks through all of them.
@lru_cache(maxsize=64)
def _recipe(text: str, path: Path) -> Recipe:
    document = parse_yaml(text, path)
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise _refusal(error.errors()[0], path) from None
    if path.stem != recipe.name:
        raise RecipeError(
            f"{path}: name",
            found=recipe.name,
            wanted=f"{path.stem}, the file's name",
            remedy="rename the file or the recipe",
        )
    check_recipe(recipe, str(path))
    return recipe


def _refusal(error: ErrorDetails, path: Path) -> RecipeError:
    place = [str(part) for part in error["loc"]]
    remedy = "`weightprep recipes schema` prints what is allowed"
    if error["type"] != UNKNOWN_KEY:
        plain = refusal(error, remedy)
        return RecipeError(
            f"{path}: {'.'.join(place) or 'top level'}", found=plain.found, wanted=plain.wanted, remedy=plain.remedy
        )
    key, known = error["ctx"]["key"], error["ctx"]["known"]
    return RecipeError(
        f"{path}: {'.'.join([*place, key])}",
        found=error["msg"],
        wanted=f"one of {', '.join(known)}",
        remedy=did_you_mean(key, known, remedy),
    )
