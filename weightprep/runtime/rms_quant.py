"""Activations to fp8 in groups, alone or fused behind an RMSNorm, with the scale written where the next GEMM reads it.

A GEMM that reads its scales column-major makes every producer that writes them row-major cost one more kernel, a
transpose of a few kilobytes that is all launch. These producers take the layout as an argument and store each scale
through its strides, so either order costs the same.

The quantization itself, groups of 128 along the row, is that of :mod:`weightprep.runtime.group_quant`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightprep.errors import ContractError
from weightprep.runtime.choice import Backend, member
from weightprep.runtime.group_quant import FP8_GROUP, FP8_MAX, quantize_fp8_groups
from weightprep.runtime.kernel_choice import use_triton
from weightprep.runtime.scale_layout import GroupScaleLayout

__all__ = ["RmsQuantized", "quantize_groups", "rms_norm_quantize"]

_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class RmsQuantized:
    """What a fused RMSNorm and quantization leaves behind, for M rows of K values in G groups.

    :param q: (M, K) fp8
    :param scale: (M, G) float32 in the layout that was asked for; q * scale is the normalized row
    :param normed: (M, K) the normalized row in the dtype of the input, where it was asked for
    :param residual: (M, K) input + residual in the dtype of the input, where a residual was given
    """

    q: torch.Tensor
    scale: torch.Tensor
    normed: torch.Tensor | None
    residual: torch.Tensor | None


def quantize_groups(
    x: torch.Tensor,
    *,
    layout: GroupScaleLayout | str = GroupScaleLayout.ROW,
    fp8: torch.dtype = torch.float8_e4m3fn,
    backend: Backend | str = Backend.AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row in groups of 128.

    :param x: (M, K) bf16, fp16 or float32, rows contiguous; K need not be a multiple of 128
    :returns: q (M, K) and scale (M, ceil(K / 128)) float32 in `layout`
    :raises ContractError: `x` is not such a tensor or `fp8` no fp8 format
    """
    _check(x, fp8)
    rows, columns = x.shape
    q = torch.empty((rows, columns), dtype=fp8, device=x.device)
    scale = member(GroupScaleLayout, layout, "layout").empty(rows, -(-columns // FP8_GROUP), device=x.device)
    torch.ops.weightprep.quantize_groups(x, q, scale, use_triton(backend, x))
    return q, scale


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    keep_normed: bool = False,
    layout: GroupScaleLayout | str = GroupScaleLayout.ROW,
    fp8: torch.dtype = torch.float8_e4m3fn,
    backend: Backend | str = Backend.AUTO,
) -> RmsQuantized:
    """y = (x + residual) * rsqrt(mean((x + residual)^2) + eps) * weight in float32, quantized in groups; one kernel.

    The sum with the residual is stored rounded to the dtype of `x` but normalized before that rounding, as aiter does.

    :param x: (M, K) bf16, fp16 or float32, rows contiguous
    :param weight: (K,) any float dtype
    :param residual: (M, K) in the dtype of `x`
    :param keep_normed: also return y in the dtype of `x`
    :raises ContractError: a tensor does not fit
    """
    _check(x, fp8)
    rows, columns = x.shape
    if tuple(weight.shape) != (columns,) or not weight.is_contiguous():
        raise _broken("weight", weight, f"contiguous, shape ({columns},)")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1):
        raise _broken("residual", residual, f"{x.dtype} of shape {tuple(x.shape)} with contiguous rows")
    out = RmsQuantized(
        q=torch.empty((rows, columns), dtype=fp8, device=x.device),
        scale=member(GroupScaleLayout, layout, "layout").empty(rows, -(-columns // FP8_GROUP), device=x.device),
        normed=torch.empty((rows, columns), dtype=x.dtype, device=x.device) if keep_normed else None,
        residual=None if residual is None else torch.empty((rows, columns), dtype=x.dtype, device=x.device),
    )
    torch.ops.weightprep.rms_norm_quantize(
        x, weight, residual, out.q, out.scale, out.normed, out.residual, eps, use_triton(backend, x)
    )
    return out


def quantize_groups_reference(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    """The definition, eager and in float32; fills `q` and `scale`."""
    columns = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % FP8_GROUP))
    values, step = quantize_fp8_groups(padded, q.dtype)
    q.copy_(values[:, :columns])
    scale.copy_(step)


def rms_norm_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    q: torch.Tensor,
    scale: torch.Tensor,
    normed: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    eps: float,
) -> None:
    """The definition, eager and in float32; fills every output that is not None."""
    total = x.float() if residual is None else x.float() + residual.float()
    if residual_out is not None:
        residual_out.copy_(total)
    y = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    if normed is not None:
        normed.copy_(y)
    quantize_groups_reference(y, q, scale)


@torch.library.custom_op("weightprep::quantize_groups", mutates_args=("q", "scale"))
def _quantize_groups(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, triton: bool) -> None:
    if triton:
        from weightprep.runtime.rms_quant_kernels import launch_quantize_groups

        launch_quantize_groups(x, q, scale)
    elif x.numel():
        quantize_groups_reference(x, q, scale)


@_quantize_groups.register_fake
def _(*arguments: object) -> None:
    return None


@torch.library.custom_op("weightprep::rms_norm_quantize", mutates_args=("q", "scale", "normed", "residual_out"))
def _rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    q: torch.Tensor,
    scale: torch.Tensor,
    normed: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    eps: float,
    triton: bool,
) -> None:
    if triton:
        from weightprep.runtime.rms_quant_kernels import launch_rms_norm_quantize

        launch_rms_norm_quantize(x, weight, residual, q, scale, normed, residual_out, eps)
    elif x.numel():
        rms_norm_quantize_reference(x, weight, residual, q, scale, normed, residual_out, eps)


@_rms_norm_quantize.register_fake
def _(*arguments: object) -> None:
    return None


def _check(x: torch.Tensor, fp8: torch.dtype) -> None:
    if x.dim() != 2 or x.dtype not in _ACTIVATIONS or (x.numel() and x.stride(1) != 1):
        raise _broken("activations", x, "2-D bf16, fp16 or float32 with contiguous rows")
    if fp8 not in FP8_MAX:
        raise ContractError(
            "group quantization",
            found=str(fp8),
            wanted="float8_e4m3fn or float8_e4m3fnuz",
            remedy="take the fp8 format of the target: e4m3fnuz on gfx942, e4m3fn elsewhere",
        )


def _broken(subject: str, tensor: torch.Tensor, wanted: str) -> ContractError:
    return ContractError(
        f"group quantization: {subject}",
        found=f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
        wanted=wanted,
        remedy="reshape to (tokens, columns) and make the rows contiguous before the call",
    )
