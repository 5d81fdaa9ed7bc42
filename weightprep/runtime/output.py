"""Outputs of the absorbed products and of flatten_quant: how they are allocated, and what kernels are told of them."""

from __future__ import annotations

import torch

from weightprep.runtime.choice import OutQuant
from weightprep.runtime.group_quant import FP8_GROUP, MXFP4_GROUP

__all__ = ["empty_quantized", "form_of", "launch_strides"]


def empty_quantized(
    x: torch.Tensor, columns: int, form: OutQuant, *, column_major: bool, fnuz: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized values and scales for `x` (M, H, any) with `columns` columns per head after quantization.

    :param form: FP8_GROUP gives fp8 (M, H * columns) and float32 scales, MXFP4 packed bytes (M, H * columns / 2) and
        e8m0 bytes; scales are (M, groups)
    :param column_major: scales with stride 1 along M
    """
    rows, width = x.shape[0], x.shape[1] * columns
    if form is OutQuant.MXFP4:
        dtype, scale_dtype, groups, width = torch.uint8, torch.uint8, width // MXFP4_GROUP, width // 2
    else:
        dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        scale_dtype, groups = torch.float32, width // FP8_GROUP
    scales = x.new_empty((groups, rows) if column_major else (rows, groups), dtype=scale_dtype)
    return x.new_empty((rows, width), dtype=dtype), scales.t() if column_major else scales


def form_of(out: torch.Tensor) -> OutQuant:
    """What an output tensor holds: bf16 (M, H, N), fp8 (M, H * N) or packed MXFP4 (M, H * N / 2)."""
    if out.dim() == 3:
        return OutQuant.NONE
    return OutQuant.MXFP4 if out.dtype == torch.uint8 else OutQuant.FP8_GROUP


def launch_strides(
    mx_scale: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None
) -> tuple[int, int, int, int, int, int, int]:
    """The strides that absorb kernels take, zeros for what is absent: of mx_scale, of M and H in `out`, of `scales`."""
    h, k, n = (0, 0, 0) if mx_scale is None else mx_scale.stride()
    m, g = (0, 0) if scales is None else scales.stride()
    return h, k, n, out.stride(0), out.stride(1) if out.dim() == 3 else 0, m, g
