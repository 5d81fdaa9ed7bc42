"""Activations to fp8 in groups, alone or fused behind an RMSNorm, with the scale written where the next GEMM reads it.

A GEMM that reads its scales column-major makes every producer that writes them row-major cost one more kernel, a
transpose of a few kilobytes that is all launch. These producers take the layout as an argument and store each scale
through its strides, so either order costs the same.

Per group of the last dimension: scale = max(max|x|, 1e-10) / fp8_max and q = x * (1 / scale), clamped, all in float32:
the formula of aiter's fused_fp8_quant.py, so that a consumer sees the same bytes whoever produced them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from weightprep.errors import ContractError
from weightprep.runtime.compress import Backend
from weightprep.runtime.scale_layout import GroupScaleLayout

__all__ = ["AMAX_FLOOR", "RmsQuantized", "quantize_groups", "rms_norm_quantize"]

AMAX_FLOOR = 1e-10
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
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
    layout: GroupScaleLayout = GroupScaleLayout.ROW,
    group: int = 128,
    fp8: torch.dtype = torch.float8_e4m3fn,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row in groups (1 x 128 by default).

    :param x: (M, K) bf16, fp16 or float32, rows contiguous; K need not be a multiple of `group`
    :returns: q (M, K) and scale (M, ceil(K / group)) float32 in `layout`
    :raises ContractError: `x` is not such a tensor or `fp8` no fp8 format
    """
    _check(x, group, fp8)
    rows, columns = x.shape
    q = torch.empty((rows, columns), dtype=fp8, device=x.device)
    scale = layout.empty(rows, -(-columns // group), device=x.device)
    torch.ops.weightprep.quantize_groups(x, q, scale, group, _use_triton(backend, x))
    return q, scale


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    keep_normed: bool = False,
    layout: GroupScaleLayout = GroupScaleLayout.ROW,
    group: int = 128,
    fp8: torch.dtype = torch.float8_e4m3fn,
    backend: Backend = "auto",
) -> RmsQuantized:
    """y = (x + residual) * rsqrt(mean((x + residual)^2) + eps) * weight in float32, quantized in groups; one kernel.

    The sum with the residual is stored rounded to the dtype of `x` but normalized before that rounding, as aiter does.

    :param x: (M, K) bf16, fp16 or float32, rows contiguous
    :param weight: (K,) any float dtype
    :param residual: (M, K) in the dtype of `x`
    :param keep_normed: also return y in the dtype of `x`
    :raises ContractError: a tensor does not fit
    """
    _check(x, group, fp8)
    rows, columns = x.shape
    if tuple(weight.shape) != (columns,) or not weight.is_contiguous():
        raise _broken("weight", weight, f"contiguous, shape ({columns},)")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1):
        raise _broken("residual", residual, f"{x.dtype} of shape {tuple(x.shape)} with contiguous rows")
    out = RmsQuantized(
        q=torch.empty((rows, columns), dtype=fp8, device=x.device),
        scale=layout.empty(rows, -(-columns // group), device=x.device),
        normed=torch.empty((rows, columns), dtype=x.dtype, device=x.device) if keep_normed else None,
        residual=None if residual is None else torch.empty((rows, columns), dtype=x.dtype, device=x.device),
    )
    torch.ops.weightprep.rms_norm_quantize(
        x, weight, residual, out.q, out.scale, out.normed, out.residual, eps, group, _use_triton(backend, x)
    )
    return out


def quantize_groups_reference(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group: int) -> None:
    """The definition, eager and in float32; fills `q` and `scale`."""
    rows, columns = x.shape
    groups = scale.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    top = torch.finfo(q.dtype).max
    step = padded.abs().amax(dim=-1).clamp(min=AMAX_FLOOR) / top
    values = (padded * (1.0 / step)[..., None]).clamp(-top, top).view(rows, groups * group)[:, :columns]
    q.copy_(values.to(q.dtype))
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
    group: int,
) -> None:
    """The definition, eager and in float32; fills every output that is not None."""
    total = x.float() if residual is None else x.float() + residual.float()
    if residual_out is not None:
        residual_out.copy_(total)
    y = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    if normed is not None:
        normed.copy_(y)
    quantize_groups_reference(y, q, scale, group)


@torch.library.custom_op("weightprep::quantize_groups", mutates_args=("q", "scale"))
def _quantize_groups(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group: int, triton: bool) -> None:
    if triton:
        from weightprep.runtime.rms_quant_kernels import launch_quantize_groups

        launch_quantize_groups(x, q, scale, group)
    elif x.numel():
        quantize_groups_reference(x, q, scale, group)


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
    group: int,
    triton: bool,
) -> None:
    if triton:
        from weightprep.runtime.rms_quant_kernels import launch_rms_norm_quantize

        launch_rms_norm_quantize(x, weight, residual, q, scale, normed, residual_out, eps, group)
    elif x.numel():
        rms_norm_quantize_reference(x, weight, residual, q, scale, normed, residual_out, eps, group)


@_rms_norm_quantize.register_fake
def _(*arguments: object) -> None:
    return None


def _use_triton(backend: Backend, tensor: torch.Tensor) -> bool:
    if backend == "auto":
        return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return backend == "triton"


def _check(x: torch.Tensor, group: int, fp8: torch.dtype) -> None:
    if x.dim() != 2 or x.dtype not in _ACTIVATIONS or (x.numel() and x.stride(1) != 1):
        raise _broken("activations", x, "2-D bf16, fp16 or float32 with contiguous rows")
    if fp8 not in _FP8 or group < 1 or group & (group - 1):
        raise ContractError(
            "group quantization",
            found=f"{fp8} in groups of {group}",
            wanted="float8_e4m3fn or float8_e4m3fnuz in groups of a power of two",
            remedy="take the fp8 format of the target (e4m3fnuz on gfx942, e4m3fn elsewhere) and groups of 128",
        )


def _broken(subject: str, tensor: torch.Tensor, wanted: str) -> ContractError:
    return ContractError(
        f"group quantization: {subject}",
        found=f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
        wanted=wanted,
        remedy="reshape to (tokens, columns) and make the rows contiguous before the call",
    )
