"""DeepSeek-V4's compressor without a widening pass: the gate score stays as its GEMM wrote it until it is consumed.

On ROCm the gate GEMM writes bf16. Widening that to float32 in memory costs one elementwise kernel per compressor, two
per layer of ratio 4 and one per layer of ratio 128, and changes no value: a bf16 number widened before it is stored
and one widened after it is loaded are the same float32. So these functions take the score in bf16 or float32, keep the
positional bias and the output in float32, and do the arithmetic in float32.
"""

from __future__ import annotations

import torch

from weightprep.errors import ContractError
from weightprep.runtime.choice import Backend
from weightprep.runtime.compress_reference import compress_decode_reference, compress_prefill_reference, window_of
from weightprep.runtime.kernel_choice import use_triton

__all__ = ["compress_decode", "compress_prefill", "gate_score"]

_FLOATS = (torch.bfloat16, torch.float32)
_PLAN_BYTES = 16
_WRITE_PLAN_BYTES = 8


def gate_score(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`kv` and `score` of each token in the dtype of `x`: one GEMM and nothing behind it.

    :param x: (tokens, hidden) bf16
    :param weight: wkv_gate.weight, (2 * head_dim, hidden) at ratio 128 and (4 * head_dim, hidden) at ratio 4, bf16
    :raises ContractError: the weight has another dtype than the activations
    """
    if weight.dtype != x.dtype:
        raise ContractError(
            "wkv_gate.weight",
            found=str(weight.dtype),
            wanted=f"{x.dtype}, the dtype of the activations",
            remedy="load the compressor's gate weight in the dtype that the checkpoint stores",
        )
    return torch.nn.functional.linear(x, weight)


def compress_decode(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    plan: torch.Tensor,
    *,
    ratio: int,
    out: torch.Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor:
    """Store one new token per request in `state` and compress the windows that it completes.

    :param state: (pages, ratio, width) bf16 or float32, width 2 * head_dim at ratio 128 and 4 * head_dim at ratio 4,
        contiguous; written in place
    :param kv_score: (requests, width) bf16 or float32, `kv` first, contiguous
    :param ape: (window, head_dim) bf16 or float32; window 128 at ratio 128 and 8 at ratio 4
    :param plan: (requests, 16) uint8, see :mod:`weightprep.runtime.compress_reference`
    :param ratio: 4 or 128
    :param out: (requests, head_dim); default float32. Rows whose token completes no window are not written.
    :returns: `out`
    :raises ContractError: a tensor has another shape, dtype or stride than stated
    """
    head_dim = _check(state, kv_score, ape, ratio)
    out = _output(out, plan, head_dim, kv_score)
    _check_plan(plan, _PLAN_BYTES, "decode plan")
    if plan.shape[0] != kv_score.shape[0]:
        raise _broken("decode plan", f"{plan.shape[0]} rows", f"{kv_score.shape[0]}, one per row of kv_score")
    torch.ops.weightprep.compress_decode(state, kv_score, ape, plan, out, ratio, use_triton(backend, kv_score))
    return out


def compress_prefill(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    compress_plan: torch.Tensor,
    write_plan: torch.Tensor,
    *,
    ratio: int,
    out: torch.Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> torch.Tensor:
    """Compress every completed window of a batch of many tokens, then store the rows that later windows need.

    :param compress_plan: (windows, 16) uint8; one row of `out` each, rows of padding are not written
    :param write_plan: (stores, 8) uint8
    :param out: (windows, head_dim); default float32
    :returns: `out`
    :raises ContractError: a tensor has another shape, dtype or stride than stated

    The other parameters are those of :func:`compress_decode`, with one row of `kv_score` per token.
    """
    head_dim = _check(state, kv_score, ape, ratio)
    out = _output(out, compress_plan, head_dim, kv_score)
    _check_plan(compress_plan, _PLAN_BYTES, "compress plan")
    _check_plan(write_plan, _WRITE_PLAN_BYTES, "write plan")
    triton = use_triton(backend, kv_score)
    torch.ops.weightprep.compress_prefill(state, kv_score, ape, compress_plan, write_plan, out, ratio, triton)
    return out


@torch.library.custom_op("weightprep::compress_decode", mutates_args=("state", "out"))
def _compress_decode(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    plan: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    triton: bool,
) -> None:
    if triton:
        from weightprep.runtime.compress_kernels import launch_decode

        launch_decode(state, kv_score, ape, plan, out, ratio)
    else:
        compress_decode_reference(state, kv_score, ape, plan, out, ratio)


@_compress_decode.register_fake
def _(*tensors: object) -> None:
    return None


@torch.library.custom_op("weightprep::compress_prefill", mutates_args=("state", "out"))
def _compress_prefill(
    state: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    compress_plan: torch.Tensor,
    write_plan: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    triton: bool,
) -> None:
    if triton:
        from weightprep.runtime.compress_kernels import launch_prefill

        launch_prefill(state, kv_score, ape, compress_plan, write_plan, out, ratio)
    else:
        compress_prefill_reference(state, kv_score, ape, compress_plan, write_plan, out, ratio)


@_compress_prefill.register_fake
def _(*tensors: object) -> None:
    return None


def _check(state: torch.Tensor, kv_score: torch.Tensor, ape: torch.Tensor, ratio: int) -> int:
    if ratio not in (4, 128):
        raise _broken("compress ratio", str(ratio), "4 or 128")
    for name, tensor, dims in (("state", state, 3), ("kv_score", kv_score, 2), ("ape", ape, 2)):
        if tensor.dim() != dims or tensor.dtype not in _FLOATS or not tensor.is_contiguous():
            found = f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            raise _broken(name, found, f"{dims} dimensions, contiguous, bfloat16 or float32")
    window, head_dim = window_of(ratio), ape.shape[1]
    width = 2 * (window // ratio) * head_dim
    if ape.shape[0] != window:
        raise _broken("ape", f"{ape.shape[0]} rows", f"{window}, one per row of a window of ratio {ratio}")
    if tuple(state.shape[1:]) != (ratio, width) or kv_score.shape[1] != width:
        found = f"state rows {tuple(state.shape[1:])}, kv_score rows of {kv_score.shape[1]}"
        raise _broken("state and kv_score", found, f"({ratio}, {width}) and {width} for head_dim {head_dim}")
    return head_dim


def _check_plan(plan: torch.Tensor, row_bytes: int, name: str) -> None:
    if plan.dtype != torch.uint8 or plan.dim() != 2 or plan.shape[1] != row_bytes or not plan.is_contiguous():
        raise _broken(name, f"{plan.dtype} of shape {tuple(plan.shape)}", f"contiguous uint8 of shape (n, {row_bytes})")


def _output(out: torch.Tensor | None, plan: torch.Tensor, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty((plan.shape[0], head_dim), dtype=torch.float32, device=like.device)
    if tuple(out.shape) != (plan.shape[0], head_dim) or out.dtype not in _FLOATS or not out.is_contiguous():
        found = f"{out.dtype} of shape {tuple(out.shape)}"
        raise _broken("out", found, f"contiguous bfloat16 or float32 of shape ({plan.shape[0]}, {head_dim})")
    return out


def _broken(subject: str, found: str, wanted: str) -> ContractError:
    return ContractError(f"compressor: {subject}", found=found, wanted=wanted, remedy="pass what sglang's planner made")
