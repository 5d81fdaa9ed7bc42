"""aiter's MXFP4 quantizer written out in NumPy, without the package's own code."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["scalar_mxfp4"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)


def scalar_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dynamic_mxfp4_quant's contract [M, N] -> [M, N/2], [M, N/32], in NumPy: rule even, ties away from zero.

    The scale comes back column-major, as aiter returns it.
    """
    groups = values.double().numpy().reshape(values.shape[0], -1, 32)
    amax = np.abs(groups).max(axis=-1)
    mantissa, exponent = np.frexp(amax)
    # frexp's mantissa is in [.5, 1): from .875 on, one mantissa bit rounds up to the next power
    unbiased = np.clip(np.where(amax > 0, exponent - 1 + (mantissa >= 0.875) - 2, -127), -127, 127)
    scaled = np.minimum(np.abs(np.ldexp(groups, -unbiased[..., None])), 6)
    # a value at or above a midpoint belongs to the code above it
    codes = np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, scaled, side="right").astype(np.uint8)
    codes = (codes | (np.signbit(groups).astype(np.uint8) << 3)).reshape(values.shape[0], -1)
    scale = torch.from_numpy((unbiased + 127).astype(np.uint8))
    return torch.from_numpy(codes[:, ::2] | (codes[:, 1::2] << 4)), scale.t().contiguous().t()
