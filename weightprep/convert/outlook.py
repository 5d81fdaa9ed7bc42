"""What `convert` would do to a checkpoint, from headers alone: the layout to advise, or why there is nothing to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from weightprep.checkpoint.repository import Checkpoint
from weightprep.convert.options import ConvertOptions, Layout
from weightprep.convert.plan import PassedModule
from weightprep.convert.planner import split_modules
from weightprep.convert.quant_config import unmatched_entries
from weightprep.errors import WeightprepError
from weightprep.recipe import ModelPlan

__all__ = ["Outlook", "nothing_reason", "outlook"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Which layout `convert` can write, inline first; None and the reason where there is nothing to convert.

    :param unmatched_excludes: entries of the checkpoint's own exclude lists that name nothing in it
    """

    layout: Layout | None
    nothing_to_convert: str | None
    unmatched_excludes: tuple[str, ...]


def outlook(checkpoint: Checkpoint, model: ModelPlan, options: ConvertOptions) -> Outlook:
    """Ask the planner for each layout.

    :raises WeightprepError: the checkpoint does not fit the recipe, whatever the layout
    """
    layout = Layout.INLINE
    try:
        split = split_modules(checkpoint, model, dataclasses.replace(options, layout=layout))
    except WeightprepError:
        # what the shards cannot hold a sidecar may
        layout = Layout.SIDECAR
        split = split_modules(checkpoint, model, dataclasses.replace(options, layout=layout))
    unmatched = unmatched_entries(checkpoint.config, split.names, checkpoint.tensors)
    if split.jobs:
        return Outlook(layout, None, unmatched)
    return Outlook(None, nothing_reason(model, split.passed), unmatched)


def nothing_reason(model: ModelPlan, passed: Sequence[PassedModule]) -> str:
    """Why a conversion of `model` that passes all of its modules has nothing to do."""
    if model.recipe.nothing_to_convert is not None:
        return model.recipe.nothing_to_convert
    if passed:
        return f"{len(passed)} module(s) are {passed[0].reason}"
    return "the recipe names no module of this checkpoint"
