"""The layers of a checkpoint that a draft model holds, under other names than the checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from weightprep.checkpoint.repository import Checkpoint
from weightprep.recipe import ModelPlan, ModulePlan, resolve
from weightprep.recipe.resolve import NEXTN_GROUP

__all__ = ["draft_layers", "layer_prefix"]


def layer_prefix(plan: ModulePlan) -> str:
    """ "model.layers.78" of "model.layers.78.self_attn.kv_b_proj"."""
    head, separator, _ = plan.source.partition(f".{plan.layer}.")
    return head + separator.rstrip(".")


def draft_layers(checkpoint: Checkpoint, model: ModelPlan) -> list[str]:
    """The NextN layers by the recipe, or, where it leaves them alone and so does not name them, by config.json: a draft
    model asks for their modules all the same.
    """
    # Asked again, because a NextN layer that is kept has its names too.
    every = resolve(model.recipe, checkpoint.config.raw).modules
    named = list(dict.fromkeys(layer_prefix(plan) for plan in every if plan.group == NEXTN_GROUP))
    wrapper = model.recipe.wrappers.get(model.architecture)
    inner = checkpoint.config.raw.get(wrapper.config) if wrapper is not None else checkpoint.config.raw
    count = inner.get("num_hidden_layers") if isinstance(inner, Mapping) else None
    if named or type(count) is not int:
        return named
    stacks = dict.fromkeys(layer_prefix(plan).rpartition(".")[0] for plan in every)
    return [layer for stack in stacks for layer in _behind(checkpoint.tensors, stack, count)]


def _behind(tensors: Iterable[str], stack: str, count: int) -> list[str]:
    """The layers in `stack` ("model.layers") that `tensors` have behind the first `count`."""
    found = (re.match(re.escape(stack) + r"\.(\d{1,6})\.", name) for name in tensors)
    numbers = {int(match[1]) for match in found if match}
    return [f"{stack}.{number}" for number in sorted(numbers) if number >= count]
