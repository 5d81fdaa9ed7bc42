"""One collective for all layers: the ranks that hold the rows of the same weights agree on what depends on whole
tensors.

A per-tensor scale is that of the whole tensor, whoever holds which rows. A collective for each layer would cost 79
round trips at every load, so all layers' numbers travel together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["agree_on_maxima", "attention_group", "is_so_on_any_rank"]


def attention_group() -> Any:
    """sglang's coordinator of the ranks that share this attention."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return get_attn_tp_group()


def agree_on_maxima(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Elementwise maximum of each of `values` (of one dtype, any shapes) over the ranks that share this attention."""
    if not values:
        return []
    packed = torch.cat([value.reshape(-1) for value in values])
    group = attention_group()
    members = group.cpu_group if packed.device.type == "cpu" else group.device_group
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=members)
    parts = torch.split(packed, [value.numel() for value in values])
    return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]


def is_so_on_any_rank(it_is: bool) -> bool:
    """Whether `it_is` on this or another of the ranks that share this attention."""
    return bool(agree_on_maxima([torch.tensor([float(it_is)])])[0])
