"""Every code of both e4m3 formats against ml_dtypes, and the conversion between them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from weightprep.errors import CheckpointError
from weightprep.formats.e4m3 import e4m3_dtype, fn_to_fnuz, has_nan, quantization_multiplier, quantize_e4m3fn

ALL_CODES = np.arange(256, dtype=np.uint8)
NUMPY_TYPE = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz}


@pytest.mark.parametrize("dtype", NUMPY_TYPE, ids=str)
def test_torch_decodes_every_code_like_ml_dtypes(dtype: torch.dtype) -> None:
    ours = torch.from_numpy(ALL_CODES.copy()).view(dtype).to(torch.float32).numpy()
    np.testing.assert_array_equal(ours, ALL_CODES.view(NUMPY_TYPE[dtype]).astype(np.float32))


@pytest.mark.parametrize("dtype", NUMPY_TYPE, ids=str)
def test_has_nan_knows_exactly_the_nan_codes(dtype: torch.dtype) -> None:
    found = [code for code in range(256) if has_nan(torch.tensor([0, code], dtype=torch.uint8).view(dtype))]
    assert found == np.flatnonzero(np.isnan(ALL_CODES.view(NUMPY_TYPE[dtype]).astype(np.float32))).tolist()
    assert len(found) == (2 if dtype is torch.float8_e4m3fn else 1)


def test_fnuz_holds_the_same_numbers_under_twice_the_scale() -> None:
    finite = np.array([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=np.uint8)
    weight, scale = fn_to_fnuz(torch.from_numpy(finite.copy()).view(torch.float8_e4m3fn), torch.tensor(0.375))
    codes = weight.view(torch.uint8).numpy()
    values = codes.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32) * scale.numpy()
    np.testing.assert_array_equal(values, finite.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.375))
    assert weight.dtype is torch.float8_e4m3fnuz
    assert codes[finite == 0x80] == 0, "-0 is NaN in fnuz"


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fnuz_refuses_a_nan_instead_of_making_it_240(code: int) -> None:
    weight = torch.tensor([1, code], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"layer\.weight: found a NaN code"):
        fn_to_fnuz(weight, torch.tensor(1.0), "layer.weight")


def test_fnuz_does_not_touch_its_input() -> None:
    weight = torch.tensor([0x80, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn)
    fn_to_fnuz(weight, torch.tensor(1.0))
    assert weight.view(torch.uint8).tolist() == [0x80, 0x7E]


def test_target_table() -> None:
    wanted = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz, "sm90": torch.float8_e4m3fn}
    assert {target: e4m3_dtype(target) for target in wanted} == wanted


@pytest.mark.parametrize("copies", [1, 3], ids=["one by one", "by table"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_rounded_like_ml_dtypes(dtype: torch.dtype, copies: int) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = patterns.view(ml_dtypes.bfloat16 if dtype is torch.bfloat16 else np.float16).astype(np.float32)
    # large weights are rounded by table, small ones element by element
    values = np.tile(values[np.isfinite(values)], (copies, 1))
    with np.errstate(over="ignore"):
        # ml_dtypes does not saturate, so the clamp is written out here too
        wanted = np.clip(values * np.float32(1.7), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    ours = quantize_e4m3fn(torch.from_numpy(values).to(dtype), torch.tensor(1.7, dtype=torch.float32))
    np.testing.assert_array_equal(ours.view(torch.uint8).numpy(), wanted)


@pytest.mark.parametrize("shape", [(1, 1), (300, 1)], ids=["one m", "m for each row"])
def test_large_float32_weights_are_rounded_part_by_part(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    values, m = rng.standard_normal((300, 700)).astype(np.float32), rng.uniform(50, 200, shape).astype(np.float32)
    wanted = np.clip(values * m, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    ours = quantize_e4m3fn(torch.from_numpy(values), torch.from_numpy(m if shape[0] > 1 else m.reshape(())))
    np.testing.assert_array_equal(ours.view(torch.uint8).numpy(), wanted)


def test_multiplier_is_rounded_twice() -> None:
    amax = np.random.default_rng(0).uniform(1e-3, 10, 10_000).astype(np.float32)
    m, scale = quantization_multiplier(torch.from_numpy(amax))
    wanted = np.float32(448) * (np.float32(1) / amax)
    np.testing.assert_array_equal(m.numpy(), wanted)
    np.testing.assert_array_equal(scale.numpy(), np.float32(1) / wanted)
    differing = float(np.mean(wanted != np.float32(448) / amax))
    assert 0.1 < differing < 0.4, "a true division must be another formula, or this test shows nothing"


def test_multiplier_of_zero_and_of_tiny() -> None:
    m, scale = quantization_multiplier(torch.tensor([0.0, 1e-30]))
    assert m[0] == 1
    assert scale[0] == 1
    assert torch.isfinite(m).all()
    assert (scale > 0).all()
