"""What can be wrong with a recipe before any weight is read: dangling names, and steps that cannot follow one
another.
"""

from __future__ import annotations

from weightprep.errors import RecipeError
from weightprep.recipe.expression import names_in
from weightprep.recipe.pipeline import PipelinePart, StepPart
from weightprep.recipe.recipe import Recipe
from weightprep.transforms import Form, Step, check_composition, make_step
from weightprep.transforms.bundle import ANY_ENCODING

__all__ = ["check_recipe", "steps_of"]

# Roles that hold codes where they are uint8; in other roles uint8 is e8m0.
_PACKED = ("w_kc", "w_vc")


def check_recipe(recipe: Recipe, where: str) -> None:
    """Check what the parts of a recipe say about each other.

    :param where: the file, for error messages
    :raises RecipeError: naming file and key path
    """
    if not recipe.modules and recipe.nothing_to_convert is None:
        raise _refuse(f"{where}: modules", "none", "at least one module, or `nothing_to_convert` with the reason")
    for architecture in recipe.wrappers:
        if architecture not in recipe.architectures:
            raise _refuse(
                f"{where}: wrappers.{architecture}", "an architecture that the recipe does not name", "one it does"
            )
    for name, module in recipe.modules.items():
        key = f"{where}: modules.{name}"
        for group in module.on:
            if group not in recipe.layers:
                raise _refuse(f"{key}.on", group, f"one of {', '.join(recipe.layers)}")
        for precision, pipeline in module.pipelines().items():
            inner = key if precision == module.precision else f"{key}.alternatives.{precision}"
            if pipeline.ensures not in recipe.contracts:
                raise _refuse(f"{inner}.ensures", pipeline.ensures, f"one of {', '.join(recipe.contracts)}")
            _check_pipeline(pipeline, inner, frozenset(recipe.contracts[pipeline.ensures]), frozenset(recipe.dims))
    for name, contract in recipe.contracts.items():
        for role, tensor in contract.items():
            if role in _PACKED and tensor.dtype == "uint8" and (tensor.finite or tensor.positive):
                raise _refuse(
                    f"{where}: contracts.{name}.{role}",
                    "`finite` or `positive` for packed e2m1 codes, where every byte is two numbers of any sign",
                    "neither; the group scales can be finite",
                )
            for expression in (*tensor.shape, *(tensor.strides or ())):
                key = f"{where}: contracts.{name}.{role}"
                unknown = names_in(expression, key) - set(recipe.dims)
                if unknown:
                    raise _refuse(key, f"the name {min(unknown)!r}", f"one of {', '.join(recipe.dims)}")


def steps_of(parts: tuple[StepPart, ...], where: str) -> tuple[Step, ...]:
    """The steps that a list in a recipe names, their parameters checked."""
    return tuple(make_step(part.name, part.params, f"{where}[{index}]") for index, part in enumerate(parts))


def _check_pipeline(pipeline: PipelinePart, where: str, contract: frozenset[str], dims: frozenset[str]) -> None:
    store, load = steps_of(pipeline.store, f"{where}.store"), steps_of(pipeline.load, f"{where}.load")
    for step in (*store, *load):
        if step.transform.dims - dims:
            missing = ", ".join(sorted(step.transform.dims - dims))
            raise _refuse(f"{where}: step {step.name}", f"no {missing} under `dims`", "each dim that the step reads")
    stored = check_composition(store, Form(False, ANY_ENCODING), f"{where}.store")
    made = check_composition(load, stored, f"{where}.load")
    if made.absorbed != bool(contract & {"w_kc", "w_vc"}):
        raise _refuse(
            f"{where}.load", str(made), f"the tensors of the contract {pipeline.ensures}: {', '.join(sorted(contract))}"
        )


def _refuse(where: str, found: str, wanted: str) -> RecipeError:
    return RecipeError(
        where, found=found, wanted=wanted, remedy="correct the recipe; docs/recipes.md describes each key"
    )
