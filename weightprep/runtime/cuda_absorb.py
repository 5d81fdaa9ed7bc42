"""NVRTC: compile and launch absorb_decode.cu, the kernel for few rows on NVIDIA GPUs from compute capability 9.0.

Triton cannot share a maximum between the blocks of a cluster, and one block for a quantization group of 128 columns
leaves most of the GPU idle when there are few heads. torch compiles the source itself; neither nvcc nor a host
compiler is needed. A variant is compiled on its first call, which must therefore not be a CUDA-graph capture: see
:func:`compile_variant`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch

from weightprep.errors import EngineError
from weightprep.runtime import cuda_launch as launcher
from weightprep.runtime.group_quant import FP8_GROUP
from weightprep.runtime.tuning import DecodeConfig

__all__ = ["compile_variant", "launch_decode", "unsupported"]

_CHUNK_K = 64


def unsupported(x: torch.Tensor, w: torch.Tensor, mx_scale: torch.Tensor | None, out: torch.Tensor) -> str | None:
    """Why this kernel cannot take the tensors, or None when it can."""
    k, columns = x.shape[2], w.shape[2]
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (9, 0):
        return "needs an NVIDIA GPU of compute capability 9.0"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} cannot compile CUDA sources"
    if x.dtype != torch.bfloat16 or w.dtype not in (torch.float8_e4m3fn, torch.uint8):
        return f"activations {x.dtype} with weights {w.dtype}"
    if k % _CHUNK_K or columns % FP8_GROUP:
        return f"K = {k} is not a multiple of 64 or N = {columns} not of 128"
    if x.stride(2) != 1 or w.stride(1) != 1 or out.stride(-1) != 1:
        return "k of activations and weights, or the last dimension of the output, is not contiguous"
    if out.dtype == torch.float8_e4m3fnuz:
        return "e4m3fnuz output"
    steps = (
        *x.stride()[:2],
        *(stride // 2 for stride in (w.stride(0), w.stride(2))),
        *(2 * s for s in out.stride()[:-1]),
    )
    if any(t.data_ptr() % 16 for t in (x, w, out)) or any(step % 8 for step in steps):
        return "a pointer or a stride is not a multiple of 16 bytes"
    if max(x.stride(0), x.stride(1), w.stride(0), w.stride(2), out.stride(0), x.shape[0]) >= 2**31:
        return "a stride of 2^31 elements or more"
    return None


@functools.cache
def compile_variant(
    config: DecodeConfig, k: int, columns: int, mxfp4_weight: bool, out_quant: int
) -> Callable[..., None]:
    """The kernel for one shape and configuration; compiled once per process.

    :param out_quant: 0 bf16, 1 fp8 groups of 128, 2 MXFP4 groups of 32
    :raises EngineError: the configuration does not divide the shape, or NVRTC refuses the source
    """
    if not config.fits(k):
        raise EngineError(
            "absorb_decode",
            found=f"{config} for K = {k}",
            wanted="64 * warps_k to divide K and 8 * warps_n to divide columns",
            remedy="correct the tuning table",
        )
    if torch.cuda.is_current_stream_capturing():
        raise EngineError(
            "absorb_decode",
            found=f"first call for K = {k}, N = {columns}, {config} inside a CUDA-graph capture",
            wanted="a call with the same shapes before the capture, which compiles the kernel",
            remedy="run the model once, eagerly, before capturing it",
        )
    source = resources.files("weightprep.runtime").joinpath("absorb_decode.cu").read_text(encoding="utf-8")
    macros = {
        "K": k,
        "N": columns,
        "WEIGHT": int(mxfp4_weight),
        "OUT": out_quant,
        "COLS": config.columns,
        "WK": config.warps_k,
        "WN": config.warps_n,
        "LOOP": int(config.row_tiles > 1),
        "PREFETCH": int(config.prefetch),
    }
    compile_kernel: Callable[..., Any] = torch.cuda._compile_kernel
    try:
        kernel: Callable[..., None] = compile_kernel(
            source, "absorb_decode", nvcc_options=[f"-DWP_{name}={value}" for name, value in macros.items()]
        )
    except (RuntimeError, OSError) as error:
        raise EngineError(
            "absorb_decode",
            found=f"NVRTC: {error}",
            wanted="a CUDA installation that NVRTC can use",
            remedy="set CUDA_HOME, or choose backend='triton'",
        ) from error
    return kernel


def launch_decode(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    config: DecodeConfig,
) -> None:
    """Launch for tensors that :func:`unsupported` has accepted; the arguments are those of launch_absorb.

    `w_scale`, where given, is one float32.
    """
    rows, heads, k = x.shape
    columns = w.shape[2]
    out_quant = 0 if out.dim() == 3 else 2 if out.dtype == torch.uint8 else 1
    kernel = compile_variant(config, k, columns, mx_scale is not None, out_quant)
    rows_per_block = 16 * config.row_tiles
    # torch's launcher has no null pointer; the kernel does not read `x` in the place of an absent tensor.
    launcher.launch(
        kernel,
        grid=(columns // config.columns, heads, (rows + rows_per_block - 1) // rows_per_block),
        block=(32 * config.warps_k * config.warps_n, 1, 1),
        args=[
            x,
            x.stride(0),
            x.stride(1),
            w,
            w.stride(0),
            w.stride(2),
            x if w_scale is None else w_scale,
            x if mx_scale is None else mx_scale,
            *(mx_scale.stride() if mx_scale is not None else (0, 0, 0)),
            out,
            out.stride(0),
            out.stride(1) if out.dim() == 3 else 0,
            x if scales is None else scales,
            *(scales.stride() if scales is not None else (0, 0)),
            rows,
            config.row_tiles,
        ],
        early=config.prefetch,
    )
