"""Launch a kernel that torch compiled, with programmatic stream serialization, which torch's own launcher lacks.

A kernel launched that way may begin while the kernel before it drains; it must execute `griddepcontrol.wait` before it
touches memory that the other one reads or writes. Captured into a CUDA graph the launch becomes a programmatic edge.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

__all__ = ["launch"]

# From cuda.h: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding to 8 bytes, and a union of 64 bytes of which we use the first int."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch(
    kernel: Any,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[torch.Tensor | int],
    early: bool,
) -> None:
    """Launch on the current stream.

    :param kernel: what `torch.cuda._compile_kernel` returned
    :param args: tensors become device pointers, integers 32-bit ints
    :param early: allow the kernel to begin before the one ahead of it in the stream has finished
    """
    values: list[Any] = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args
    ]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
    config = _Config(grid, block, 0, torch.cuda.current_stream().cuda_stream, ctypes.pointer(attribute), int(early))
    utils: Any = torch.cuda._utils
    utils._check_cuda(
        utils._get_gpu_runtime_library().cuLaunchKernelEx(ctypes.byref(config), kernel.func, pointers, None)
    )
