"""Whether a call runs its Triton kernel or the eager reference: one answer for every function that has both."""

from __future__ import annotations

import os

import torch

from weightprep.errors import EngineError
from weightprep.runtime.choice import Backend, member

__all__ = ["use_triton"]


def use_triton(backend: Backend | str, tensor: torch.Tensor) -> bool:
    """AUTO takes Triton where it can run: on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).

    :raises ContractError: `backend` names no backend
    :raises EngineError: Triton was asked for by name where it cannot run, or another backend than these two
    """
    wanted = member(Backend, backend, "backend")
    runs = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if wanted is Backend.TRITON and not runs:
        raise EngineError(
            "backend 'triton'",
            found=f"tensors on {tensor.device}",
            wanted="tensors on a GPU, or TRITON_INTERPRET=1",
            remedy="use backend='auto' or 'torch'",
        )
    if wanted not in (Backend.AUTO, Backend.TRITON, Backend.TORCH):
        raise EngineError(
            f"backend '{wanted.value}'",
            found="a function that has a Triton kernel and a reference alone",
            wanted="'auto', 'triton' or 'torch'",
            remedy="use backend='auto'",
        )
    return runs and wanted is not Backend.TORCH
