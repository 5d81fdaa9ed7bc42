"""Whether a manifest says of a result what a conversion of today would say: the part of `verify` above records."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from weightprep.checkpoint.manifest import MANIFEST_NAME, Manifest, ModuleRecord
from weightprep.convert.plan import ConversionPlan
from weightprep.convert.quality import is_below
from weightprep.convert.reread import Finding
from weightprep.errors import RecipeError
from weightprep.recipe import load_recipe

__all__ = ["below_floor", "check_manifest", "check_recipe_is_found"]

# Another release that makes the same bytes and figures has done nothing wrong.
_NOT_COMPARED = frozenset({"tool_version", "modules"})


def check_recipe_is_found(recipe: str, manifest_path: Path) -> None:
    """Find out before all else whether a manifest's recipe is here.

    :param recipe: its name in the manifest
    :raises RecipeError: no recipe of this name is found, or it is unsound
    """
    try:
        load_recipe(recipe)
    except RecipeError as error:
        raise RecipeError(
            f"{manifest_path}: recipe {recipe}",
            found=f"{error.subject}: {error.found}",
            wanted="the recipe that the conversion was made with",
            remedy="pass its file with --recipe FILE",
        ) from None


def below_floor(plan: ConversionPlan, fresh: Sequence[ModuleRecord]) -> tuple[str, ...]:
    """The modules of `fresh` that miss their recipe's floor."""
    floors = {job.source.module: job.plan.min_sqnr_db for job in plan.modules}
    return tuple(record.module for record in fresh if is_below(record.quality, floors[record.module]))


def check_manifest(
    found: Manifest, path: Path, copies: Collection[Path], plan: ConversionPlan, fresh: Sequence[ModuleRecord]
) -> Iterator[Finding]:
    """Compare every field of `found`, and its bytes at `path` and in the `copies` of it that are there.

    :param fresh: the records of today's conversion; those of modules that could not be converted are missing
    """
    below = below_floor(plan, fresh)
    wanted = found.model_copy(
        update={
            "recipe": plan.model.recipe.name,
            "recipe_hash": plan.model.recipe_hash,
            "precision": plan.precision,
            "quality_loss_allowed": bool(below),
            "below_floor": below,
            "dropped": plan.dropped,
        }
    )
    for key in Manifest.model_fields:
        if key not in _NOT_COMPARED and getattr(found, key) != getattr(wanted, key):
            yield Finding(f"{path}: {key}", repr(getattr(found, key)), repr(getattr(wanted, key)))
    modules, planned = [record.module for record in found.modules], [job.source.module for job in plan.modules]
    if modules != planned and sorted(set(modules)) == sorted(planned):
        yield Finding(f"{path}: modules", "another order, or one twice", "the recipe's order")
    for copy in sorted({path, *copies}):
        if copy.is_file() and copy.read_bytes() != found.to_json():
            yield Finding(str(copy), "not written as convert writes it", f"the bytes of {MANIFEST_NAME}")
