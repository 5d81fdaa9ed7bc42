"""What a layer's absorbed weights must be, from the files of a checkpoint alone: NumPy and ml_dtypes, none of the
package's code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "transforms"))

from mxfp4_oracle import scalar_mxfp4

__all__ = ["bf16_fp8_absorbed", "fp8_absorbed", "kv_b_numbers", "mxfp4_absorbed", "same_bytes"]

SCALES = (".weight_scale_inv", ".weight_scale")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
NUMPY = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.int8: np.int8,
    torch.uint8: ml_dtypes.float8_e8m0fnu,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}


class Files:
    """Tensors of a checkpoint by name."""

    def __init__(self, root: Path) -> None:
        index = root / "model.safetensors.index.json"
        self.root = root
        self.files = json.loads(index.read_text())["weight_map"] if index.is_file() else {}

    def get(self, name: str) -> torch.Tensor | None:
        path = self.root / self.files.get(name, "model.safetensors")
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118


def _values(tensor: torch.Tensor) -> np.ndarray:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(NUMPY[tensor.dtype]).astype(np.float32).reshape(tensor.shape)


def kv_b_numbers(root: Path, module: str) -> np.ndarray:
    """kv_b_proj [N, K] as float32 numbers; unquantized ones as the bf16 that sglang holds them in."""
    files = Files(root)
    weight = files.get(f"{module}.weight")
    assert weight is not None, module
    scale = next((found for suffix in SCALES if (found := files.get(module + suffix)) is not None), None)
    if scale is None:
        return _values(weight).astype(ml_dtypes.bfloat16).astype(np.float32)
    factors = _values(scale)
    if weight.dtype is torch.uint8:
        codes = weight.numpy()
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
        return E2M1[pairs] * np.repeat(factors, 32, axis=1)
    values = _values(weight)
    if factors.ndim == 2 and factors.shape[1] > 1:
        factors = np.repeat(np.repeat(factors, 128, axis=0), 128, axis=1)[: values.shape[0], : values.shape[1]]
    elif factors.size > 1:
        factors = factors.reshape(-1, 1)
    return values * factors


def _halves(values: np.ndarray, nope: int, v: int) -> tuple[np.ndarray, np.ndarray]:
    heads = values.reshape(-1, nope + v, values.shape[1])
    return heads[:, :nope], heads[:, nope:].transpose(0, 2, 1)


def _fp8(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
    m = np.float32(448) * (np.float32(1) / np.abs(values).max())
    scaled = np.clip(values * m, np.float32(-448), np.float32(448))
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), np.float32(1) / m


def fp8_absorbed(root: Path, module: str, nope: int, v: int, *, fnuz: bool = False) -> dict[str, np.ndarray]:
    """w_kc, w_vc (bytes) and w_scale under one scale, 448 * (1 / amax) in float32; a source that has one keeps it.

    :param fnuz: the same numbers in float8_e4m3fnuz
    """
    files = Files(root)
    stored, scale = files.get(f"{module}.weight"), files.get(f"{module}.weight_scale")
    if stored is not None and stored.dtype is torch.float8_e4m3fn and scale is not None and scale.numel() == 1:
        codes, factor = stored.view(torch.uint8).numpy(), _values(scale).reshape(())
    else:
        codes, factor = _fp8(kv_b_numbers(root, module))
    if fnuz:
        numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 2
        codes, factor = numbers.astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8), factor * np.float32(2)
    w_kc, w_vc = _halves(codes, nope, v)
    return {"w_kc": w_kc, "w_vc": w_vc, "w_scale": np.asarray(factor, dtype=np.float32)}


def bf16_fp8_absorbed(root: Path, module: str, nope: int, v: int) -> dict[str, np.ndarray]:
    """w_kc in bf16 (bits), w_vc in fp8 under a scale of its own."""
    w_kc, w_vc = _halves(kv_b_numbers(root, module), nope, v)
    codes, factor = _fp8(w_vc)
    bits = w_kc.astype(ml_dtypes.bfloat16).view(np.uint16)
    return {"w_kc": bits, "w_vc": codes, "w_scale": np.asarray(factor, dtype=np.float32)}


def mxfp4_absorbed(root: Path, module: str, nope: int, v: int) -> dict[str, np.ndarray]:
    """Packed matrices and e8m0 bytes, each in groups of 32 along the axis that its matmul contracts over."""
    made = {}
    for values, weight, scale in zip(
        _halves(kv_b_numbers(root, module), nope, v), ("w_kc", "w_vc"), ("w_scale_k", "w_scale_v"), strict=True
    ):
        heads, depth, columns = values.shape
        rows = np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1, depth)
        packed, exponents = scalar_mxfp4(torch.from_numpy(rows))
        made[weight] = packed.numpy().reshape(heads, columns, -1).transpose(0, 2, 1)
        made[scale] = exponents.numpy().reshape(heads, columns, -1).transpose(0, 2, 1)
    return made


def same_bytes(found: dict[str, torch.Tensor], wanted: dict[str, np.ndarray], where: str) -> None:
    assert found.keys() == wanted.keys(), where
    for role, tensor in found.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert tuple(tensor.shape) == wanted[role].shape, f"{where} {role}"
        expected = np.ascontiguousarray(wanted[role]).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(raw, expected, err_msg=f"{where} {role}")
