"""A recipe applied to one model's config: every module by its name in the checkpoint, with the steps that it takes.

Pure: reads the parsed config.json and nothing else, so the same plan serves the converter, the header-only inspection
and the engine's loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weightprep.contracts import TensorSpec
from weightprep.deferred import torch
from weightprep.errors import RecipeError
from weightprep.formats import Encoding
from weightprep.recipe.contract import TensorPart
from weightprep.recipe.expression import evaluate
from weightprep.recipe.recipe import Recipe
from weightprep.transforms import Step

__all__ = ["ModelPlan", "ModulePlan"]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One weight of one layer.

    :param source: the module's name in the checkpoint, without .weight
    :param store: steps whose result is written to a checkpoint
    :param load: steps that follow on the rank's rows
    :param passes: source encodings that are stored as they are unless requantization is asked for
    :param optional: whether the checkpoint may leave this module out
    """

    layer: int
    group: str
    module: str
    source: str
    precision: str
    store: tuple[Step, ...]
    load: tuple[Step, ...]
    passes: frozenset[Encoding]
    contract: str
    min_sqnr_db: float | None
    optional: bool

    def store_for(self, encoding: Encoding, *, requantize: bool = False) -> tuple[Step, ...]:
        """The steps that a converter runs on a source of this encoding; () where the source is passed."""
        return () if encoding in self.passes and not requantize else self.store

    @property
    def prepare(self) -> tuple[Step, ...]:
        """The steps from whatever the checkpoint holds to the kernel's tensors; run_steps skips what has been done."""
        return self.store + self.load


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is to be done to one model.

    :param dims: the recipe's dims with the model's values, for the whole model (all heads)
    :param modules: in order of layer
    :param kept: modules that the recipe names and the caller asked to leave alone
    """

    recipe: Recipe
    recipe_hash: str
    architecture: str
    dims: Mapping[str, int]
    modules: tuple[ModulePlan, ...]
    kept: tuple[str, ...]

    def precision(self, asked: str | Mapping[str, str] | None) -> str | dict[str, str] | None:
        """By layer group, however it was asked for; `asked` where the modules of one group differ."""
        chosen: dict[str, set[str]] = {}
        for plan in self.modules:
            chosen.setdefault(plan.group, set()).add(plan.precision)
        if any(len(names) > 1 for names in chosen.values()):
            return dict(asked) if isinstance(asked, Mapping) else asked
        return {group: name for group, names in chosen.items() for name in names}

    def contract(self, name: str, heads: int | None = None, target: str = "gfx950") -> Mapping[str, TensorSpec]:
        """The tensors of a contract by role, in concrete shapes.

        :param heads: attention heads of this rank; all of the model's where None
        :raises RecipeError: no such contract, or a shape that is not positive
        """
        where = f"recipe {self.recipe.name}: contracts.{name}"
        if name not in self.recipe.contracts:
            wanted = f"one of {', '.join(self.recipe.contracts)}"
            raise RecipeError(where, found="no such contract", wanted=wanted, remedy="correct the name")
        dims = dict(self.dims) if heads is None else {**self.dims, "heads": heads}
        return {
            role: _spec(part, dims, f"{where}.{role}", target) for role, part in self.recipe.contracts[name].items()
        }


def _spec(part: TensorPart, dims: Mapping[str, int], where: str, target: str) -> TensorSpec:
    shape = tuple(evaluate(size, dims, f"{where}.shape") for size in part.shape)
    strides = None if part.strides is None else tuple(evaluate(step, dims, f"{where}.strides") for step in part.strides)
    if any(size <= 0 for size in shape):
        raise RecipeError(
            where,
            found=f"shape {shape}",
            wanted="positive sizes",
            remedy="check the model's dims in config.json against the recipe",
        )
    dtype: torch.dtype = getattr(torch, part.dtype)
    return TensorSpec(dtype, shape, strides, finite=part.finite, positive=part.positive).on(target)
