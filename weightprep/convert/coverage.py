"""Finds modules that a recipe speaks of and a config does not: a layer that nobody counted must not stay as it is.

A config.json without num_nextn_predict_layers, or with too small a num_hidden_layers, plans fewer layers than the
checkpoint has. The rest would be served unprepared, and no one would be told. A recipe that does not name NextN layers
leaves them on purpose, and layers that follow the decoder's are then no fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from weightprep.errors import RecipeError
from weightprep.formats.encoding import FOREIGN_SUFFIXES, WEIGHT_SUFFIXES
from weightprep.recipe import ModelPlan
from weightprep.recipe.resolve import NEXTN_GROUP

__all__ = ["check_coverage"]

_SUFFIXES = (*WEIGHT_SUFFIXES, *FOREIGN_SUFFIXES)
_SHOWN = 3


def check_coverage(model: ModelPlan, tensors: Iterable[str]) -> None:
    """Compare the modules that `tensors` have, under any layer number, with those that `model` plans or keeps.

    :param tensors: names of the checkpoint's tensors
    :raises RecipeError: a module fits a source pattern of the recipe and is of no layer that config.json counts
    """
    pattern = _pattern(model)
    modules = (name.removesuffix(suffix) for name in tensors for suffix in _SUFFIXES if name.endswith(suffix))
    present = {module: None for module in modules if pattern.fullmatch(module)}
    planned = {*(plan.source for plan in model.modules), *model.kept}
    outside = [module for module in present if module not in planned]
    if outside:
        shown = ", ".join(outside[:_SHOWN]) + (f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else "")
        raise RecipeError(
            f"recipe {model.recipe.name}: {shown}",
            found=f"{len(present)} modules of this kind in the checkpoint, {len(outside)} of them of no known layer",
            wanted=f"the {len(planned)} that the numbers of layers in config.json allow",
            remedy="correct num_hidden_layers and num_nextn_predict_layers in config.json (take the file from the "
            "model's repository again); what is not counted would be served as it is",
        )


def _pattern(model: ModelPlan) -> re.Pattern[str]:
    """Every source that covers NextN layers too, any number for its placeholders; without one, matches nothing."""
    recipe = model.recipe
    wrapper = recipe.wrappers.get(model.architecture)
    root = wrapper.prefix if wrapper is not None else ""
    sources = [
        module.source.replace("{prefix}", root + recipe.layers[group].prefix)
        for module in recipe.modules.values()
        if NEXTN_GROUP in module.on
        for group in module.on
    ]
    return re.compile("|".join(_any_number(source) for source in dict.fromkeys(sources)) or r"(?!)")


def _any_number(source: str) -> str:
    """A regular expression for `source`, whose placeholders stand for numbers."""
    return r"\d+".join(re.escape(text) for text in re.split(r"\{\w+\}", source))
