"""decode_e4m3fn against ml_dtypes, all codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from weightprep.formats.e4m3 import decode_e4m3fn


def test_all_codes_but_nan() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)
    wanted = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)

    found = decode_e4m3fn(torch.from_numpy(codes).view(torch.float8_e4m3fn))

    # bits, because -0 == 0
    assert (found.numpy().view(np.uint32) == wanted.view(np.uint32)).all()
