"""Group quantization and its fusion with RMSNorm in Triton; scales are stored through the strides of their tensor."""

# Triton gives kernel arguments their types at launch, so annotations would say nothing.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightprep.runtime.rms_quant import AMAX_FLOOR

__all__ = ["launch_quantize_groups", "launch_rms_norm_quantize"]

_GROUPS_PER_PROGRAM = 8


@triton.jit
def _store_quantized(
    x,
    q_ptr,
    scale_ptr,
    i_row,
    o_group,
    o_x,
    m_x,
    groups,
    stride_sm,
    stride_sg,
    COLUMNS,
    FLOOR: tl.constexpr,
    TOP: tl.constexpr,
):
    """Quantize the rows of the tile `x` (groups, group) and store them with their scales."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), FLOOR)
    # A plain / is two ulp off on NVIDIA GPUs; div_rn gives the bits that the reference has.
    step = tl.div_rn(amax, tl.full(amax.shape, TOP, tl.float32))
    inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), step)
    q = tl.clamp(x * inverse[:, None], -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)
    tl.store(q_ptr + i_row * COLUMNS + o_x, q.to(q_ptr.dtype.element_ty), mask=m_x)
    tl.store(scale_ptr + i_row * stride_sm + o_group.to(tl.int64) * stride_sg, step, mask=o_group < groups)


@triton.jit
def _quantize_groups_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    stride_x,
    stride_sm,
    stride_sg,
    COLUMNS,
    groups,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FLOOR: tl.constexpr,
    TOP: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    o_x = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_x = o_x < COLUMNS
    x = tl.load(x_ptr + i_row * stride_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    _store_quantized(x, q_ptr, scale_ptr, i_row, o_group, o_x, m_x, groups, stride_sm, stride_sg, COLUMNS, FLOOR, TOP)


@triton.jit
def _rms_norm_quantize_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    q_ptr,
    scale_ptr,
    normed_ptr,
    total_ptr,
    eps,
    stride_x,
    stride_residual,
    stride_sm,
    stride_sg,
    COLUMNS,
    groups,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEEP_NORMED: tl.constexpr,
    FLOOR: tl.constexpr,
    TOP: tl.constexpr,
):
    """One row per program, the whole row in registers."""
    i_row = tl.program_id(0).to(tl.int64)
    o_group = tl.arange(0, BLOCK_G)
    o_x = o_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_x = o_x < COLUMNS
    x = tl.load(x_ptr + i_row * stride_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + i_row * stride_residual + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(total_ptr + i_row * COLUMNS + o_x, x.to(total_ptr.dtype.element_ty), mask=m_x)
    weight = tl.load(weight_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    mean_square = tl.sum(tl.sum(x * x, axis=1), axis=0) / COLUMNS
    y = x * tl.rsqrt(mean_square + eps) * weight
    if KEEP_NORMED:
        tl.store(normed_ptr + i_row * COLUMNS + o_x, y.to(normed_ptr.dtype.element_ty), mask=m_x)
    _store_quantized(y, q_ptr, scale_ptr, i_row, o_group, o_x, m_x, groups, stride_sm, stride_sg, COLUMNS, FLOOR, TOP)


def launch_quantize_groups(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, group: int) -> None:
    """As :func:`weightprep.runtime.rms_quant.quantize_groups_reference`."""
    rows, columns = x.shape
    if x.numel() == 0:
        return
    groups = scale.shape[1]
    block = min(_GROUPS_PER_PROGRAM, triton.next_power_of_2(groups))
    _quantize_groups_kernel[(rows, triton.cdiv(groups, block))](
        x,
        q,
        scale,
        x.stride(0),
        scale.stride(0),
        scale.stride(1),
        columns,
        groups,
        GROUP=group,
        BLOCK_G=block,
        FLOOR=AMAX_FLOOR,
        TOP=torch.finfo(q.dtype).max,
        num_warps=4,
    )


def launch_rms_norm_quantize(
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
    """As :func:`weightprep.runtime.rms_quant.rms_norm_quantize_reference`."""
    rows, columns = x.shape
    if x.numel() == 0:
        return
    groups = scale.shape[1]
    block = triton.next_power_of_2(groups)
    _rms_norm_quantize_kernel[(rows,)](
        x,
        weight,
        residual,
        q,
        scale,
        normed,
        residual_out,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        scale.stride(0),
        scale.stride(1),
        columns,
        groups,
        GROUP=group,
        BLOCK_G=block,
        HAS_RESIDUAL=residual is not None,
        KEEP_NORMED=normed is not None,
        FLOOR=AMAX_FLOOR,
        TOP=torch.finfo(q.dtype).max,
        # About 1024 values a warp; a row of 7168 lies in 8 warps.
        num_warps=max(1, min(16, block * group // 1024)),
    )
