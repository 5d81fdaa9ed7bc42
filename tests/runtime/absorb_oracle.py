"""What the absorbed products must give, in NumPy and ml_dtypes: shares no code with weightprep."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

BF16_ROUNDING = 2.0**-8  # half an ulp of a significand of 8 bits, relative
POISON_BYTE = 0xA5


def to_float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float64).numpy()


def e2m1_decode(packed: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray:
    """float64 values of packed e2m1 bytes, two along `axis` with the first in the low nibble, groups of 32."""
    codes = np.stack((packed & 0xF, packed >> 4), axis=axis + 1)
    shape = list(packed.shape)
    shape[axis] *= 2
    values = codes.astype(np.uint8).reshape(shape).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    power = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return values * np.repeat(power, 32, axis=axis)


def fp8_groups(
    flat: np.ndarray, fp8: type = ml_dtypes.float8_e4m3fn, top: float = 448.0
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and float32 scales that quantizing float32 `flat` (M, W) in groups of 128 must give."""
    groups = flat.astype(np.float32).reshape(flat.shape[0], -1, 128)
    amax = np.maximum(np.abs(groups).max(axis=2), np.float32(1e-10))
    scale = (amax / np.float32(top)).astype(np.float32)
    inverse = (np.float32(1.0) / scale).astype(np.float32)
    quantized = (groups * inverse[..., None]).astype(np.float32).astype(fp8)
    return quantized.reshape(flat.shape).view(np.uint8), scale


def mxfp4_groups(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and e8m0 bytes of float32 `flat` (M, W): exponent of amax rounded up at 1.75, ties away from 0."""
    groups = flat.astype(np.float64).reshape(flat.shape[0], -1, 32)
    amax = np.abs(groups).max(axis=2)
    mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = np.where(amax == 0, -127, exponent - 1 + (mantissa >= 0.875) - 2).clip(-127, 127)
    scaled = groups / np.exp2(power.astype(np.float64))[..., None]
    grid = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = np.abs(np.abs(scaled)[..., None] - grid)
    code = 7 - np.argmin(distance[..., ::-1], axis=-1)  # the larger one on a tie
    code = (code | (np.signbit(scaled) << 3)).reshape(flat.shape[0], -1, 2).astype(np.uint8)
    return code[..., 0] | (code[..., 1] << 4), (power + 127).astype(np.uint8)


@dataclass(frozen=True)
class Weight:
    """An absorbed weight as its owner stores it: (H, N, K) in memory, seen as (H, K, N), with its scale."""

    w: torch.Tensor
    scale: torch.Tensor | None
    mx_scale: torch.Tensor | None
    exact: np.ndarray

    @staticmethod
    def make(kind: str, heads: int, k: int, n: int, device: str, seed: int = 0) -> Weight:
        generator = torch.Generator().manual_seed(seed)
        if kind == "mxfp4":
            packed = torch.randint(0, 256, (heads, n, k // 2), generator=generator, dtype=torch.uint8)
            mx = torch.randint(118, 126, (heads, n, k // 32), generator=generator, dtype=torch.uint8)
            exact = e2m1_decode(packed.numpy(), mx.numpy(), axis=2).swapaxes(1, 2)
            return Weight(packed.to(device).transpose(1, 2), None, mx.to(device).transpose(1, 2), exact)
        wide = torch.randn((heads, n, k), generator=generator)
        if kind == "bf16":
            w = wide.bfloat16()
            return Weight(w.to(device).transpose(1, 2), None, None, to_float64(w).swapaxes(1, 2))
        dtype = torch.float8_e4m3fn if kind == "e4m3fn" else torch.float8_e4m3fnuz
        w = (wide * 40).clamp(-200, 200).to(dtype)
        scale = torch.tensor([0.0123], dtype=torch.float32)
        exact = to_float64(w).swapaxes(1, 2) * np.float64(scale.numpy()[0])
        return Weight(w.to(device).transpose(1, 2), scale.to(device), None, exact)


def product(x: torch.Tensor, weight: Weight) -> np.ndarray:
    """float64 (M, H, N)."""
    return _bmm(to_float64(x), weight.exact)


def _bmm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.matmul(x.transpose(1, 0, 2), w).transpose(1, 0, 2)


def bound(x: torch.Tensor, weight: Weight) -> np.ndarray:
    """Largest error a bf16 result may have: one rounding to bf16, and K float32 additions of the terms' magnitudes.

    Products of bf16 activations and widened weights are exact in float32; a sum of K of them in any order is off by at
    most K * 2^-24 of the sum of their magnitudes, and the scale multiplies once more.
    """
    terms = _bmm(np.abs(to_float64(x)), np.abs(weight.exact))
    return BF16_ROUNDING * np.abs(product(x, weight)) + (x.shape[2] + 2) * 2.0**-24 * terms + 1e-30


def assert_close(out: torch.Tensor, x: torch.Tensor, weight: Weight) -> None:
    got, wanted, limit = to_float64(out), product(x, weight), bound(x, weight)
    bad = ~(np.abs(got - wanted) <= limit)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(f"{bad.sum()} of {bad.size} wrong; first {first}: {got[first]} for {wanted[first]}")


def assert_same_bytes(got: torch.Tensor, wanted: np.ndarray) -> None:
    raw = torch.empty(got.shape, dtype=got.dtype).copy_(got).view(torch.uint8).numpy()
    expected = np.ascontiguousarray(wanted).view(np.uint8).reshape(raw.shape)
    bad = raw != expected
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{bad.sum()} of {bad.size} bytes differ; first {first}: {raw[first]:#x}, not {expected[first]:#x}"
        )
