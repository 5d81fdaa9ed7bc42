"""Whether a call runs its Triton kernel or the eager reference: one answer for every function that has both."""

from __future__ import annotations

import os
from typing import Literal

import torch

from weightprep.errors import EngineError

__all__ = ["Backend", "use_triton"]

Backend = Literal["auto", "triton", "torch"]


def use_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    """`auto` takes Triton where it can run: on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).

    :raises EngineError: Triton was asked for by name where it cannot run
    """
    runs = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and not runs:
        raise EngineError(
            "backend 'triton'",
            found=f"tensors on {tensor.device}",
            wanted="tensors on a GPU, or TRITON_INTERPRET=1",
            remedy="use backend='auto' or 'torch'",
        )
    return runs and backend != "torch"
