"""Group quantization and its fusion with RMSNorm in Triton; scales are stored through the strides of their tensor."""

# Triton gives kernel arguments their types at launch, so annotations would say nothing.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightprep.runtime.group_quant import AMAX_FLOOR, FP8_GROUP, FP8_MAX
from weightprep.runtime.triton_quant import fp8_groups

__all__ = ["launch_quantize_groups", "launch_rms_norm_quantize"]

_COLUMNS_PER_PROGRAM = 8 * FP8_GROUP


@triton.jit
def _store_quantized(
    x,
    q_ptr,
    scale_ptr,
    i_row,
    first,
    o_x,
    stride_sm,
    stride_sg,
    COLUMNS,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Quantize the (1, BLOCK) piece `x` of a row that begins at column `first` and store it with its scales."""
    values, scale = fp8_groups(x, 1, BLOCK, GROUP, TOP, FLOOR)
    tl.store(q_ptr + i_row * COLUMNS + o_x, values.to(q_ptr.dtype.element_ty), mask=o_x < COLUMNS)
    o_group = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]
    tl.store(scale_ptr + i_row * stride_sm + o_group.to(tl.int64) * stride_sg, scale, mask=o_group * GROUP < COLUMNS)


@triton.jit
def _quantize_groups_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    stride_x,
    stride_sm,
    stride_sg,
    COLUMNS,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    o_x = first + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + i_row * stride_x + o_x, mask=o_x < COLUMNS, other=0.0).to(tl.float32)
    _store_quantized(x, q_ptr, scale_ptr, i_row, first, o_x, stride_sm, stride_sg, COLUMNS, BLOCK, GROUP, TOP, FLOOR)


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
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEEP_NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """One row per program, the whole row in registers."""
    i_row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)[None, :]
    m_x = o_x < COLUMNS
    x = tl.load(x_ptr + i_row * stride_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + i_row * stride_residual + o_x, mask=m_x, other=0.0).to(tl.float32)
        tl.store(total_ptr + i_row * COLUMNS + o_x, x.to(total_ptr.dtype.element_ty), mask=m_x)
    weight = tl.load(weight_ptr + o_x, mask=m_x, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / COLUMNS + eps) * weight
    if KEEP_NORMED:
        tl.store(normed_ptr + i_row * COLUMNS + o_x, y.to(normed_ptr.dtype.element_ty), mask=m_x)
    _store_quantized(y, q_ptr, scale_ptr, i_row, 0, o_x, stride_sm, stride_sg, COLUMNS, BLOCK, GROUP, TOP, FLOOR)


def launch_quantize_groups(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    """As :func:`weightprep.runtime.rms_quant.quantize_groups_reference`."""
    rows, columns = x.shape
    if x.numel() == 0:
        return
    block = min(_COLUMNS_PER_PROGRAM, _row_block(columns))
    _quantize_groups_kernel[(rows, triton.cdiv(columns, block))](
        x,
        q,
        scale,
        x.stride(0),
        scale.stride(0),
        scale.stride(1),
        columns,
        BLOCK=block,
        GROUP=FP8_GROUP,
        FLOOR=AMAX_FLOOR,
        TOP=FP8_MAX[q.dtype],
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
) -> None:
    """As :func:`weightprep.runtime.rms_quant.rms_norm_quantize_reference`."""
    rows, columns = x.shape
    if x.numel() == 0:
        return
    block = _row_block(columns)
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
        BLOCK=block,
        GROUP=FP8_GROUP,
        HAS_RESIDUAL=residual is not None,
        KEEP_NORMED=normed is not None,
        FLOOR=AMAX_FLOOR,
        TOP=FP8_MAX[q.dtype],
        # 512 values a warp; a row of 7168 lies in 16 warps.
        num_warps=max(1, min(16, block // 512)),
    )


def _row_block(columns: int) -> int:
    return max(FP8_GROUP, int(triton.next_power_of_2(columns)))
