"""What DeepSeek-V4's compressor computes, in eager float32: the definition that the compress kernels are held to.

A compressor reads per token one row of the gate GEMM, `kv` and `score` side by side, and turns every `ratio`
consecutive tokens into one: out = sum_j softmax_j(score_j + ape_j) * kv_j, separately for each of the head_dim
channels. With ratio 128 the window is those 128 tokens. With ratio 4 windows overlap: a row holds two sets of
channels, and a window of eight takes the first set from the previous four tokens and the second from the current four;
the very first window has no previous tokens.

Rows wait for their window in a state of pages of `ratio` rows. Which page and slot a token has is the engine's
business and arrives as a plan, one record of little-endian words per row (sglang's compress_v2.cuh, 0.5.12 to 0.5.23):

    decode plan    16 bytes: u32 sequence length, i32 write slot, i32 page of the previous window, i32 page of this one
    compress plan  16 bytes: u32 sequence length, u16 input row, u16 rows to take from the state, i32 page, i32 page
    write plan      8 bytes: u32 input row, i32 write slot;   all ones in the first word marks padding
"""

from __future__ import annotations

import torch

__all__ = ["compress_decode_reference", "compress_prefill_reference", "window_of"]


def window_of(ratio: int) -> int:
    """Rows in one window: eight at ratio 4, which overlaps, and `ratio` otherwise."""
    return 2 * ratio if ratio == 4 else ratio


def compress_decode_reference(
    state: torch.Tensor, kv_score: torch.Tensor, ape: torch.Tensor, plan: torch.Tensor, out: torch.Tensor, ratio: int
) -> None:
    """One token per row: store it in `state`; where it completes a window, write the compressed row to `out`.

    Shapes and dtypes as in :func:`weightprep.runtime.compress.compress_decode`. Rows of `out` whose token completes no
    window are left as they are.
    """
    words = _words(plan)
    seq_len, slot = words[:, 0], words[:, 1]
    inputs = torch.arange(kv_score.shape[0], device=kv_score.device)
    _write(state, kv_score, inputs, slot)
    complete = (seq_len > 0) & (seq_len % ratio == 0)
    from_state = torch.full_like(seq_len, window_of(ratio) - 1)
    _compress(state, kv_score, ape, out, complete, seq_len, inputs, from_state, words[:, 2:], ratio)


def compress_prefill_reference(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    compress_plan: torch.Tensor,
    write_plan: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
) -> None:
    """Many tokens per request: compress every completed window, then store the rows that later windows will need.

    Shapes and dtypes as in :func:`weightprep.runtime.compress.compress_prefill`.
    """
    words = _words(compress_plan)
    seq_len, packed = words[:, 0], words[:, 1]
    from_state = (packed >> 16) & 0xFFFF
    _compress(state, kv_score, ape, out, seq_len != -1, seq_len, packed & 0xFFFF, from_state, words[:, 2:], ratio)
    writes = _words(write_plan)
    valid = writes[:, 0] != -1
    _write(state, kv_score, writes[valid, 0], writes[valid, 1])


def _words(plan: torch.Tensor) -> torch.Tensor:
    # An empty tensor that came from elsewhere may have strides that view() refuses.
    return (plan.view(torch.int32) if plan.numel() else plan.new_zeros((0, plan.shape[1] // 4))).long()


def _write(state: torch.Tensor, kv_score: torch.Tensor, inputs: torch.Tensor, slot: torch.Tensor) -> None:
    kept = slot >= 0
    state.view(-1, state.shape[-1])[slot[kept]] = kv_score[inputs[kept]].to(state.dtype)


def _compress(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    out: torch.Tensor,
    chosen: torch.Tensor,
    seq_len: torch.Tensor,
    inputs: torch.Tensor,
    from_state: torch.Tensor,
    pages: torch.Tensor,
    ratio: int,
) -> None:
    """Compress the chosen plan rows; a window's first `from_state` rows are in the state, the others in the input."""
    rows = torch.nonzero(chosen).flatten()
    if rows.numel() == 0:
        return
    window, head_dim = window_of(ratio), out.shape[-1]
    overlap = window // ratio
    j = torch.arange(window, device=out.device)
    stored = j < from_state[rows, None]
    page = pages[rows][:, (j // ratio) if overlap == 2 else torch.ones_like(j)]
    source = inputs[rows, None] - (window - 1) + j
    held = state[page.clamp(min=0, max=state.shape[0] - 1), j % ratio].float()
    fresh = kv_score[source.clamp(min=0)].float()
    row = torch.where(stored[..., None], held, fresh).view(len(rows), window, 2, overlap, head_dim)
    part = (j // ratio) if overlap == 2 else torch.zeros_like(j)
    kv, score = row[:, j, 0, part], row[:, j, 1, part]
    logits = score + ape.float()
    if overlap == 2:
        alone = (seq_len[rows, None] <= ratio) & (j < ratio)
        logits = logits.masked_fill(alone[..., None], float("-inf"))
        kv = kv.masked_fill(alone[..., None], 0.0)
    out[rows] = (torch.softmax(logits, dim=1) * kv).sum(dim=1).to(out.dtype)
