"""Weights in every stored encoding, with what they mean in NumPy, made and read without the package's own code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from weightprep.formats import EncodedShape, Encoding
from weightprep.transforms import Bundle

__all__ = ["ENCODINGS", "meaning", "source"]

ENCODINGS = tuple(Encoding)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FLOAT_TYPES = {Encoding.BF16: torch.bfloat16, Encoding.FP16: torch.float16, Encoding.FP32: torch.float32}
BLOCKS = (Encoding.FP8_BLOCK, Encoding.INT8_BLOCK)
CHANNELS = (Encoding.FP8_CHANNEL, Encoding.INT8_CHANNEL)


def source(
    encoding: Encoding, rows: int, cols: int, seed: int = 0, *, block: tuple[int, int] = (128, 128), e8m0: bool = False
) -> Bundle:
    """A weight of random finite codes under random scales; floats are normally distributed."""
    rng = np.random.default_rng(seed)
    if encoding in FLOAT_TYPES:
        weight = torch.from_numpy(rng.standard_normal((rows, cols)).astype(np.float32)).to(FLOAT_TYPES[encoding])
        return Bundle.source(weight, None, EncodedShape(encoding, rows, cols))
    if encoding is Encoding.MXFP4:
        packed = torch.from_numpy(rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8))
        scale = torch.from_numpy(rng.integers(115, 125, (rows, cols // 32), dtype=np.uint8))
        return Bundle.source(packed, scale, EncodedShape(encoding, rows, cols))
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    is_fp8 = encoding.value.startswith("fp8")
    if is_fp8:
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn if is_fp8 else torch.int8)
    shape: tuple[int, ...] = ()
    if encoding in BLOCKS:
        shape = (-(-rows // block[0]), -(-cols // block[1]))
    elif encoding in CHANNELS:
        shape = (rows, 1)
    if e8m0:
        scale = torch.from_numpy(np.asarray(rng.integers(112, 120, shape, dtype=np.uint8)))
    else:
        scale = torch.from_numpy(np.asarray(rng.uniform(1e-4, 1e-2, shape), dtype=np.float32))
    return Bundle.source(weight, scale, EncodedShape(encoding, rows, cols, block if encoding in BLOCKS else None))


def meaning(bundle: Bundle) -> np.ndarray:
    """The numbers that a source stands for, float32 products of its codes and scales, element by element."""
    encoded = bundle.encoded
    if encoded.encoding in FLOAT_TYPES:
        return bundle["weight"].to(torch.float32).numpy()
    stored = bundle["scale"]
    if stored.dtype is torch.uint8:
        scale = stored.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    else:
        scale = stored.numpy().astype(np.float32)
    codes = bundle["weight"].view(torch.uint8).numpy()
    out = np.empty((encoded.rows, encoded.cols), dtype=np.float32)
    for row in range(encoded.rows):
        if encoded.encoding is Encoding.MXFP4:
            pairs = np.stack([codes[row] & 15, codes[row] >> 4], axis=-1).reshape(-1)
            out[row] = E2M1[pairs].astype(np.float32) * np.repeat(scale[row], 32)
            continue
        typed = codes[row].view(np.int8 if encoded.encoding.value.startswith("int8") else ml_dtypes.float8_e4m3fn)
        if encoded.block is not None:
            block_row = (encoded.row_offset % encoded.block[0] + row) // encoded.block[0]
            row_scale = scale[block_row][np.arange(encoded.cols) // encoded.block[1]]
        else:
            row_scale = scale.reshape(-1)[row if scale.size > 1 else 0]
        out[row] = typed.astype(np.float32) * row_scale
    return out
