"""The compress kernels of DeepSeek-V4 in Triton: every operand in its own dtype, every operation in float32.

The point is what is absent. Scores arrive as the gate GEMM wrote them (bf16), the state and the positional bias as the
engine keeps them (float32 or bf16), and each load widens in registers; so no kernel before this one has to widen
anything in memory. Triton refuses operands of unlike dtypes rather than converting, so each load says
`.to(tl.float32)` and each store the pointer's dtype.
"""

# Triton gives kernel arguments their types at launch, so annotations would say nothing.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weightprep.runtime.compress_reference import window_of

__all__ = ["CONFIGS", "CompressConfig", "launch_decode", "launch_prefill"]


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """Shape of one program of the compress kernel.

    :param channels: channels of head_dim per program
    :param window_rows: rows of the window per step; the whole window at ratio 4
    """

    channels: int
    window_rows: int
    warps: int


# Most rows of a decode step complete no window and only store: programs must be few and light.
CONFIGS = {4: CompressConfig(32, 8, 2), 128: CompressConfig(32, 128, 4)}


@triton.jit
def _compress_kernel(
    state_ptr,
    input_ptr,
    ape_ptr,
    out_ptr,
    plan_ptr,
    HEAD_DIM: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One plan row and BLOCK_D channels per program; in decode also the store of the new row into the state."""
    PARTS: tl.constexpr = 2 * OVERLAP
    WIDTH: tl.constexpr = PARTS * HEAD_DIM
    WINDOW: tl.constexpr = RATIO * OVERLAP
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM

    seq_len = tl.load(plan_ptr + i_row * 4)
    word = tl.load(plan_ptr + i_row * 4 + 1)
    if DECODE:
        source = i_row
        # The newest row is taken from the input: the state's copy is being written by this very program.
        from_state = WINDOW - 1
        complete = (seq_len > 0) & (seq_len % RATIO == 0)
        if word >= 0:
            o_part = tl.arange(0, PARTS)[:, None] * HEAD_DIM + o_d[None, :]
            new = tl.load(input_ptr + source * WIDTH + o_part, mask=m_d[None, :], other=0.0)
            slot = word.to(tl.int64) * WIDTH
            tl.store(state_ptr + slot + o_part, new.to(state_ptr.dtype.element_ty), mask=m_d[None, :])
    else:
        source = (word & 0xFFFF).to(tl.int64)
        from_state = (word >> 16) & 0xFFFF
        complete = seq_len != -1

    if complete:
        page_0 = tl.load(plan_ptr + i_row * 4 + 2).to(tl.int64)
        page_1 = tl.load(plan_ptr + i_row * 4 + 3).to(tl.int64)
        to_score: tl.constexpr = OVERLAP * HEAD_DIM
        peak = tl.full([BLOCK_D], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_D], tl.float32)
        result = tl.zeros([BLOCK_D], tl.float32)
        # Softmax in pieces of the window. An overlapping window is one piece, so that every piece has a row that counts
        # and `peak` is finite after it.
        for first in range(0, WINDOW, BLOCK_W):
            o_j = first + tl.arange(0, BLOCK_W)
            if OVERLAP == 2:
                page = tl.where(o_j < RATIO, page_0, page_1)
                part = o_j // RATIO
                present = (seq_len > RATIO) | (o_j >= RATIO)
            else:
                page = page_1 + o_j * 0
                part = o_j * 0
                present = o_j >= 0
            stored = o_j < from_state
            o_channel = part[:, None] * HEAD_DIM + o_d[None, :]
            p_state = state_ptr + (page * RATIO + o_j % RATIO)[:, None] * WIDTH + o_channel
            p_input = input_ptr + (source - (WINDOW - 1) + o_j)[:, None] * WIDTH + o_channel
            m_state = (present & stored)[:, None] & m_d[None, :]
            m_input = (present & (stored == 0))[:, None] & m_d[None, :]
            kv_held = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
            kv_new = tl.load(p_input, mask=m_input, other=0.0).to(tl.float32)
            score_held = tl.load(p_state + to_score, mask=m_state, other=0.0).to(tl.float32)
            score_new = tl.load(p_input + to_score, mask=m_input, other=0.0).to(tl.float32)
            p_ape = ape_ptr + o_j[:, None] * HEAD_DIM + o_d[None, :]
            bias = tl.load(p_ape, mask=m_d[None, :], other=0.0).to(tl.float32)

            kv = tl.where(stored[:, None], kv_held, kv_new)
            score = tl.where(stored[:, None], score_held, score_new) + bias
            score = tl.where(present[:, None], score, float("-inf"))
            higher = tl.maximum(peak, tl.max(score, axis=0))
            weight = tl.exp(score - higher[None, :])
            shrink = tl.exp(peak - higher)
            total = total * shrink + tl.sum(weight, axis=0)
            result = result * shrink + tl.sum(weight * kv, axis=0)
            peak = higher
        result = result / total
        tl.store(out_ptr + i_row * HEAD_DIM + o_d, result.to(out_ptr.dtype.element_ty), mask=m_d)


@triton.jit
def _write_kernel(state_ptr, input_ptr, plan_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store one input row, BLOCK columns per program, at the slot that the write plan names."""
    i_row = tl.program_id(0).to(tl.int64)
    source = tl.load(plan_ptr + i_row * 2)
    slot = tl.load(plan_ptr + i_row * 2 + 1)
    if (source != -1) & (slot >= 0):
        o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        m_d = o_d < WIDTH
        row = tl.load(input_ptr + source.to(tl.int64) * WIDTH + o_d, mask=m_d, other=0.0)
        tl.store(state_ptr + slot.to(tl.int64) * WIDTH + o_d, row.to(state_ptr.dtype.element_ty), mask=m_d)


def launch_decode(
    state: torch.Tensor, kv_score: torch.Tensor, ape: torch.Tensor, plan: torch.Tensor, out: torch.Tensor, ratio: int
) -> None:
    """As :func:`weightprep.runtime.compress_reference.compress_decode_reference`."""
    _launch_compress(state, kv_score, ape, plan, out, ratio, decode=True)


def launch_prefill(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    compress_plan: torch.Tensor,
    write_plan: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
) -> None:
    """As :func:`weightprep.runtime.compress_reference.compress_prefill_reference`.

    Two launches: the second one overwrites slots of the ring that the first one still reads.
    """
    _launch_compress(state, kv_score, ape, compress_plan, out, ratio, decode=False)
    rows, width = write_plan.shape[0], state.shape[-1]
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _write_kernel[(rows, triton.cdiv(width, block))](
            state, kv_score, write_plan.view(torch.int32), WIDTH=width, BLOCK=block, num_warps=4
        )


def _launch_compress(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    plan: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    *,
    decode: bool,
) -> None:
    rows, head_dim = out.shape
    if rows == 0:
        return
    config = CONFIGS[ratio]
    _compress_kernel[(rows, triton.cdiv(head_dim, config.channels))](
        state,
        kv_score,
        ape,
        out,
        plan.view(torch.int32),
        HEAD_DIM=head_dim,
        RATIO=ratio,
        OVERLAP=window_of(ratio) // ratio,
        DECODE=decode,
        BLOCK_D=config.channels,
        BLOCK_W=config.window_rows,
        num_warps=config.warps,
    )
