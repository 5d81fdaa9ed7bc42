"""The sixteen codes of e2m1, their packing, and rounding at every tie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from weightprep.formats.e2m1 import decode_e2m1, encode_e2m1, pack_nibbles

# written out: code -> value
TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_every_byte_decodes_low_nibble_first() -> None:
    decoded = decode_e2m1(torch.arange(256, dtype=torch.uint8).unsqueeze(1)).numpy()
    wanted = np.array([[TABLE[byte & 15], TABLE[byte >> 4]] for byte in range(256)], dtype=np.float32)
    np.testing.assert_array_equal(decoded, wanted)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(wanted))


def test_table_is_that_of_ml_dtypes() -> None:
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values, np.array(TABLE, dtype=np.float32))


def test_ties_go_to_the_even_code() -> None:
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for value, code in ties.items():
        assert encode_e2m1(torch.tensor([value, -value])).tolist() == [code, code | 8]


def test_ties_can_go_away_from_zero() -> None:
    ties = {0.25: 1, 0.75: 2, 1.25: 3, 1.75: 4, 2.5: 5, 3.5: 6, 5.0: 7}
    for value, code in ties.items():
        below = torch.nextafter(torch.tensor(value), torch.tensor(0.0)).item()
        assert encode_e2m1(torch.tensor([value, -value]), ties="away").tolist() == [code, code | 8]
        assert encode_e2m1(torch.tensor([below]), ties="away").tolist() == [code - 1]


def test_rounding_agrees_with_ml_dtypes_on_a_dense_grid() -> None:
    grid = np.linspace(-6, 6, 12 * 512 + 1, dtype=np.float32)
    near = np.concatenate([grid, np.nextafter(grid, np.float32(np.inf)), np.nextafter(grid, np.float32(-np.inf))])
    near = near[np.abs(near) <= 6]
    wanted = near.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(encode_e2m1(torch.from_numpy(near)).numpy(), wanted)


def test_beyond_six_saturates() -> None:
    assert encode_e2m1(torch.tensor([6.0, 7.9, 1e30, -7.9])).tolist() == [7, 7, 7, 15]


def test_packing_is_the_inverse_of_unpacking() -> None:
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    again = encode_e2m1(decode_e2m1(pack_nibbles(codes)))
    assert torch.equal(again, codes)
    assert pack_nibbles(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x21
