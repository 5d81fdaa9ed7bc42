"""The steps by name: those of this package, and those that other packages declare under the entry point group
`weightprep.transforms`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from weightprep.errors import RecipeError, did_you_mean
from weightprep.transforms.cast import cast
from weightprep.transforms.dequantize import dequantize
from weightprep.transforms.e4m3_for_target import e4m3_for_target
from weightprep.transforms.layout import layout
from weightprep.transforms.quantize_fp8 import quantize_fp8
from weightprep.transforms.quantize_mxfp4 import absorb_mxfp4, quantize_mxfp4
from weightprep.transforms.quantize_w_vc import quantize_w_vc
from weightprep.transforms.refusal import Refusal, refusal
from weightprep.transforms.split_kv_b import split_kv_b
from weightprep.transforms.step import Step, Transform

__all__ = ["ENTRY_POINT_GROUP", "make_step", "transforms"]

ENTRY_POINT_GROUP = "weightprep.transforms"
_OURS = (
    dequantize,
    quantize_fp8,
    quantize_mxfp4,
    cast,
    split_kv_b,
    absorb_mxfp4,
    quantize_w_vc,
    e4m3_for_target,
    layout,
)


@cache
def transforms() -> Mapping[str, Transform]:
    """All known steps by name.

    :raises RecipeError: if another package declares a name that is taken, or something that is not a step
    """
    known = {transform.name: transform for transform in _OURS}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        loaded = entry.load()
        if not isinstance(loaded, Transform):
            raise RecipeError(
                f"entry point {entry.name} = {entry.value}",
                found=type(loaded).__name__,
                wanted="a function under the weightprep.transforms.transform decorator",
                remedy="decorate the function, or uninstall the package that declares it",
            )
        if loaded.name in known:
            raise RecipeError(
                f"entry point {entry.name} = {entry.value}",
                found=f"the name {loaded.name}, which is taken",
                wanted="a name of its own",
                remedy="rename the function",
            )
        known[loaded.name] = loaded
    return known


def make_step(name: str, params: Mapping[str, Any] | None, where: str) -> Step:
    """The step `name` with `params`, both checked.

    :param where: file and key path, for error messages
    :raises RecipeError: unknown step, unknown or ill-typed parameter
    """
    known = transforms()
    if name not in known:
        raise RecipeError(
            where,
            found=f"step {name!r}",
            wanted=f"one of {', '.join(sorted(known))}",
            remedy=did_you_mean(name, known, "docs/recipes.md describes each step"),
        )
    try:
        checked = known[name].params.model_validate(dict(params or {}))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        fields = known[name].params.model_fields
        remedy = "docs/recipes.md describes each step's parameters"
        if path in fields:
            plain = refusal(first, remedy)
        else:
            known_names = ", ".join(fields) or "no parameters"
            plain = Refusal("an unknown parameter", known_names, did_you_mean(path, fields, remedy))
        raise RecipeError(
            f"{where}.{name}.{path}", found=plain.found, wanted=plain.wanted, remedy=plain.remedy
        ) from None
    return Step(known[name], {field: getattr(checked, field) for field in known[name].params.model_fields})
