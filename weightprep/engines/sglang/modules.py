"""Finds the modules of a plan in a live model: the attention that holds the absorbed weights, and the linear layer they
come from.

A plan speaks in names of the checkpoint. In the server the NextN layer is `model.decoder` of a model of its own, a
pipeline rank has only some of the layers, and LoRA wraps linears.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightprep.engines.sglang.agreement import attention_group
from weightprep.errors import EngineError
from weightprep.formats import FOREIGN_SUFFIXES, SCALE_SUFFIXES, classify
from weightprep.recipe import NEXTN_GROUP, ModelPlan, ModulePlan
from weightprep.transforms import Bundle

__all__ = ["LiveModule", "is_nextn_draft", "kept_attentions", "live_modules"]


@dataclass(frozen=True, slots=True)
class LiveModule:
    """One module of the plan that this process holds.

    :param owner: the module with the attributes w_kc, w_vc and w_scale
    :param linear: the linear layer of the checkpoint, without a LoRA wrapper
    """

    plan: ModulePlan
    owner: Any
    linear: Any

    @property
    def shards(self) -> int:
        """Over how many tensor parallel ranks the linear's rows are spread."""
        return int(self.linear.output_size) // int(self.linear.output_size_per_partition)

    @property
    def rank(self) -> int:
        """Which of them this is.

        :raises EngineError: the rows are spread over other ranks than those of the attention
        """
        if self.shards == 1:
            return 0
        group = attention_group()
        if group.world_size != self.shards:
            raise EngineError(
                f"{self.plan.source} in the running model",
                found=f"rows spread over {self.shards} ranks in an attention of {group.world_size}",
                wanted="the ranks of the attention's tensor parallel group",
                remedy="serve with another combination of --tp-size and --dp-size, or without --load-format weightprep",
            )
        return int(group.rank_in_group)

    def source(self, block: tuple[int, int] | None) -> Bundle:
        """The rows that this rank holds, as the loader left them.

        :param block: the checkpoint's weight_block_size
        :raises CheckpointError: an encoding that cannot be converted
        """
        name = f"{self.plan.source}.weight"
        for suffix in FOREIGN_SUFFIXES:
            if hasattr(self.linear, suffix[1:]):
                packed = getattr(self.linear, suffix[1:])
                classify(self.plan.source + suffix, packed.dtype, tuple(packed.shape), None, None)
        weight: torch.Tensor = self.linear.weight.data
        scale = self._scale()
        encoded = classify(
            name,
            weight.dtype,
            tuple(weight.shape),
            None if scale is None else scale.dtype,
            None if scale is None else tuple(scale.shape),
            block,
        )
        return Bundle.source(weight, scale, encoded)

    def local_heads(self, rows_per_head: int) -> int:
        """Heads of this rank.

        :raises EngineError: the live weight does not hold whole heads, as after a kernel's repacking
        """
        rows = int(self.linear.weight.shape[0])
        if rows % rows_per_head:
            raise EngineError(
                f"{self.plan.source} in the running model",
                found=f"a weight of shape {list(self.linear.weight.shape)}",
                wanted=f"a multiple of {rows_per_head} rows (nope + v per head)",
                remedy="the weight was repacked for another kernel: load it again before it is prepared",
            )
        return rows // rows_per_head

    def _scale(self) -> torch.Tensor | None:
        if self.linear.weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return None
        for suffix in SCALE_SUFFIXES:
            scale = getattr(self.linear, suffix.lstrip("._"), None)
            if isinstance(scale, torch.Tensor):
                return scale.data
        return None


def is_nextn_draft(model: nn.Module) -> bool:
    """Whether `model` is the NextN layer alone, as sglang serves it for a speculative server."""
    return hasattr(getattr(model, "model", None), "decoder")


def live_modules(model: nn.Module, plan: ModelPlan) -> list[LiveModule]:
    """The modules of `plan` in `model`: those of the NextN layer if it is a draft, else those of its decoder layers."""
    return list(_find(model.model, plan, is_nextn_draft(model)))


def kept_attentions(model: Any, plan: ModelPlan) -> list[tuple[int, Any]]:
    """Layer and attention of what `plan` leaves as sglang builds it in `model`, which only a draft can have."""
    if not is_nextn_draft(model):
        return []
    found = []
    for source in plan.kept:
        layer, _, path = source.rpartition(".layers.")[2].partition(".")
        owner = _descend(model.model.decoder, path.rpartition(".")[0])
        if hasattr(owner, "w_kc"):
            found.append((int(layer), owner))
    return found


def _find(inner: Any, plan: ModelPlan, is_draft: bool) -> Iterator[LiveModule]:
    for module in plan.modules:
        # the others of a recipe are converted in the checkpoint and have no live counterpart to prepare
        if "w_kc" not in plan.recipe.contracts[module.contract] or (module.group == NEXTN_GROUP) is not is_draft:
            continue
        if is_draft:
            layer = inner.decoder
        else:
            first, last = getattr(inner, "start_layer", 0), getattr(inner, "end_layer", len(inner.layers))
            if not first <= module.layer < last:
                continue
            layer = inner.layers[module.layer]
        _, _, path = module.source.partition(f".layers.{module.layer}.")
        owner_path, _, name = path.rpartition(".")
        owner = _descend(layer, owner_path)
        linear = getattr(owner, name, None)
        if owner is not None and linear is not None:
            yield LiveModule(module, owner, getattr(linear, "base_layer", linear))


def _descend(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
        if module is None:
            return None
    return module
