"""Launch a kernel that torch compiled, with programmatic stream serialization, which torch's own launcher lacks.

A kernel launched that way may begin while the kernel before it drains; it must execute `griddepcontrol.wait` before it
touches memory that the other one reads or writes. Captured into a CUDA graph the launch becomes a programmatic edge.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from weightprep.runtime.cuda_tensor_map import TensorMap

__all__ = ["allow_shared_bytes", "launch"]

# From cuda.h: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
# From cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MAX_DYNAMIC_SHARED_BYTES: Final = 8


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
    shared_bytes: int,
    args: Sequence[torch.Tensor | TensorMap | int],
    early: bool,
) -> None:
    """Launch on the current stream.

    :param kernel: what `torch.cuda._compile_kernel` returned
    :param shared_bytes: dynamic shared memory of a block, within what :func:`allow_shared_bytes` was told
    :param args: tensors become device pointers, integers 32-bit ints, tensor maps are passed as they are
    :param early: allow the kernel to begin before the one ahead of it in the stream has finished
    """
    values = [_as_c(a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
    stream = torch.cuda.current_stream().cuda_stream
    config = _Config(grid, block, shared_bytes, stream, ctypes.pointer(attribute), int(early))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), kernel.func, pointers, None))


def allow_shared_bytes(kernel: Any, size: int) -> None:
    """Let blocks of `kernel` have `size` bytes of dynamic shared memory; beyond 48 KiB the driver asks for this."""
    _check(_driver().cuFuncSetAttribute(kernel.func, ctypes.c_int(_MAX_DYNAMIC_SHARED_BYTES), ctypes.c_int(size)))


def _as_c(argument: torch.Tensor | TensorMap | int) -> Any:
    if isinstance(argument, TensorMap):
        return argument
    return ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, torch.Tensor) else ctypes.c_int(argument)


def _driver() -> Any:
    utils: Any = torch.cuda._utils
    return utils._get_gpu_runtime_library()


def _check(result: int) -> None:
    utils: Any = torch.cuda._utils
    utils._check_cuda(result)
