"""Flatten heads and quantize for o_proj in one kernel, for paths whose product was made elsewhere."""

from __future__ import annotations

import torch

from weightprep.runtime import witness
from weightprep.runtime.checks import check_heads, check_output
from weightprep.runtime.choice import Backend, OutQuant, Quantized, member
from weightprep.runtime.group_quant import quantize_fp8_groups, quantize_mxfp4_groups
from weightprep.runtime.kernel_choice import use_triton
from weightprep.runtime.output import empty_quantized
from weightprep.runtime.scale_layout import GroupScaleLayout

__all__ = ["flatten_quant_fp8", "flatten_quant_mxfp4"]


def flatten_quant_fp8(
    x: torch.Tensor,
    *,
    scale_layout: GroupScaleLayout | str = GroupScaleLayout.ROW,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    backend: Backend | str = Backend.AUTO,
) -> Quantized:
    """x (M, H, N), any strides -> fp8 (M, H * N) and float32 scales (M, H * N / 128).

    :raises ContractError: x is not 3-D, N is not a multiple of 128, or `fp8_dtype` is no fp8 type
    """
    check_heads(x)
    check_output(x.shape[2], OutQuant.FP8_GROUP, fp8_dtype)
    column = member(GroupScaleLayout, scale_layout, "scale_layout") is GroupScaleLayout.COLUMN
    return Quantized(*_flatten(x, False, column, fp8_dtype == torch.float8_e4m3fnuz, use_triton(backend, x)))


def flatten_quant_mxfp4(
    x: torch.Tensor,
    *,
    scale_layout: GroupScaleLayout | str = GroupScaleLayout.ROW,
    backend: Backend | str = Backend.AUTO,
) -> Quantized:
    """x (M, H, N), any strides -> packed e2m1 (M, H * N / 2) and e8m0 bytes (M, H * N / 32).

    :raises ContractError: x is not 3-D, or N is not a multiple of 32
    """
    check_heads(x)
    check_output(x.shape[2], OutQuant.MXFP4, torch.float8_e4m3fn)
    column = member(GroupScaleLayout, scale_layout, "scale_layout") is GroupScaleLayout.COLUMN
    return Quantized(*_flatten(x, True, column, False, use_triton(backend, x)))


@torch.library.custom_op("weightprep::flatten_quant", mutates_args=())
def _flatten(x: torch.Tensor, mxfp4: bool, column: bool, fnuz: bool, triton: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, scales = _empty(x, mxfp4, column, fnuz)
    if x.numel() == 0:
        return out, scales
    if triton:
        from weightprep.runtime.triton_quant import launch_flatten_fp8, launch_flatten_mxfp4

        (launch_flatten_mxfp4 if mxfp4 else launch_flatten_fp8)(x, out, scales)
    else:
        flat = x.flatten(1)
        values, group_scales = quantize_mxfp4_groups(flat) if mxfp4 else quantize_fp8_groups(flat, out.dtype)
        out.copy_(values)
        scales.copy_(group_scales)
    witness.count(f"flatten_quant/{'triton' if triton else 'torch'}/{'mxfp4' if mxfp4 else 'fp8_group'}")
    return out, scales


@_flatten.register_fake
def _(x: torch.Tensor, mxfp4: bool, column: bool, fnuz: bool, triton: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, mxfp4, column, fnuz)


def _empty(x: torch.Tensor, mxfp4: bool, column: bool, fnuz: bool) -> tuple[torch.Tensor, torch.Tensor]:
    form = OutQuant.MXFP4 if mxfp4 else OutQuant.FP8_GROUP
    return empty_quantized(x, x.shape[2], form, column_major=column, fnuz=fnuz)
