"""From a recipe and a config.json to a plan: which precision each layer takes, and every module's name."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from weightprep.errors import RecipeError, did_you_mean
from weightprep.recipe.check import steps_of
from weightprep.recipe.expression import evaluate, names_in
from weightprep.recipe.module import LayerPart, ModulePart
from weightprep.recipe.plan import ModelPlan, ModulePlan
from weightprep.recipe.recipe import Recipe

__all__ = ["NEXTN_GROUP", "PrecisionChoice", "no_architectures", "resolve"]

# The group of layers that predicts further tokens. Quantizing it to fp4 has cost deployments every accepted draft,
# without an error, so it takes mxfp4 only where it is named.
NEXTN_GROUP = "nextn"
PrecisionChoice = str | Mapping[str, str] | None

# far above any published model; keeps a hostile config from asking for a plan of a billion layers
_MAX_LAYERS = 10_000
_MAX_MODULES = 2_000_000


def resolve(
    recipe: Recipe,
    config: Mapping[str, object],
    *,
    precision: PrecisionChoice = None,
    nextn: Literal["convert", "keep"] = "convert",
) -> ModelPlan:
    """Apply `recipe` to a model.

    :param config: the parsed config.json
    :param precision: for the whole model, or by layer group; the recipe's default where None or not named
    :param nextn: "keep" leaves the NextN layers as the checkpoint has them
    :raises RecipeError: dims that are missing or not positive integers, an unknown precision or group, too many layers
    """
    architecture, model, root = _unwrap(recipe, config)
    dims = {name: _dim(model, key, f"recipe {recipe.name}: dims.{name}") for name, key in recipe.dims.items()}
    _check_groups(recipe, precision)
    modules: list[ModulePlan] = []
    kept: list[str] = []
    for name, module in recipe.modules.items():
        for group in module.on:
            layers = recipe.layers[group]
            chosen = _choose(recipe, name, module, group, precision)
            sources = _sources(recipe, name, module, layers, model, root)
            if chosen is None or (group == NEXTN_GROUP and nextn == "keep"):
                kept.extend(source for _, source in sources)
                continue
            pipeline = module.pipelines()[chosen]
            where = f"recipe {recipe.name}: modules.{name}"
            store, load = steps_of(pipeline.store, f"{where}.store"), steps_of(pipeline.load, f"{where}.load")
            floor = pipeline.quality.min_sqnr_db if pipeline.quality is not None else None
            modules.extend(
                ModulePlan(
                    layer=layer,
                    group=group,
                    module=name,
                    source=source,
                    precision=chosen,
                    store=store,
                    load=load,
                    passes=frozenset(pipeline.passes),
                    contract=pipeline.ensures,
                    min_sqnr_db=floor,
                    optional=layers.optional,
                )
                for layer, source in sources
            )
    modules.sort(key=lambda plan: plan.layer)
    return ModelPlan(recipe, recipe.hash, architecture, dims, tuple(modules), tuple(kept))


def _unwrap(recipe: Recipe, config: Mapping[str, object]) -> tuple[str, Mapping[str, object], str]:
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if architecture is None:
        raise no_architectures("config.json", recipe.architectures)
    if architecture not in recipe.architectures:
        raise RecipeError(
            "config.json: architectures",
            found=repr(architectures),
            wanted=f"one of {', '.join(recipe.architectures)} for recipe {recipe.name}",
            remedy=did_you_mean(
                str(architecture),
                recipe.architectures,
                "choose the recipe of this architecture: `weightprep recipes list`",
            ),
        )
    wrapper = recipe.wrappers.get(str(architecture))
    if wrapper is None:
        return str(architecture), config, ""
    inner = config.get(wrapper.config)
    if not isinstance(inner, Mapping):
        raise RecipeError(
            f"config.json: {wrapper.config}",
            found=type(inner).__name__,
            wanted=f"the language model's config inside {architecture}",
            remedy="check that config.json is the model's own",
        )
    return str(architecture), inner, wrapper.prefix


def no_architectures(config_file: object, known: Iterable[str]) -> RecipeError:
    """The error of a `config_file` that names no class; `known` are names that it may have."""
    return RecipeError(
        f"{config_file}: architectures",
        found="none",
        wanted=f"the name of the model's class: {', '.join(known)}",
        remedy="take config.json from the model's repository again, or add the name to it; --recipe cannot stand in "
        "for it, because sglang chooses the model by it too",
    )


def _dim(model: Mapping[str, object], key: str, where: str) -> int:
    value = model.get(key)
    likely = difflib.get_close_matches(key, model, n=1, cutoff=0.8) if key not in model else []
    if likely:
        raise RecipeError(
            where,
            found=f"{key!r}, a key that config.json does not have",
            wanted=f"{likely[0]!r}, perhaps",
            remedy="correct the recipe; if the recipe is right, config.json is incomplete",
        )
    if type(value) is not int or value <= 0:
        raise RecipeError(
            f"config.json: {key}",
            found="nothing" if value is None else repr(value),
            wanted="a positive integer",
            remedy="config.json is incomplete, or belongs to another architecture",
        )
    return value


def _check_groups(recipe: Recipe, precision: PrecisionChoice) -> None:
    if isinstance(precision, Mapping):
        for group in precision:
            if group not in recipe.layers:
                raise RecipeError(
                    f"precision for {group}",
                    found="an unknown layer group",
                    wanted=f"one of {', '.join(recipe.layers)}",
                    remedy=f"see `weightprep recipes show {recipe.name}`",
                )


def _choose(recipe: Recipe, name: str, module: ModulePart, group: str, precision: PrecisionChoice) -> str | None:
    named = precision.get(group) if isinstance(precision, Mapping) else None
    asked = named or (precision if isinstance(precision, str) else None) or module.precision
    known = module.pipelines()
    if "+" in asked and asked not in known:
        raise RecipeError(
            f"precision {asked}",
            found="w_kc and w_vc in different precisions",
            wanted=f"one of {', '.join(known)}",
            remedy="choose one of these: ROCm's gate for the V matmul reads w_kc's dtype, and one w_scale serves both",
        )
    if asked not in known:
        raise RecipeError(
            f"precision {asked}",
            found=f"no pipeline of this precision for modules.{name} in recipe {recipe.name}",
            wanted=f"one of {', '.join(known)}",
            remedy="choose one of these, or a recipe that has it",
        )
    if group == NEXTN_GROUP and asked == "mxfp4" and named is None:
        return "fp8" if "fp8" in known else None
    return asked


def _sources(
    recipe: Recipe, name: str, module: ModulePart, layers: LayerPart, model: Mapping[str, object], root: str
) -> list[tuple[int, str]]:
    where = f"recipe {recipe.name}: layers"
    first, count = _number(layers.first, model, where, layers), _number(layers.count, model, where, layers)
    inner = {key: range(_number(size, model, f"modules.{name}.each", layers)) for key, size in module.each.items()}
    total = count
    for indices in inner.values():
        total *= len(indices)
    if not 0 <= first + count <= _MAX_LAYERS or first < 0 or count < 0 or total > _MAX_MODULES:
        raise RecipeError(
            "config.json",
            found=f"layers {first} to {first + count}, {total} modules",
            wanted=f"at most {_MAX_LAYERS} layers and {_MAX_MODULES} modules",
            remedy="check the numbers of layers in config.json",
        )
    kinds = _kinds(layers, model, first + count)
    return [
        (layer, source)
        for layer in range(first, first + count)
        if kinds is None or kinds[layer] in next(iter(layers.only.values()))
        for source in _expand(module.source.replace("{prefix}", root + layers.prefix.replace("{i}", str(layer))), inner)
    ]


def _kinds(layers: LayerPart, model: Mapping[str, object], stop: int) -> list[object] | None:
    """The kind of each layer, where the recipe asks for it and the config tells."""
    key = next(iter(layers.only), None)
    kinds = None if key is None else model.get(key)
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) < stop):
        raise RecipeError(
            f"config.json: {key}",
            found=f"{len(kinds)} entries" if isinstance(kinds, list) else type(kinds).__name__,
            wanted=f"a list with an entry for each of {stop} layers",
            remedy="config.json is incomplete, or belongs to another architecture",
        )
    return kinds


def _expand(pattern: str, inner: Mapping[str, range]) -> Iterator[str]:
    for indices in itertools.product(*inner.values()):
        source = pattern
        for key, index in zip(inner, indices, strict=True):
            source = source.replace(f"{{{key}}}", str(index))
        yield source


def _number(expression: str | int, model: Mapping[str, object], where: str, layers: LayerPart) -> int:
    names: dict[str, int] = {}
    for name in names_in(expression, where):
        value = model.get(name)
        # a config without NextN layers leaves their count out or has null there
        if value is None and layers.optional:
            value = 0
        if type(value) is not int:
            raise RecipeError(
                f"config.json: {name}",
                found="nothing" if value is None else repr(value),
                wanted="an integer",
                remedy="config.json is incomplete, or belongs to another architecture",
            )
        names[name] = value
    return evaluate(expression, names, where)
