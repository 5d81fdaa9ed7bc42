"""NVRTC: compile and launch absorb_decode.cu (few rows), absorb_tile.cu and absorb_tiles.cu (many) on NVIDIA GPUs.

Triton cannot share a maximum between the blocks of a cluster, and one block for a quantization group of 128 columns
leaves most of the GPU idle when there are few heads; and it takes widened weights through shared memory, which the
tensor cores then read again for every row tile. torch compiles the sources itself; neither nvcc nor a host compiler is
needed. A variant is compiled on its first call, which must therefore not be a CUDA-graph capture: see
:func:`compile_variant`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from typing import Any, Final

import torch

from weightprep.errors import EngineError
from weightprep.runtime import cuda_launch as launcher
from weightprep.runtime.choice import OutQuant
from weightprep.runtime.cuda_tensor_map import TensorMap, activation_map
from weightprep.runtime.group_quant import FP8_GROUP
from weightprep.runtime.output import form_of, launch_strides
from weightprep.runtime.tuning import CudaConfig, WgmmaConfig

__all__ = ["compile_variant", "launch_cuda", "unsupported"]

_CHUNK_K: Final = 64
_FORM_MACRO: Final = {OutQuant.NONE: 0, OutQuant.FP8_GROUP: 1, OutQuant.MXFP4: 2}


def unsupported(
    x: torch.Tensor, w: torch.Tensor, mx_scale: torch.Tensor | None, out: torch.Tensor, config: CudaConfig
) -> str | None:
    """Why the kernel of `config` cannot take the tensors, or None when it can."""
    k, columns = x.shape[2], w.shape[2]
    if not x.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (9, 0):
        return "needs an NVIDIA GPU of compute capability 9.0"
    if isinstance(config, WgmmaConfig) and torch.cuda.get_device_capability(x.device) != (9, 0):
        return "wgmma exists in compute capability 9.0 alone"
    if not hasattr(torch.cuda, "_compile_kernel"):
        return f"torch {torch.__version__} cannot compile CUDA sources"
    if x.dtype != torch.bfloat16 or w.dtype not in (torch.float8_e4m3fn, torch.uint8):
        return f"activations {x.dtype} with weights {w.dtype}"
    if k % _CHUNK_K or columns % FP8_GROUP:
        return f"K = {k} is not a multiple of 64 or N = {columns} not of 128"
    if not config.fits(k, columns):
        return f"{config} does not divide K = {k}, N = {columns}"
    if isinstance(config, WgmmaConfig) and form_of(out) is OutQuant.FP8_GROUP and config.block_columns % FP8_GROUP:
        return f"{config} splits a quantization group of {FP8_GROUP} columns"
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
def compile_variant(config: CudaConfig, k: int, columns: int, mxfp4_weight: bool, form: OutQuant) -> Any:
    """The kernel for one shape and configuration; compiled once per process.

    :raises EngineError: the configuration does not divide the shape, or NVRTC refuses the source
    """
    if not config.fits(k, columns):
        raise EngineError(
            "absorb",
            found=f"{config} for K = {k}, N = {columns}",
            wanted="a configuration that divides the shape",
            remedy="correct the tuning table",
        )
    if torch.cuda.is_current_stream_capturing():
        raise EngineError(
            "absorb",
            found=f"first call for K = {k}, N = {columns}, {config} inside a CUDA-graph capture",
            wanted="a call with the same shapes before the capture, which compiles the kernel",
            remedy="run the model once, eagerly, before capturing it",
        )
    wgmma = isinstance(config, WgmmaConfig)
    parts = ["absorb_common.cuh", *(["absorb_wgmma.cuh"] if wgmma else []), f"{config.kernel}.cu"]
    files = resources.files("weightprep.runtime")
    source = "".join(files.joinpath(part).read_text(encoding="utf-8") for part in parts)
    macros = {"K": k, "N": columns, "WEIGHT": int(mxfp4_weight), "OUT": _FORM_MACRO[form], **config.macros()}
    compile_kernel: Callable[..., Any] = torch.cuda._compile_kernel
    try:
        kernel = compile_kernel(
            source,
            config.kernel,
            compute_capability="90a" if wgmma else None,
            nvcc_options=[f"-DWP_{macro}={value}" for macro, value in macros.items()],
        )
    except (RuntimeError, OSError) as error:
        raise EngineError(
            config.kernel,
            found=f"NVRTC: {error}",
            wanted="a CUDA installation that NVRTC can use",
            remedy="set CUDA_HOME, or choose backend='triton'",
        ) from error
    launcher.allow_shared_bytes(kernel, config.shared_bytes(k))
    return kernel


def launch_cuda(
    x: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    mx_scale: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    config: CudaConfig,
) -> None:
    """Launch for tensors that :func:`unsupported` has accepted; the arguments are those of launch_absorb.

    `w_scale`, where given, is one float32.
    """
    rows, heads, k = x.shape
    columns = w.shape[2]
    kernel = compile_variant(config, k, columns, mx_scale is not None, form_of(out))
    # torch's launcher has no null pointer; the kernel does not read `x` in the place of an absent tensor.
    others = [w, *(x if t is None else t for t in (w_scale, mx_scale)), out, x if scales is None else scales]
    strides = [w.stride(0), w.stride(2), *launch_strides(mx_scale, out, scales)]
    tiles = [] if config.kernel == "absorb_tile" else [config.row_tiles]
    activations: list[torch.Tensor | TensorMap | int] = [x, x.stride(0), x.stride(1)]
    if isinstance(config, WgmmaConfig) and config.row_tiles > 1:
        activations = [activation_map(x, config.rows)]
    launcher.launch(
        kernel,
        grid=(columns // config.block_columns, heads, -(-rows // config.block_rows)),
        block=(config.threads, 1, 1),
        shared_bytes=config.shared_bytes(k),
        args=[*activations, *others, *strides, rows, *tiles],
        early=config.prefetch,
    )
