"""CUtensorMap: what Hopper's copy engine (TMA) must know to copy tiles of a tensor into shared memory."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import torch

__all__ = ["TensorMap", "activation_map"]

# From cuda.h, CU_TENSOR_MAP_: DATA_TYPE_BFLOAT16, INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_L2_256B,
# FLOAT_OOB_FILL_NONE.
_BFLOAT16: Final = 9
_INTERLEAVE_NONE: Final = 0
_SWIZZLE_128B: Final = 3
_L2_PROMOTION_256B: Final = 3
_OOB_ZEROS: Final = 0
_CHUNK_K: Final = 64


class TensorMap(ctypes.Structure):
    """CUtensorMap: 128 opaque bytes."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def activation_map(x: torch.Tensor, rows: int) -> TensorMap:
    """Tiles of `rows` x 64 elements of one head of x (M, H, K), swizzled by 128 bytes; rows past M read as zeros.

    :param x: bf16, k contiguous, pointer and other strides multiples of 16 bytes
    :raises RuntimeError: the driver refuses the description
    """
    return _encode(x.data_ptr(), tuple(x.shape), x.stride()[:2], rows)


@functools.lru_cache(maxsize=4096)
def _encode(pointer: int, shape: tuple[int, int, int], strides: tuple[int, int], rows: int) -> TensorMap:
    m, heads, k = shape
    # The driver wants the map at a multiple of 64 bytes.
    memory = (ctypes.c_char * 192)()
    aligned = (ctypes.addressof(memory) + 63) // 64 * 64
    utils: Any = torch.cuda._utils
    utils._check_cuda(
        utils._get_gpu_runtime_library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned),
            _BFLOAT16,
            3,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * 3)(k, m, heads),
            (ctypes.c_uint64 * 2)(2 * strides[0], 2 * strides[1]),
            (ctypes.c_uint32 * 3)(_CHUNK_K, rows, 1),
            (ctypes.c_uint32 * 3)(1, 1, 1),
            _INTERLEAVE_NONE,
            _SWIZZLE_128B,
            _L2_PROMOTION_256B,
            _OOB_ZEROS,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))
