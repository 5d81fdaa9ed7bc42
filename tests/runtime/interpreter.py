"""Exact float casts for Triton's interpreter.

The interpreter of Triton 3.8 converts float32 to e4m3fn without carrying out of the mantissa (0.49 becomes 0.25) and
to bfloat16 by truncation. A tolerance set on such results would be a wrong one, so every cast between float types goes
through torch, which rounds to nearest even as the GPUs do. Its dot multiplies the bit patterns of bfloat16 operands as
integers, so operands are widened to float32 first, which is exact, as the GPUs' products are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_CARRIER = {
    1: (np.uint8, torch.uint8),
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}


def _cast(source: Any, target: Any) -> Any | None:
    """The handle `source` converted by torch, or None where one side is not a float type."""
    of, to = _TORCH.get(source.dtype.scalar), _TORCH.get(target.scalar)
    if of is None or to is None:
        return None
    data = np.ascontiguousarray(source.data)
    values = torch.from_numpy(data.view(_CARRIER[data.itemsize][0]).copy()).view(of).to(to)
    raw = values.contiguous().view(_CARRIER[values.element_size()][1]).numpy()
    storage = interpreter._get_np_dtype(target)
    return interpreter.TensorHandle(raw.view(storage).reshape(data.shape), target.scalar)


def install_exact_casts() -> None:
    """Patch the interpreter of this process; calling it twice changes nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "exact_casts", False):
        return
    cast_impl, fp_to_fp, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def exact_cast(self: Any, source: Any, target: Any) -> Any:
        done = _cast(source, target)
        return cast_impl(self, source, target) if done is None else done

    def exact_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        towards_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        done = None if towards_zero else _cast(source, target)
        return fp_to_fp(self, source, target, rounding) if done is None else done

    def exact_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = (_cast(operand, tl.float32) for operand in (a, b))
        a, b = (operand if cast is None else cast for operand, cast in zip((a, b), wide, strict=True))
        return dot(self, a, b, d, *rest)

    builder.create_dot = exact_dot
    builder.cast_impl, builder.create_fp_to_fp, builder.exact_casts = exact_cast, exact_fp_to_fp, True
