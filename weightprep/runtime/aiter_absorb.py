"""aiter's fp8 batched kernel as a backend, for ROCm: activations quantized per row and 128 of K, bf16 output.

The kernel reads one scale for the whole weight, and its bf16 result equals what sglang's own path computes.
"""

from __future__ import annotations

import torch

from weightprep.errors import EngineError
from weightprep.runtime.group_quant import FP8_GROUP

__all__ = ["launch_aiter"]


def launch_aiter(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Fill `out` (M, H, N) bf16 from x (M, H, K) and an fp8 w (H, K, N).

    :raises EngineError: aiter is not installed, or cannot be imported without ROCm
    """
    try:
        from aiter.ops.triton import (
            batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant as module,
        )
    except (ImportError, RuntimeError) as error:
        raise EngineError(
            "backend 'aiter'",
            found=repr(error),
            wanted="an importable aiter",
            remedy="install it, or pass backend='triton'",
        ) from error
    kernel = module.batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant
    batch_major = out.stride(0) >= out.stride(1)
    kernel(
        X=x,
        WQ=w.transpose(1, 2),
        w_scale=scale,
        group_size=FP8_GROUP,
        YQ=out if batch_major else out.transpose(0, 1),
        transpose_bm=batch_major,
        transpose_bm_in=True,
        dtype=torch.bfloat16,
    )
