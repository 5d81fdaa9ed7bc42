"""Finds modules that a recipe speaks of and a config does not: a layer that nobody counted must not stay as it is.

A config.json without num_nextn_predict_layers, or with too small a num_hidden_layers, plans fewer layers than the
checkpoint has. The rest would be served unprepared, and no one would be told. A recipe that does not name NextN layers
leaves them on purpose, or has forgotten them: layers that follow the decoder's are then no fault, and are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from weightprep.errors import RecipeError
from weightprep.formats.encoding import FOREIGN_SUFFIXES, WEIGHT_SUFFIXES
from weightprep.recipe import ModelPlan
from weightprep.recipe.resolve import NEXTN_GROUP

__all__ = ["check_coverage", "unclaimed_modules", "why_unclaimed"]

_SUFFIXES = (*WEIGHT_SUFFIXES, *FOREIGN_SUFFIXES)
_SHOWN = 3


def check_coverage(model: ModelPlan, tensors: Iterable[str]) -> None:
    """Compare the modules that `tensors` have, under any layer number, with those that `model` plans or keeps.

    :param tensors: names of the checkpoint's tensors
    :raises RecipeError: a module fits a source pattern of the recipe and is of no layer that config.json counts
    """
    pattern = _pattern(model)
    present = {module: None for module in _modules(tensors) if pattern.fullmatch(module)}
    planned = _planned(model)
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


def unclaimed_modules(model: ModelPlan, tensors: Iterable[str]) -> tuple[str, ...]:
    """Modules called like those of the recipe, wherever they are in the model, that no layer group of it names.

    :param tensors: names of the checkpoint's tensors
    """
    kinds = [module.source.rpartition("{prefix}")[2] for module in model.recipe.modules.values()]
    pattern = re.compile("|".join(rf".+{_any_number(kind)}" for kind in dict.fromkeys(kinds)) or r"(?!)")
    planned = _planned(model)
    return tuple(dict.fromkeys(name for name in _modules(tensors) if name not in planned and pattern.fullmatch(name)))


def why_unclaimed(model: ModelPlan) -> str:
    """What to say of each of :func:`unclaimed_modules`."""
    return f"no layer group of recipe {model.recipe.name} names this layer; stays as it is"


def _modules(tensors: Iterable[str]) -> Iterator[str]:
    return (name.removesuffix(suffix) for name in tensors for suffix in _SUFFIXES if name.endswith(suffix))


def _planned(model: ModelPlan) -> frozenset[str]:
    return frozenset((*(plan.source for plan in model.modules), *model.kept))


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
