"""All 256 codes of e8m0."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from weightprep.formats.e8m0 import decode_e8m0, encode_e8m0

ALL_CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_every_code_decodes_like_ml_dtypes(dtype: torch.dtype) -> None:
    ours = decode_e8m0(torch.from_numpy(ALL_CODES.copy()).view(dtype)).numpy()
    np.testing.assert_array_equal(ours, ALL_CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_the_codes_that_other_decoders_get_wrong() -> None:
    codes = torch.tensor([0, 1, 126, 127, 128, 134, 254, 255], dtype=torch.uint8)
    wanted = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 128.0, 2.0**127]
    assert decode_e8m0(codes)[:-1].tolist() == wanted
    assert torch.isnan(decode_e8m0(codes)[-1])


def test_encoding_is_the_inverse_and_clamps() -> None:
    exponents = torch.arange(-140, 141, dtype=torch.int32)
    codes = encode_e8m0(exponents)
    assert codes.tolist() == [min(max(int(e), -127), 127) + 127 for e in exponents]
    assert decode_e8m0(codes)[exponents == 5].item() == 32.0
