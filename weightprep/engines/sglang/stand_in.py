"""Spares upstream the absorbed weights that weightprep makes itself.

post_load_weights decides which layers a load has touched, and that decision is kept. What it then makes of each of
them would be thrown away, and is not cheap: for a block-scaled fp8 weight it multiplies 896 tiles one by one, which for
79 layers takes several times as long as everything that weightprep does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightprep.engines.sglang.modules import LiveModule

__all__ = ["stand_ins"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@contextmanager
def stand_ins(modules: Sequence[LiveModule], quantization: str | None) -> Iterator[None]:
    """Inside, the linear layers of `modules` have bf16 weights without storage: what is made of those costs nothing.

    :param quantization: name of the model's quantization method, None without one
    """
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for module in modules:
            name = module.plan.source.rpartition(".")[2]
            # a LoRA wrapper keeps its own idea of the weight
            if getattr(module.owner, name) is module.linear and not _is_upstreams(module, quantization):
                replaced.append((module.owner, name, module.linear))
                setattr(module.owner, name, _stand_in(module.linear))
        yield
    finally:
        for owner, name, linear in replaced:
            setattr(owner, name, linear)


def _is_upstreams(module: LiveModule, quantization: str | None) -> bool:
    """Whether upstream may do more with this weight than dequantize, cast and split it."""
    weight = getattr(module.linear, "weight", None)
    # AWQ has no weight; Quark's MXFP4 is made by a kernel, which needs real memory
    if weight is None or quantization == "quark":
        return True
    # DeepGEMM keeps the blocks
    return weight.dtype in _FP8 and weight.device.type == "cuda" and torch.version.hip is None


def _stand_in(linear: Any) -> Any:
    weight = torch.empty(linear.weight.shape, dtype=torch.bfloat16, device="meta")
    made = copy.copy(linear)
    # the copy shares these two with the original
    made._parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    made._buffers = {}
    return made
